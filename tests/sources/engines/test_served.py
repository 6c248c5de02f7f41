import json

import pytest

from agent.sources.engines.directory import EngineDirectory
from agent.sources.engines.fetch import open_session
from agent.sources.engines.served import ServedModels
from tests.sources.engines.wire import EngineServer

BOTH = json.dumps({"data": [{"id": "chat"}, {"id": "sql", "parent": "chat"}, {"id": 7}, None]})


def served(engine: EngineServer, directory: EngineDirectory) -> frozenset[str] | None:
    with open_session() as session:
        ServedModels("chat-0", engine.url + "/", session, directory, timeout_s=20.0).poll(1.0)
    return directory.served_by("chat-0")


def test_models_and_their_adapters_are_known_by_their_names(engine: EngineServer) -> None:
    engine.answers("/v1/models", BOTH.encode())
    assert served(engine, EngineDirectory([])) == frozenset({"chat", "sql"})


def test_an_engine_that_never_listed_its_models_is_unknown(engine: EngineServer) -> None:
    assert served(engine, EngineDirectory([])) is None


@pytest.mark.parametrize("answer", [b"<html>", b"\xff"])
def test_what_was_known_stays_known_where_no_answer_came(
    engine: EngineServer, answer: bytes
) -> None:
    directory = EngineDirectory([])
    engine.answers("/v1/models", BOTH.encode())
    served(engine, directory)
    engine.answers("/v1/models", answer)
    assert served(engine, directory) == frozenset({"chat", "sql"})
