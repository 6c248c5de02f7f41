from collections.abc import Iterator

import pytest

from tests.sources.otlp.serving import LoopThread, Serving, serving


@pytest.fixture(scope="session")
def loop() -> Iterator[LoopThread]:
    """The one event loop that all servers of these tests run in, as gRPC wants it."""
    with LoopThread() as running:
        yield running


@pytest.fixture(scope="session")
def _serving(loop: LoopThread) -> Iterator[Serving]:
    with loop.entered(serving()) as running:
        yield running


@pytest.fixture
def served(_serving: Serving) -> Serving:
    """A receiver with both its servers, whose records are kept in a list; nothing came in yet."""
    _serving.forget()
    return _serving
