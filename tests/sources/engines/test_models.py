import json

import pytest

from agent.errors import ExpositionUnreadable
from agent.sources.engines.fetch import open_session
from agent.sources.engines.models import ServedModels, read_model, read_served
from tests.sources.engines.wire import EngineServer


def model_in(*entries: object) -> str | None:
    return read_model("/v1/models", json.dumps({"object": "list", "data": entries}).encode())


def test_the_only_model_is_named() -> None:
    assert model_in({"id": "chat", "root": "/models/llama", "parent": None}) == "chat"


def test_adapters_are_no_models_of_their_own() -> None:
    base = {"id": "chat", "root": "/models/llama", "parent": None}
    assert model_in({"id": "sql", "root": "/adapters/sql", "parent": "chat"}, base) == "chat"


def test_aliases_of_one_root_are_one_model_by_its_first_name() -> None:
    aliases = ({"id": name, "root": "/models/llama"} for name in ("chat", "llama"))
    assert model_in(*aliases) == "chat"


@pytest.mark.parametrize(
    "entries",
    [
        pytest.param([{"id": "a"}, {"id": "b"}], id="two-models"),
        pytest.param([{"id": "a", "root": "x"}, {"id": "b", "root": "y"}], id="two-roots"),
        pytest.param([], id="none"),
        pytest.param(["a", None, 3], id="no-objects"),
        pytest.param([{"root": "x"}], id="no-id"),
        pytest.param([{"id": 7}], id="id-is-no-text"),
        pytest.param([{"id": ""}], id="id-is-empty"),
    ],
)
def test_an_unknown_model_is_none(entries: list[object]) -> None:
    assert model_in(*entries) is None


@pytest.mark.parametrize("answer", ["{}", "[]", "null", '{"data": 3}', '{"data": {"id": "a"}}'])
def test_an_answer_of_another_shape_is_none(answer: str) -> None:
    assert read_model("/v1/models", answer.encode()) is None


def test_text_generation_inference_names_its_model_elsewhere() -> None:
    assert read_model("/info", b'{"model_id": "org/model", "sha": null}') == "org/model"


@pytest.mark.parametrize("body", [b"", b"<html>", b"\xff", b"[" * 100_000])
def test_what_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(ExpositionUnreadable) as caught:
        read_model("/v1/models", body)
    assert caught.value.reason == "json_malformed"


def test_odd_names_become_labels_that_a_page_and_a_database_can_hold() -> None:
    body = b'{"data": [{"id": "half-\\ud800"}, {"id": "%s"}]}' % (b"m" * 1_000_000)
    names = sorted(read_served(body), key=len)
    assert names[0] == "half-?"
    assert len(names[1]) == 256


def served(engine: EngineServer) -> frozenset[str] | None:
    with open_session() as session:
        return ServedModels("chat-0", engine.url + "/", session, timeout_s=20.0).read()


def test_models_and_their_adapters_are_served_by_their_names(engine: EngineServer) -> None:
    entries = [{"id": "chat"}, {"id": "sql", "parent": "chat"}, {"id": 7}, None]
    engine.answers("/v1/models", json.dumps({"data": entries}).encode())
    assert served(engine) == frozenset({"chat", "sql"})


@pytest.mark.parametrize("answer", [None, b"<html>", b"\xff"])
def test_without_a_readable_list_the_served_models_are_unknown(
    engine: EngineServer, answer: bytes | None
) -> None:
    if answer is not None:
        engine.answers("/v1/models", answer)
    assert served(engine) is None
