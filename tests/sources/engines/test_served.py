import json

import pytest

from agent.sources.engines.fetch import open_session
from agent.sources.engines.models import ServedModels
from tests.sources.engines.wire import EngineServer

BOTH = json.dumps({"data": [{"id": "chat"}, {"id": "sql", "parent": "chat"}, {"id": 7}, None]})


def served(engine: EngineServer) -> frozenset[str] | None:
    with open_session() as session:
        return ServedModels("chat-0", engine.url + "/", session, timeout_s=20.0).read()


def test_models_and_their_adapters_are_known_by_their_names(engine: EngineServer) -> None:
    engine.answers("/v1/models", BOTH.encode())
    assert served(engine) == frozenset({"chat", "sql"})


def test_the_models_of_an_engine_without_a_list_are_unknown(engine: EngineServer) -> None:
    assert served(engine) is None


@pytest.mark.parametrize("answer", [b"<html>", b"\xff"])
def test_the_models_of_an_unreadable_list_are_unknown(engine: EngineServer, answer: bytes) -> None:
    engine.answers("/v1/models", answer)
    assert served(engine) is None
