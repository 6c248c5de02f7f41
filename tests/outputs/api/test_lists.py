"""Events, objectives and engines."""

from typing import Any

import pytest

from agent.records.event import Confidence, Event, EventKind
from agent.records.objective import Match
from tests.outputs.api.serving import Api
from tests.outputs.api.traffic import unix
from tests.records.making import NOON, objective, record

EMPTY: dict[str, Any] = {"items": [], "next": None}


def event(number: int, **given: Any) -> Event:
    values: dict[str, Any] = {
        "at": NOON + number // 2,
        "engine": f"chat-{number % 2}",
        "kind": EventKind.RESTART if number % 3 else EventKind.UNREACHABLE,
        "confidence": Confidence.PROBABLE,
        "evidence": {"number": float(number)},
    }
    return Event(**(values | given))


def numbers(api: Api, **filters: Any) -> list[int]:
    """Return the numbers of the listed events."""
    return [
        int(item["evidence"]["number"]) for page in api.pages("events", **filters) for item in page
    ]


def test_lists_are_empty_at_first(api: Api) -> None:
    for path in ("requests", "events", "objectives", "engines", "gpus", "agents"):
        assert api.query(path) == EMPTY


def test_an_event_is_listed_with_its_evidence(api: Api) -> None:
    evidence: dict[str, str | float | None] = {"reason": "timeout", "running": 3.0, "model": None}
    api.store_events(Event(at=NOON + 0.5, engine="chat-0", kind=EventKind.RESTART, gpu="GPU-1",
                   confidence=Confidence.SUSPECTED, evidence=evidence))  # fmt: skip
    (item,) = api.query("events")["items"]
    assert unix(item.pop("at")) == NOON + 0.5
    assert item == {
        "agent": "agent-0",
        "engine": "chat-0",
        "gpu": "GPU-1",
        "kind": "RESTART",
        "confidence": "suspected",
        "evidence": evidence,
    }


def test_events_are_listed_newest_first_in_pages(api: Api) -> None:
    api.store_events(*[event(number) for number in range(11)])
    for limit in (1, 3, 11, 100):
        assert numbers(api, limit=limit) == list(range(10, -1, -1))


def test_events_are_found_by_engine_and_kind(api: Api) -> None:
    api.store_events(*[event(number) for number in range(12)], event(99, engine=None))
    assert numbers(api, engine="chat-1") == [11, 9, 7, 5, 3, 1]
    assert numbers(api, kind="UNREACHABLE") == [99, 9, 6, 3, 0]
    assert numbers(api, engine="chat-1", kind="UNREACHABLE", limit=1) == [9, 3]
    assert numbers(api, engine="", kind="") == [99, *range(11, -1, -1)]
    assert numbers(api, kind="unreachable") == numbers(api, engine="chat") == []


def test_events_are_found_by_gpu_and_confidence(api: Api) -> None:
    certain = Confidence.CERTAIN
    api.store_events(
        event(0), event(1, gpu="GPU-1"), event(2, gpu="GPU-2"), event(3, gpu="GPU-1", engine=None)
    )
    api.store_events(event(4, gpu="GPU-1", confidence=certain), event(5, confidence=certain))
    assert numbers(api, gpu="GPU-1") == [4, 3, 1]
    assert numbers(api, confidence="certain") == [5, 4]
    assert numbers(api, gpu="GPU-1", confidence="probable", limit=1) == [3, 1]
    assert numbers(api, gpu="GPU-1", engine="chat-0", kind="RESTART") == [4]
    assert numbers(api, gpu="GPU-") == numbers(api, confidence="suspected") == []
    assert numbers(api, gpu="") == [5, 4, 3, 2, 1, 0]


def test_events_are_found_by_their_window(api: Api) -> None:
    api.store_events(*[event(number) for number in range(3)])
    api.agent.now = NOON + 3600.5
    assert numbers(api, window="1h", limit=1) == [2]
    assert numbers(api, window="10s") == []
    assert numbers(api, window="") == numbers(api) == [2, 1, 0]
    assert "window" in str(api.refusal("events", window="1 hour"))


def test_an_unknown_confidence_is_refused_with_a_sentence(api: Api) -> None:
    assert api.refusal("events", confidence="sure") == (
        422,
        "confidence: Input should be 'certain', 'probable' or 'suspected' (got 'sure')",
    )


