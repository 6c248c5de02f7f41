"""Why an engine cannot be read, as a sentence: one for each thing that answers in its place."""

import socket
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from requests.exceptions import InvalidURL

from agent.catalog.routers import ROUTERS
from agent.http_client import connection_problem
from agent.sources.engines.engine_source import EngineSource
from agent.sources.engines.fetch import open_session
from tests.catalog.test_other_programs import PAGES, ROUTER, ROUTER_WITHOUT_TRAFFIC
from tests.real_parts.certificates import make_certificate
from tests.real_parts.ports import free_port
from tests.sources.engines.fixture_pages import body
from tests.sources.engines.wire import EngineServer

SERVER = ("Server: nginx/1.25.3",)
RAW = ("HTTPConnectionPool", "Max retries", "urllib3", "object at", "Errno", "Traceback")


def problem_at(url: str, kind: str = "auto", *, timeout_s: float = 20.0) -> str:
    with open_session() as session:
        source = EngineSource(name="chat", url=url, kind=kind, session=session, timeout_s=timeout_s)
        result = source.read(0.0)
    assert result.sample is None
    assert result.failure is not None
    assert result.problem is not None
    assert not any(word in result.problem for word in RAW), result.problem
    return result.problem


def answered(engine: EngineServer, page: bytes, *, kind: str = "auto") -> str:
    engine.answers("/metrics", page)
    problem = problem_at(engine.url, kind)
    assert problem.startswith(f"{engine.url}/metrics ")
    return problem.removeprefix(f"{engine.url}/metrics ")


def test_a_port_where_nothing_listens() -> None:
    url = f"http://user:word@127.0.0.1:{free_port()}"
    shown = url.replace("user:word@", "")
    assert problem_at(url) == f"{shown}/metrics cannot be reached: connection refused"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "name not found"),
        (
            socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
            "Temporary failure in name resolution",
        ),
    ],
)
def test_a_name_that_is_not_found(
    monkeypatch: pytest.MonkeyPatch, error: OSError, words: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("socket.getaddrinfo", fail)
    assert (
        problem_at("http://gpu-7:8000") == f"http://gpu-7:8000/metrics cannot be reached: {words}"
    )


def test_a_certificate_that_nobody_trusts(tmp_path: Path) -> None:
    with EngineServer(make_certificate(tmp_path, "engine")) as engine:
        assert problem_at(engine.url) == (
            f"{engine.url}/metrics cannot be reached: TLS error: the certificate is not accepted: "
            "self-signed certificate"
        )


def test_https_to_a_server_without_tls(engine: EngineServer) -> None:
    url = engine.url.replace("http:", "https:")
    assert problem_at(url) == (
        f"{url}/metrics cannot be reached: TLS error: the server does not speak TLS; does it need "
        "http://?"
    )


def _greets(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"220 mail ready\r\n")


def _hangs_up(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True


def test_a_server_that_hangs_up_or_speaks_something_else(engine: EngineServer) -> None:
    engine.scripts["/metrics"] = _greets
    assert problem_at(engine.url).endswith("the response is not HTTP; does it need https://?")
    engine.scripts["/metrics"] = _hangs_up
    assert problem_at(engine.url).endswith("the connection was closed without a response")


def test_a_server_that_says_nothing_in_time(engine: EngineServer) -> None:
    engine.drips("/metrics", b"")
    assert problem_at(engine.url, timeout_s=0.2).endswith("/metrics did not answer within 0.2 s")


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, "HTTP 401: it wants credentials"),
        (403, "HTTP 403: it refuses access"),
        (302, "HTTP 302: it redirects"),
        (501, "HTTP 501: it does not support that; llama.cpp's server needs --metrics"),
        (503, "HTTP 503: it is not ready, or shuts down"),
        (418, "HTTP 418"),
    ],
)
def test_a_status_says_what_it_means(engine: EngineServer, status: int, words: str) -> None:
    engine.answers("/metrics", b"{}", status=status, headers=("Server: uvicorn",))
    assert problem_at(engine.url) == f"{engine.url}/metrics answered {words}"
    engine.answers("/metrics", b"{}", status=status, headers=SERVER)
    assert problem_at(engine.url).endswith(f"answered {words} (server nginx/1.25.3)")


def test_a_server_without_any_path_of_metrics(engine: EngineServer) -> None:
    assert problem_at(engine.url) == (
        f"{engine.url}/metrics answered HTTP 404: it has no such path, nor /prometheus/metrics"
    )
    assert problem_at(engine.url, "vllm").endswith("answered HTTP 404: it has no such path")


@pytest.mark.parametrize(
    ("page", "words"),
    [
        (b"<!DOCTYPE html>\n<html><head><title>Welcome to\n nginx!</title>\n",
         "has an HTML page, not metrics: 'Welcome to nginx!'"),
        (b"<html></html>\n", "has an HTML page, not metrics"),
        (b'{"detail":"Not Found"}', "has JSON, not metrics: '{\"detail\":\"Not Found\"}'"),
        (b"", "has an empty body, no metrics"),
        (b"\xff\xfe\n", "has no metrics but bytes that are no UTF-8 text"),
        (b"python_info 1\n", "has no series of a known engine (vllm, sglang, tgi, trtllm, "
         "llamacpp): are its statistics switched on?"),
    ],
)  # fmt: skip
def test_a_page_that_is_none_of_an_engine(engine: EngineServer, page: bytes, words: str) -> None:
    assert answered(engine, page) == words


@pytest.mark.parametrize(
    ("program", "page"),
    [
        *PAGES.items(),
        ("production-stack's router", ROUTER),
        ("production-stack's router", ROUTER_WITHOUT_TRAFFIC),
    ],
)
def test_the_metrics_of_another_program(engine: EngineServer, program: str, page: bytes) -> None:
    readable = {router.engine for router in ROUTERS}
    place = "; a router's own metrics go under `routers`" if program in readable else ""
    assert answered(engine, page) == (
        f"has no series of a known engine: this looks like {program}; give the URL of the "
        f"engine{place}"
    )


def test_an_engine_of_another_kind_than_that_of_the_settings(engine: EngineServer) -> None:
    assert answered(engine, body("sglang-0.5.23"), kind="vllm") == (
        "has the metrics of sglang, which `kind` in the settings excludes"
    )


@pytest.mark.parametrize(
    "error", [InvalidURL("no host given"), TimeoutError(), OSError(113, "No route to host")]
)
def test_every_other_error_has_words(error: Exception) -> None:
    words = connection_problem(error)
    assert words in ("no host given", "no response in time", "No route to host")
