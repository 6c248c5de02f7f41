from collections.abc import Iterator

import pytest

from tests.sources.otlp.serving import LoopThread, Serving, serving


@pytest.fixture(scope="session")
def loop() -> Iterator[LoopThread]:
    """The one event loop that all servers of these tests run in, as gRPC wants it."""
    with LoopThread() as running:
        yield running


@pytest.fixture
def served(loop: LoopThread) -> Iterator[Serving]:
    """A receiver with both its servers, whose records are kept in a list."""
    with loop.entered(serving()) as running:
        yield running
