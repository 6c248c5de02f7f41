"""Addresses that other machines reach need tokens, or a word that says that they do not."""

from pathlib import Path

import pytest

from tests.settings.reading import problem, problems, read

OPEN = "0.0.0.0"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1"])
def test_loopback_needs_no_token(tmp_path: Path, host: str) -> None:
    address = f"[{host}]:0" if ":" in host else f"{host}:0"
    text = f"listen: {{host: '{host}'}}\notlp: {{grpc: '{address}', http: '{address}'}}\n"
    assert not read(tmp_path, text).security.insecure


@pytest.mark.parametrize("host", [OPEN, "::", "10.0.0.5", "gpu-7", "localhost.evil.example"])
def test_an_open_address_without_a_token_is_refused_with_what_to_do(
    tmp_path: Path, host: str
) -> None:
    found = problem(tmp_path, f"listen: {{host: '{host}'}}")
    assert found.startswith(f"security: listen.host {host} is open to other machines")
    assert "security.read_tokens" in found
    assert "--insecure" in found


def test_every_open_address_is_named(tmp_path: Path) -> None:
    text = f"listen: {{host: {OPEN}}}\notlp: {{grpc: '{OPEN}:1', http: '[::]:2'}}\n"
    found = problem(tmp_path, text)
    for named in (f"listen.host {OPEN}", f"otlp.grpc {OPEN}", "otlp.http ::"):
        assert named in found
    locked = problem(tmp_path, f"{text}security: {{read_tokens: /tokens}}")
    assert "listen.host" not in locked
    assert "security.ingest_tokens" in locked
    both = f"{text}security: {{read_tokens: /tokens, ingest_tokens: /tokens}}"
    assert read(tmp_path, both).security.read_tokens == Path("/tokens")


def test_insecure_says_it_in_so_many_words(tmp_path: Path) -> None:
    text = f"listen: {{host: {OPEN}}}\notlp: {{grpc: '{OPEN}:1', http: null}}\n"
    assert read(tmp_path, f"{text}security: {{insecure: true}}").security.insecure
    assert read(tmp_path, text, {"GOODPUT_SECURITY__INSECURE": "true"}).security.insecure


def test_the_proxy_needs_no_token_of_its_own(tmp_path: Path) -> None:
    """It passes on what its client sends, and the engine checks that."""
    engines = "engines: [{name: a, url: http://127.0.0.1:1}]"
    assert read(tmp_path, f"proxy: {{listen: '{OPEN}:8080'}}\n{engines}").proxy.listen


def test_a_wrong_address_is_reported_beside_the_rest(tmp_path: Path) -> None:
    found = problems(tmp_path, f"listen: {{host: {OPEN}, port: -1}}\nsecurity: {{tls_key: /k}}")
    assert [line.partition(":")[0] for line in found] == ["listen.port", "security.tls_key"]


@pytest.mark.parametrize("key", ["tls_key", "tls_certificate"])
def test_a_certificate_and_its_key_go_together(tmp_path: Path, key: str) -> None:
    assert "go together" in problem(tmp_path, f"security: {{{key}: /file}}")


@pytest.mark.parametrize("host", ["http://a", "a:80", "a b", "*", "", "*.*.a"])
def test_an_allowed_host_is_a_name(tmp_path: Path, host: str) -> None:
    found = problem(tmp_path, f"security: {{allowed_hosts: ['{host}']}}")
    assert found.startswith("security.allowed_hosts[0]")
