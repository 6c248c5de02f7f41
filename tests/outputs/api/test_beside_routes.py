"""What an engine did while a request ran: the requests beside it, and samples."""

from datetime import UTC, datetime
from typing import Any

import pytest

from agent.catalog import engine_facts as fact
from agent.records.engine import EngineSample
from agent.records.gpu import Facts
from agent.store.observations import ObservationStore
from tests.outputs.api.serving import Api
from tests.records.making import NOON, objective, record


def iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()


def beside(api: Api, **given: Any) -> dict[str, Any]:
    asked = {"from": iso(NOON), "until": iso(NOON + 60), **given}
    found: dict[str, Any] = api.query("beside", engine="chat-0", **asked)
    return found


def ran(number: int, from_s: float, until_s: float, **given: Any) -> Any:
    return record(number, started_at=NOON + from_s, ended_at=NOON + until_s, **given)


def test_the_requests_of_an_engine_that_ran_in_a_time_are_its_lanes(api_of_each: Api) -> None:
    api = api_of_each
    api.store(
        [
            ran(1, -30, 5),
            ran(2, 10, 20, ttft_s=9.0),
            ran(3, 55, 90),
            ran(4, -60, -1),
            ran(5, 61, 70),
            ran(6, 10, 20, engine="chat-1"),
        ],
        [objective()],
    )
    found = beside(api)
    assert [lane["request_id"] for lane in found["lanes"]] == [f"request-{n}" for n in (1, 2, 3)]
    assert found["requests"] == 3
    late = found["lanes"][1]
    assert late["verdict"] == "missed"
    parts = [late[f"{name}_s"] for name in ("front", "queue", "prefill", "decode")]
    assert parts == [pytest.approx(8.9), 0.01, 0.09, 0.4]


def test_of_many_the_requests_that_ran_the_longest_are_shown(api: Api) -> None:
    api.store([ran(n, n, 2 * n + 1) for n in range(20)], [objective()])
    found = beside(api, limit=3)
    assert found["requests"] == 20
    assert [lane["request_id"] for lane in found["lanes"]] == [f"request-{n}" for n in (17, 18, 19)]


def sample(at: float, engine: str = "chat-0", **values: float) -> EngineSample:
    facts: Facts = {(getattr(fact, name).name, ()): value for name, value in values.items()}
    return EngineSample(engine=engine, at=NOON + at, dialect="vllm", model=None, facts=facts)


def test_samples_are_told_with_what_was_counted_since_the_one_before(api_of_each: Api) -> None:
    store = ObservationStore(api_of_each._engine, "agent-0")
    for each in (
        sample(-20, STEPS=0),
        sample(-5, STEPS=100, PREEMPTIONS=1),
        sample(10, STEPS=250, PREEMPTIONS=3, KV_CACHE_USAGE=0.9, REQUESTS_WAITING=4),
        sample(20, "chat-1", STEPS=1),
        sample(70, STEPS=300),
    ):
        store.write_engine_sample(each)
    (moment,) = beside(api_of_each)["moments"]
    assert moment["steps_per_s"] == pytest.approx(10)
    told = {name: moment[name] for name in ("preemptions", "kv_cache_usage", "waiting", "running")}
    assert told == {"preemptions": 2, "kv_cache_usage": 0.9, "waiting": 4, "running": None}


def test_an_engine_has_to_be_named(api: Api) -> None:
    assert api.refusal("beside", engine="") == (422, "engine: say of which")
