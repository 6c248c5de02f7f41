"""Makers of the minutes of an engine."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from agent.records.minute import Cost, EngineWork, MinuteRow
from tests.records.making import NOON

FACTS: dict[str, Any] = {
    "engine": "chat-0",
    "model": "llama",
    "gpus": 1,
    "requests": 10,
    "busy_s": 40.0,
    "idle_s": 15.0,
    "unknown_s": 5.0,
    "computed_tokens": 900.0,
    "cached_tokens": 100.0,
    "output_tokens": 200.0,
    "good_tokens": 100.0,
    "counted_output_tokens": 200.0,
    "cache_full_s": 0.0,
    "method": "roofline",
    "steps": "counted",
    "prefill_s": 10.0,
    "prefill_flops": 500.0,
    "prefill_bytes": 10.0,
    "decode_s": 30.0,
    "decode_flops": 150.0,
    "decode_bytes": 150.0,
    "peak_flops_per_s": 100.0,
    "peak_bytes_per_s": 10.0,
    "hardware_mfu": 0.12,
    "joules": 6000.0,
    "gpus_usd": 0.9,
    "electricity_usd": 0.1,
    "idle_usd": 0.2,
    "unknown_usd": 0.05,
    "unseen_usd": 0.05,
    "aborted_usd": 0.1,
    "aborted_prefill_usd": 0.04,
    "computed_usd": 0.2,
    "cached_usd": 0.1,
    "decode_usd": 0.4,
    "good_tokens_by_objective": {"chat": 100.0, "long": 50.0},
}


def minute(number: int = 0, **given: Any) -> MinuteRow:
    """The minute of that number: 40 s busy, a dollar of which requests cost 70 cents.

    On a GPU of 100 FLOP/s and 10 bytes/s, prefill is at half of the FLOPs, decode of the bytes.
    """
    starts_at = int(NOON // 60 + number) * 60
    times = {"starts_at": starts_at, "from_at": float(starts_at), "until": starts_at + 60.0}
    return minute_of(FACTS | times | given)


def minute_of(facts: Mapping[str, Any]) -> MinuteRow:
    """The minute with these values, by the names of their columns."""
    work = {each.name: facts[each.name] for each in fields(EngineWork) if each.name in facts}
    costs = {each.name: facts[f"{each.name}_usd"] for each in fields(Cost)}
    others = {each.name: facts[each.name] for each in fields(MinuteRow) if each.name in facts}
    priced = all(usd is not None for usd in costs.values())
    return MinuteRow(**others, work=EngineWork(**work), cost=Cost(**costs) if priced else None)


def cost_of(computed: MinuteRow) -> Cost:
    """The cost of a minute with a price."""
    assert computed.cost is not None
    return computed.cost


UNKNOWN: dict[str, Any] = dict.fromkeys(
    (
        *("steps", "prefill_s", "prefill_flops", "prefill_bytes", "decode_s", "decode_flops"),
        *("decode_bytes", "peak_flops_per_s", "peak_bytes_per_s", "hardware_mfu", "joules"),
        *("gpus", "gpus_usd", "electricity_usd", "idle_usd", "unknown_usd", "unseen_usd"),
        *("aborted_usd", "aborted_prefill_usd", "computed_usd", "cached_usd", "decode_usd"),
        "good_tokens_by_objective",
    )
)
