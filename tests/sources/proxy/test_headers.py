"""Redirects of an engine."""

import pytest

from agent.sources.proxy.headers import redirect_to_proxy

ENGINE, PROXY = b"http://127.0.0.1:8000", b"https://llm.example"


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        (b"http://127.0.0.1:8000/v1/models", b"https://llm.example/v1/models"),
        (b"http://127.0.0.1:8000", b"https://llm.example"),
        (b"http://127.0.0.1:80001/v1", b"http://127.0.0.1:80001/v1"),
        (b"http://elsewhere/v1", b"http://elsewhere/v1"),
        (b"/v1/models", b"/v1/models"),
    ],
)
def test_a_redirect_to_the_engine_becomes_one_to_the_proxy(
    location: bytes, expected: bytes
) -> None:
    others = [(b"server", b"uvicorn"), (b"x-location", location)]
    lines = redirect_to_proxy([*others, (b"location", location)], ENGINE, PROXY)
    assert lines == [*others, (b"location", expected)]
