import pytest

from agent.records.engine import EngineIdentity
from agent.sources.engines.directory import EngineDirectory


@pytest.fixture
def directory() -> EngineDirectory:
    directory = EngineDirectory(
        [
            ("chat-0", "http://10.0.0.1:8000"),
            ("code-0", "https://Code.example/base"),
            ("six-0", "http://[::1]:8001"),
        ]
    )
    directory.learn_model("chat-0", "org/chat")
    return directory


@pytest.mark.parametrize(
    ("attributes", "engine"),
    [
        ({"service.name": "chat-0"}, "chat-0"),
        ({"service.name": "vllm", "service.instance.id": "chat-0"}, "chat-0"),
        ({"service.name": "vllm", "service.instance.id": "10.0.0.1:8000"}, "chat-0"),
        ({"service.instance.id": "10.0.0.1:8000"}, "chat-0"),
        # The port of its scheme.
        ({"service.instance.id": "CODE.example:443"}, "code-0"),
        ({"service.instance.id": "[::1]:8001"}, "six-0"),
        # The name of the service outranks its instance.
        ({"service.name": "code-0", "service.instance.id": "10.0.0.1:8000"}, "code-0"),
    ],
)
def test_a_sender_is_known_by_name_or_address(
    directory: EngineDirectory, attributes: dict[str, object], engine: str
) -> None:
    model = "org/chat" if engine == "chat-0" else None
    assert directory.identify(attributes) == EngineIdentity(engine=engine, model=model)


def test_a_stranger_among_several_engines_is_unknown(directory: EngineDirectory) -> None:
    unknown = EngineIdentity(engine=None, model=None)
    assert directory.identify({"service.name": "unknown_service"}) == unknown
    assert directory.identify({}) == unknown


def test_an_address_shared_by_two_engines_tells_neither() -> None:
    shared = EngineDirectory([("a", "http://gate:80/a"), ("b", "http://gate:80/b")])
    assert shared.identify({"service.instance.id": "gate:80"}).engine is None
    assert shared.identify({"service.instance.id": "b"}).engine == "b"


@pytest.mark.parametrize("key", ["gen_ai.request.model", "model_name"])
def test_the_model_that_the_sender_names_stands(directory: EngineDirectory, key: str) -> None:
    assert directory.identify({"service.name": "chat-0", key: "lora"}).model == "lora"
    assert directory.identify({key: "lora"}) == EngineIdentity(engine=None, model="lora")


@pytest.mark.parametrize("value", ["", 7, None, ["a"]])
def test_an_attribute_that_is_no_text_is_passed_over(
    directory: EngineDirectory, value: object
) -> None:
    attributes = {"service.name": "chat-0", "gen_ai.request.model": value}
    assert directory.identify(attributes).model == "org/chat"
    assert directory.identify({"service.name": value}).engine is None


def test_what_an_engine_serves_can_change_and_be_forgotten(directory: EngineDirectory) -> None:
    directory.learn_model("chat-0", "org/chat-2")
    assert directory.identify({"service.name": "chat-0"}).model == "org/chat-2"
    directory.learn_model("chat-0", None)
    assert directory.identify({"service.name": "chat-0"}).model is None


def test_the_last_known_names_of_models_stay_while_an_engine_does_not_answer(
    directory: EngineDirectory,
) -> None:
    assert directory.served_by("code-0") is None
    directory.learn_served("code-0", frozenset({"code", "sql"}))
    directory.learn_served("code-0", None)
    assert directory.served_by("code-0") == frozenset({"code", "sql"})
    directory.learn_served("code-0", frozenset({"code"}))
    assert directory.served_by("code-0") == frozenset({"code"})
    assert [directory.is_served(name) for name in ("code", "sql")] == [True, False]


def test_the_model_of_an_exposition_is_served_beside_the_listed_ones(
    directory: EngineDirectory,
) -> None:
    assert directory.served_by("chat-0") == frozenset({"org/chat"})
    directory.learn_served("chat-0", frozenset({"chat"}))
    assert directory.served_by("chat-0") == frozenset({"chat", "org/chat"})


def test_an_unknown_sender_is_the_only_engine_unless_more_may_come() -> None:
    engines = [("chat-0", "http://10.0.0.1:8000")]
    unknown = {"service.name": "chat-1"}
    assert EngineDirectory(engines).identify(unknown).engine == "chat-0"
    assert EngineDirectory(engines, complete=False).identify(unknown).engine is None
    assert EngineDirectory([]).identify(unknown).engine is None
