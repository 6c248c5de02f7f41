"""Files that a person names: tokens among them, and the names that an agent is called by."""

import os
import threading
from pathlib import Path

import pytest

from agent.errors import SettingsInvalid
from agent.settings.access import AccessPolicy, AccessRefusal, TokenFile, known_hosts
from agent.settings.named_files import in_time, read_named_file
from tests.real_parts.waiting import eventually
from tests.settings.reading import problem, problems, read

ONE, OTHER, THIRD = "first-token-of-the-test", "other-token-of-the-test", "third-token-of-the-test"


def written(folder: Path, *tokens: str) -> Path:
    """A file of these tokens; a new one in place of an older, as an orchestrator writes it."""
    file, new = folder / "tokens", folder / "new"
    new.write_text("\n".join(tokens), encoding="utf-8")
    new.rename(file)
    return file


@pytest.mark.parametrize("form", ["Bearer {}", "bearer {}", "BEARER  {} "])
def test_each_token_of_the_file_opens_the_door(tmp_path: Path, form: str) -> None:
    access = AccessPolicy(tokens=TokenFile("security.read_tokens", written(tmp_path, ONE, OTHER)))
    for token in (ONE, OTHER):
        assert access.refusal("evil.example", form.format(token)) is None


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", f"Basic {ONE}", ONE, f"Bearer {ONE[:-1]}", "Bearer é"]
)
def test_nothing_else_opens_it(tmp_path: Path, header: str | None) -> None:
    access = AccessPolicy(tokens=TokenFile("security.read_tokens", written(tmp_path, ONE)))
    assert access.refusal("localhost", header) is AccessRefusal.TOKEN


def test_a_changed_file_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = TokenFile("security.read_tokens", written(tmp_path, ONE, OTHER))
    written(tmp_path, OTHER, THIRD)
    tokens.refresh()
    assert [tokens.holds(token) for token in (ONE, OTHER, THIRD)] == [False, True, True]
    # An editor empties the file before it writes; an empty file accepts no token.
    (tmp_path / "tokens").write_text("")
    tokens.refresh()
    assert not any([tokens.holds(token) for token in ("", OTHER, THIRD)])
    (tmp_path / "tokens").unlink()
    tokens.refresh()
    tokens.refresh()
    assert not tokens.holds(OTHER)
    assert caplog.text.count("every request is refused") == 2
    assert "of-the-test" not in caplog.text
    written(tmp_path, ONE)
    tokens.refresh()
    assert tokens.holds(ONE)


def test_a_change_with_the_same_size_and_time_is_noticed(tmp_path: Path) -> None:
    file = written(tmp_path, ONE)
    tokens = TokenFile("security.read_tokens", file)
    before = file.stat()
    with file.open("r+") as opened:
        opened.write(OTHER)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    now = file.stat()
    same = [(each.st_ino, each.st_size, each.st_mtime_ns) for each in (before, now)]
    assert same[0] == same[1]
    tokens.refresh()
    assert [tokens.holds(ONE), tokens.holds(OTHER)] == [False, True]


def test_a_followed_file_is_read_again_by_itself(tmp_path: Path) -> None:
    tokens = TokenFile("security.read_tokens", written(tmp_path, ONE))
    tokens.follow()
    written(tmp_path, OTHER)
    eventually(lambda: tokens.holds(OTHER), within_s=30.0, what="the new token")
    assert not tokens.holds(ONE)


