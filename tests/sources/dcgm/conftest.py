from collections.abc import Iterator

import pytest

from tests.sources.dcgm.watched import Watched
from tests.sources.engines.wire import EngineServer


@pytest.fixture
def exporter() -> Iterator[EngineServer]:
    with EngineServer() as server:
        yield server


@pytest.fixture
def watched(exporter: EngineServer) -> Iterator[Watched]:
    watched = Watched(exporter)
    yield watched
    watched.watch.close()