def test_an_objective_is_listed_as_it_is_judged(api: Api) -> None:
    chat = objective(
        "chat", ttft_s=0.2, tpot_s=0.12, match=Match(tenant="acme", max_input_tokens=9)
    )
    api.set_objectives([chat])
    (item,) = api.query("objectives")["items"]
    assert unix(item.pop("in_force_from")) == api.agent.now
    assert (item["name"], item["agent"]) == ("chat", "agent-0")
    definition = item["definition"]
    limits = ("ttft_s", "tpot_s", "e2e_s", "target", "window_s", "max_error_ratio")
    assert {name: definition[name] for name in limits} == {
        name: getattr(chat, name) for name in limits
    }
    assert definition["match"]["tenant"] == "acme"
    assert definition["match"]["max_input_tokens"] == 9
    assert definition["definition"]["name"] == "goodput"


def test_a_changed_objective_is_listed_as_it_is_now(api: Api) -> None:
    api.set_objectives([objective("a"), objective("b")])
    api.agent.now += 60
    api.set_objectives([objective("a"), objective("b", ttft_s=0.5), objective("c")])
    items = {item["name"]: item for item in api.query("objectives")["items"]}
    assert list(items) == ["a", "b", "c"]
    in_force_from = {name: unix(item["in_force_from"]) for name, item in items.items()}
    assert in_force_from == {"a": api.agent.now - 60, "b": api.agent.now, "c": api.agent.now}
    assert items["b"]["definition"]["ttft_s"] == 0.5
    api.set_objectives([])
    assert api.query("objectives") == EMPTY


LOAD: dict[str, float | None] = {"running": 3.0, "waiting": 1.0, "kv_cache_usage": 0.25}
UNLOADED = dict.fromkeys(LOAD)


def test_engines_are_listed_as_they_were_read(api: Api) -> None:
    unknown = dict.fromkeys(("model", "dialect", "read_at"))
    unknown |= {"name": "b", "agent": "agent-1", "up": False}
    api.agent.engines += [
        {
            "name": "a",
            "agent": "agent-0",
            "up": True,
            "model": "llama",
            "dialect": "vllm",
            "read_at": NOON + 0.25,
        }
        | LOAD,
        unknown | UNLOADED,
    ]
    one, other = api.query("engines")["items"]
    assert unix(one.pop("read_at")) == NOON + 0.25
    named = {"name": "a", "agent": "agent-0", "problem": None, "ejected": None}
    assert one == {**named, "up": True, "model": "llama", "dialect": "vllm"} | LOAD
    assert other == {**unknown, "problem": None, "ejected": None} | UNLOADED
    assert [item["name"] for item in api.query("engines", agent="agent-1")["items"]] == ["b"]


def test_without_any_data_no_limit_on_the_traffic_is_known_to_be_broken(api: Api) -> None:
    api.set_objectives([objective("chat", ttft_s=0.2, min_output_tokens_per_s=1e6)])
    (item,) = api.query("objectives", window="1m")["items"]
    assert item["covered_s"] == 0
    assert [(limit["seen"], limit["holds"]) for limit in item["traffic"]] == [(None, None)]


def test_an_objective_is_listed_with_its_counts_in_the_window(api: Api) -> None:
    chat = objective("chat", ttft_s=0.2, max_error_ratio=0.001, min_output_tokens_per_s=1e6)
    api.set_objectives([chat])
    now = api.agent.now
    records = [record(1, ended_at=now - 9), record(2, ended_at=now - 9, ttft_s=0.3)]
    api.store(records, [chat])
    (item,) = api.query("objectives", window="1m")["items"]
    assert (item["requests"], item["met"], item["missed"], item["attainment"]) == (2, 1, 1, 0.5)
    errors, tokens = item["traffic"]
    assert errors == {"name": "max_error_ratio", "limit": 0.001, "seen": None, "holds": None}
    assert (tokens["limit"], tokens["holds"]) == (1e6, False)


def test_an_objective_has_its_error_budget_over_its_own_window(api: Api) -> None:
    """Two hours ago 90 of 100 requests met; of the last minute's ten requests none did."""
    chat = objective("chat", ttft_s=0.2, target=0.8, window_s=86400.0)
    earlier = [
        record(n, ended_at=api.agent.now - 7200, ttft_s=0.1 if n < 90 else 0.3) for n in range(100)
    ]
    now = [record(200 + n, ended_at=api.agent.now - 30, ttft_s=0.3) for n in range(10)]
    api.store([*earlier, *now], [chat])
    api.set_objectives([chat])
    (item,) = api.query("objectives", window="1m")["items"]
    assert (item["met"], item["missed"]) == (0, 10)
    assert item["violations_per_min"] == pytest.approx(600 / item["covered_s"])
    budget = item["budget"]
    assert (budget["met"], budget["missed"], budget["allowed"]) == (90, 20, pytest.approx(22))
    assert budget["left"] == pytest.approx(1 - 20 / 22)
    assert budget["covered_s"] < budget["window_s"] == pytest.approx(86400, abs=60)
