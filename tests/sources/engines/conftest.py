from collections.abc import Iterator

import pytest

from tests.sources.engines.wire import EngineServer


@pytest.fixture
def engine() -> Iterator[EngineServer]:
    with EngineServer() as server:
        yield server
