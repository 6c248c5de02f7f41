"""Pools of prefill and decode engines, by what the engines counted."""

from collections.abc import Mapping
from math import inf
from typing import Any

import pytest

from agent.catalog import engine_facts as fact
from agent.records.engine import HistogramSnapshot
from agent.records.engine_counts import EngineCounts, GaugeSum
from agent.records.gpu import FactKey
from tests.outputs.api.serving import Api
from tests.records.making import NOON

LENGTH_S = 5.0
CAPACITY, DEFERRED = (
    (fact.REQUESTS_WAITING_BY_REASON.name, (reason,)) for reason in ("capacity", "deferred")
)
WAITING, RUNNING = ((each.name, ()) for each in (fact.REQUESTS_WAITING, fact.REQUESTS_RUNNING))
# What NIXL counts at a receiver: 20 transfers of 0.1 s.
TRANSFERRED: dict[str, Any] = {
    "counters": {
        (fact.KV_TRANSFER_BYTES.name, ()): 1000.0,
        (fact.KV_TRANSFERS_FAILED.name, ()): 2.0,
    },
    "histograms": {
        fact.KV_TRANSFER_TIME.name: HistogramSnapshot((0.5, inf), (20.0, 20.0), 2.0),
        fact.QUEUE_TIME.name: HistogramSnapshot((0.5, inf), (20.0, 20.0), 5.0),
    },
}


def counts(gauges: Mapping[FactKey, float], **others: Any) -> EngineCounts:
    means = {key: GaugeSum(mean * LENGTH_S, LENGTH_S, mean) for key, mean in gauges.items()}
    return EngineCounts(covered_s=LENGTH_S, gauges=means, **others)


def serve(api: Api, **engines: EngineCounts) -> None:
    """Store what engines counted; each is named after its role and a number."""
    api.agent.now = NOON + 307.0
    for name, counted in engines.items():
        role = name.partition("_")[0]
        read = {**dict.fromkeys(("up", "dialect", "read_at")), "agent": "agent-0"}
        api.agent.engines.append({**read, "name": name, "model": "llama", "role": role})
        api.store_engine_sample(name, api.agent.now, counted)


def pools(api: Api) -> Any:
    return api.query("pools")["items"]


def test_the_pool_whose_requests_wait_is_the_one_to_grow(api: Api) -> None:
    serve(
        api,
        prefill_0=counts({RUNNING: 2.0, WAITING: 6.0}),
        prefill_1=counts({RUNNING: 2.0, WAITING: 4.0}),
        # The requests of this one wait for KV values, not for capacity.
        decode_0=counts({RUNNING: 8.0, WAITING: 9.0, CAPACITY: 0.5, DEFERRED: 8.5}, **TRANSFERRED),
        both_0=counts({RUNNING: 1.0, WAITING: 30.0}),
    )
    (found,) = pools(api)
    decode, prefill = found["pools"]
    assert (prefill["role"], prefill["engines"]) == ("prefill", ["prefill_0", "prefill_1"])
    assert (prefill["running"], prefill["waiting"], prefill["load"]) == (4.0, 10.0, 3.5)
    assert (decode["running"], decode["waiting"]) == (8.0, 0.5)
    assert found["load_ratio"] == pytest.approx(3.5 / (8.5 / 8.0))
    assert found["grow"] == "prefill"
    assert (decode["transfer_s"], decode["queue_s"]) == (pytest.approx(0.1), pytest.approx(0.25))
    assert (decode["transfer_bytes_per_s"], decode["transfers_failed"]) == (200.0, 2.0)
    assert (prefill["transfer_s"], prefill["transfers_failed"]) == (None, None)


@pytest.mark.parametrize(
    ("prefill", "decode", "grow"),
    [(0.5, 3.0, "decode"), (3.0, 1.5, None), (1.5, 0.0, None), (9.0, 9.0, None)],
)
def test_no_pool_is_to_grow_if_none_or_both_are_short(
    api: Api, prefill: float, decode: float, grow: str | None
) -> None:
    serve(
        api,
        prefill_0=counts({RUNNING: 2.0, WAITING: prefill}),
        decode_0=counts({RUNNING: 2.0, WAITING: decode}),
    )
    assert [each["grow"] for each in pools(api)] == [grow]


def test_what_an_idle_or_lonely_pool_does_not_show_is_unknown(api: Api) -> None:
    serve(api, prefill_0=counts({RUNNING: 0.0, WAITING: 5.0}))
    (found,) = pools(api)
    assert (found["load_ratio"], found["grow"], found["pools"][0]["load"]) == (None, None, None)


def test_a_role_that_only_a_newer_agent_knows_is_in_no_pool(api: Api) -> None:
    serve(api, prefill_0=counts({RUNNING: 2.0}), encode_0=counts({RUNNING: 2.0}))
    (found,) = pools(api)
    assert [each["role"] for each in found["pools"]] == ["prefill"]


def test_without_roles_there_are_no_pools(api: Api) -> None:
    serve(api, both_0=counts({RUNNING: 1.0, WAITING: 30.0}))
    assert pools(api) == []
