"""Events, objectives and engines."""

from typing import Any

from agent.records.event import Confidence, Event, EventKind
from agent.records.objective import Match
from tests.outputs.api.serving import Api
from tests.outputs.api.traffic import unix
from tests.records.making import NOON, objective, record

EMPTY: dict[str, Any] = {"items": [], "next": None}


def event(number: int, **told: Any) -> Event:
    facts: dict[str, Any] = {
        "at": NOON + number // 2,
        "engine": f"chat-{number % 2}",
        "kind": EventKind.RESTART if number % 3 else EventKind.UNREACHABLE,
        "confidence": Confidence.PROBABLE,
        "evidence": {"number": float(number)},
    }
    return Event(**(facts | told))


def numbers(api: Api, **filters: Any) -> list[int]:
    """The events that a list holds, by number."""
    return [
        int(item["evidence"]["number"]) for page in api.pages("events", **filters) for item in page
    ]


def test_lists_of_nothing_are_empty(api: Api) -> None:
    for path in ("requests", "events", "objectives", "engines", "gpus"):
        assert api.ask(path) == EMPTY


def test_an_event_is_told_with_its_evidence(api: Api) -> None:
    evidence: dict[str, str | float | None] = {"reason": "timeout", "running": 3.0, "model": None}
    api.keep(Event(at=NOON + 0.5, engine="chat-0", kind=EventKind.RESTART, gpu="GPU-1",
                   confidence=Confidence.SUSPECTED, evidence=evidence))  # fmt: skip
    (told,) = api.ask("events")["items"]
    assert unix(told.pop("at")) == NOON + 0.5
    assert told == {
        "agent": "agent-0",
        "engine": "chat-0",
        "gpu": "GPU-1",
        "kind": "RESTART",
        "confidence": "suspected",
        "evidence": evidence,
    }


def test_events_come_newest_first_page_by_page(api: Api) -> None:
    api.keep(*[event(number) for number in range(11)])
    for limit in (1, 3, 11, 100):
        assert numbers(api, limit=limit) == list(range(10, -1, -1))


def test_events_are_found_by_engine_and_kind(api: Api) -> None:
    api.keep(*[event(number) for number in range(12)], event(99, engine=None))
    assert numbers(api, engine="chat-1") == [11, 9, 7, 5, 3, 1]
    assert numbers(api, kind="UNREACHABLE") == [99, 9, 6, 3, 0]
    assert numbers(api, engine="chat-1", kind="UNREACHABLE", limit=1) == [9, 3]
    assert numbers(api, engine="", kind="") == [99, *range(11, -1, -1)]
    assert numbers(api, kind="unreachable") == numbers(api, engine="chat") == []


def test_events_are_found_by_gpu_and_confidence(api: Api) -> None:
    certain = Confidence.CERTAIN
    api.keep(
        event(0), event(1, gpu="GPU-1"), event(2, gpu="GPU-2"), event(3, gpu="GPU-1", engine=None)
    )
    api.keep(event(4, gpu="GPU-1", confidence=certain), event(5, confidence=certain))
    assert numbers(api, gpu="GPU-1") == [4, 3, 1]
    assert numbers(api, confidence="certain") == [5, 4]
    assert numbers(api, gpu="GPU-1", confidence="probable", limit=1) == [3, 1]
    assert numbers(api, gpu="GPU-1", engine="chat-0", kind="RESTART") == [4]
    assert numbers(api, gpu="GPU-") == numbers(api, confidence="suspected") == []
    assert numbers(api, gpu="") == [5, 4, 3, 2, 1, 0]


def test_a_confidence_that_there_is_not_is_refused_with_a_sentence(api: Api) -> None:
    assert api.refusal("events", confidence="sure") == (
        422,
        "confidence: Input should be 'certain', 'probable' or 'suspected' (got 'sure')",
    )


def test_an_objective_is_told_as_it_is_judged(api: Api) -> None:
    promised = objective(
        "chat", ttft_s=0.2, tpot_s=0.12, match=Match(tenant="acme", max_input_tokens=9)
    )
    api.promise([promised])
    (told,) = api.ask("objectives")["items"]
    assert unix(told.pop("in_force_from")) == api.around.now
    assert (told["name"], told["agent"]) == ("chat", "agent-0")
    definition = told["definition"]
    limits = ("ttft_s", "tpot_s", "e2e_s", "target", "window_s", "max_error_ratio")
    assert {name: definition[name] for name in limits} == {
        name: getattr(promised, name) for name in limits
    }
    assert definition["match"]["tenant"] == "acme"
    assert definition["match"]["max_input_tokens"] == 9
    assert definition["definition"]["name"] == "goodput"


def test_an_objective_that_changed_is_told_as_it_is_now(api: Api) -> None:
    api.promise([objective("a"), objective("b")])
    api.around.now += 60
    api.promise([objective("a"), objective("b", ttft_s=0.5), objective("c")])
    told = {item["name"]: item for item in api.ask("objectives")["items"]}
    assert list(told) == ["a", "b", "c"]
    begun = {name: unix(item["in_force_from"]) for name, item in told.items()}
    assert begun == {"a": api.around.now - 60, "b": api.around.now, "c": api.around.now}
    assert told["b"]["definition"]["ttft_s"] == 0.5
    api.promise([])
    assert api.ask("objectives") == EMPTY


def test_engines_are_told_as_they_were_seen(api: Api) -> None:
    api.around.engines += [
        {"name": "a", "up": True, "model": "llama", "dialect": "vllm", "read_at": NOON + 0.25},
        {"name": "b", "up": False, "model": None, "dialect": None, "read_at": None},
    ]
    one, other = api.ask("engines")["items"]
    assert unix(one.pop("read_at")) == NOON + 0.25
    assert one == {"name": "a", "up": True, "model": "llama", "dialect": "vllm"}
    assert other == {"name": "b", "up": False, "model": None, "dialect": None, "read_at": None}


def test_an_objective_tells_what_became_of_it_in_the_window(api: Api) -> None:
    promised = objective("chat", ttft_s=0.2, max_error_ratio=0.001, min_output_tokens_per_s=1e6)
    api.promise([promised])
    now = api.around.now
    records = [record(1, ended_at=now - 9), record(2, ended_at=now - 9, ttft_s=0.3)]
    api.store(records, [promised])
    (told,) = api.ask("objectives", window="1m")["items"]
    assert (told["requests"], told["met"], told["missed"], told["attainment"]) == (2, 1, 1, 0.5)
    errors, tokens = told["traffic"]
    assert errors == {"name": "max_error_ratio", "limit": 0.001, "seen": None, "holds": None}
    assert (tokens["limit"], tokens["holds"]) == (1e6, False)