def test_tokens_stay_valid_while_the_file_system_does_not_respond(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def hangs(*_: object, **__: object) -> bytes:
        raise TimeoutError("no response from its file system within 5 s")

    tokens = TokenFile("security.read_tokens", written(tmp_path, ONE))
    with monkeypatch.context() as patched:
        patched.setattr("agent.settings.access.read_named_file", hangs)
        for _ in range(3):
            tokens.refresh()
        assert tokens.holds(ONE)
    assert caplog.text.count("no response from its file system") == 1
    assert "its former tokens stay valid" in caplog.text
    written(tmp_path, OTHER)
    tokens.refresh()
    assert [tokens.holds(ONE), tokens.holds(OTHER)] == [False, True]


def test_a_pipe_that_takes_the_place_of_the_file_lets_nobody_in(tmp_path: Path) -> None:
    tokens = TokenFile("security.read_tokens", written(tmp_path, ONE))
    (tmp_path / "tokens").unlink()
    os.mkfifo(tmp_path / "tokens")
    tokens.refresh()
    assert not tokens.holds(ONE)


def test_a_mounted_secret_that_is_switched_by_a_link_is_read_again(tmp_path: Path) -> None:
    """As Kubernetes updates a Secret."""
    for name, token in (("before", ONE), ("after", OTHER)):
        (tmp_path / name).mkdir()
        written(tmp_path / name, token)
    (tmp_path / "now").symlink_to("before")
    tokens = TokenFile("security.read_tokens", tmp_path / "now" / "tokens")
    assert tokens.holds(ONE)
    (tmp_path / "next").symlink_to("after")
    os.replace(tmp_path / "next", tmp_path / "now")
    tokens.refresh()
    assert [tokens.holds(ONE), tokens.holds(OTHER)] == [False, True]


@pytest.mark.parametrize(
    "content", ["", " \n\n", "short", f"{ONE}\nshort", b"\xff" * 20, f"{ONE}\n" * 9999, None]
)
def test_a_file_without_usable_tokens_is_a_problem_of_the_settings(
    tmp_path: Path, content: str | bytes | None
) -> None:
    file = tmp_path / "tokens"
    if isinstance(content, str):
        file.write_text(content)
    elif content is not None:
        file.write_bytes(content)
    with pytest.raises(SettingsInvalid, match=r"security\.ingest_tokens: .*tokens"):
        TokenFile("security.ingest_tokens", file)


@pytest.mark.parametrize(
    ("host", "known"),
    [
        *((host, True) for host in ("localhost", "LOCALHOST:9470", "a.localhost:1", "gpu-7:9470")),
        # A number cannot be rebound to another one.
        *((host, True) for host in ("127.0.0.1:9470", "10.1.2.3", "[::1]:9470", "[2001:db8::1]")),
        *((host, True) for host in ("goodput.example.org", "a.pods.example.org", None)),
        *((host, True) for host in ("localhost.", "a.b.pods.example.org:80")),
        *((host, False) for host in ("evil.example:9470", "example.org", "notlocalhost", "")),
        *((host, False) for host in ("localhost.evil.example", "127.0.0.1.evil.example")),
        *((host, False) for host in ("pods.example.org", "goodput.example.org.evil.example")),
        *((host, False) for host in ("[evil.example]", "evil.example@localhost", "1.2.3")),
    ],
)
def test_only_known_names_reach_a_door_without_tokens(host: str | None, known: bool) -> None:
    access = AccessPolicy(known_hosts("gpu-7", ["Goodput.example.org", "*.pods.example.org"]))
    assert (access.refusal(host, None) is None) is known
    assert known or access.refusal(host, None) is AccessRefusal.HOST


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
    assert read(tmp_path, f"{text}security: {{insecure: true}}").security.insecure


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


def test_a_file_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 10)
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_named_file(tmp_path / "link", max_bytes=10) == b"x" * 10
    with (tmp_path / "sparse").open("wb") as sparse:
        sparse.truncate(2**40)
    with pytest.raises(OSError, match="it has more than 10 bytes"):
        read_named_file(tmp_path / "sparse", max_bytes=10)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("absent", "No such file or directory"),
        ("folder", "Is a directory; name a regular file"),
        ("pipe", "Is a named pipe; name a regular file"),
        ("file/below", "Not a directory"),
        ("a\0b", "no file can have such a name"),
        ("a\ud800", "no file can have such a name"),
        ("x" * 300, "File name too long"),
    ],
)
def test_anything_else_is_refused_with_the_reason_alone(
    tmp_path: Path, name: str, why: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError) as caught:  # noqa: PT011 - compared whole below
        read_named_file(tmp_path / name)
    assert str(caught.value) == why


def test_a_file_system_that_hangs_is_left_in_time_and_not_asked_again_until_it_responds() -> None:
    reads, mount_answers = list[threading.Thread](), threading.Event()

    def read() -> str:
        reads.append(threading.current_thread())
        mount_answers.wait()
        return "content"

    def open_reads() -> list[threading.Thread]:
        return [each for each in reads if each.is_alive()]

    with pytest.raises(OSError, match=r"no response from its file system within 0\.01 s"):
        in_time(Path("/mnt/file"), read, within_s=0.01)
    with pytest.raises(OSError, match="no response from its file system since"):
        in_time(Path("/mnt/file"), read)
    assert in_time(Path("/elsewhere/file"), lambda: "other") == "other"
    assert len(open_reads()) == 1
    mount_answers.set()
    reads[0].join()
    assert in_time(Path("/mnt/file"), read) == "content"
    assert open_reads() == []


def test_errors_of_a_read_are_raised_where_it_is_awaited() -> None:
    def fails() -> None:
        # ETIMEDOUT of a network file system, which is no end of our own limit.
        raise TimeoutError(110, "Connection timed out")

    with pytest.raises(TimeoutError, match="Connection timed out"):
        in_time(Path("/mnt/file"), fails)
