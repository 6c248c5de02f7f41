from collections.abc import Iterator

import pytest

from tests.sources.dcgm.exporter_pages import ScriptedExporter
from tests.sources.engines.wire import EngineServer


@pytest.fixture
def exporter() -> Iterator[EngineServer]:
    with EngineServer() as server:
        yield server


@pytest.fixture
def dcgm(exporter: EngineServer) -> Iterator[ScriptedExporter]:
    dcgm = ScriptedExporter(exporter)
    yield dcgm
    dcgm.source.close()
