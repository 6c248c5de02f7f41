"""Two hours of mixed requests, and exact counts and quantiles of them."""

from collections.abc import Sequence
from datetime import datetime
from math import ceil
from random import Random
from typing import Any

import pytest

from agent.analysis.quantiles import RELATIVE_ERROR
from agent.analysis.verdicts import Judge
from agent.records.objective import Match
from agent.records.request import RequestRecord, Status
from tests.records.making import NOON, objective, record

NOW = NOON + 333.75

RATES = (
    *("goodput_rps", "goodput_tokens_per_s", "throughput_rps"),
    *("input_tokens_per_s", "output_tokens_per_s"),
)

OBJECTIVES = (
    objective("chat", ttft_s=0.2, tpot_s=0.03),
    objective("long", ttft_s=0.4, match=Match(min_input_tokens=300)),
)


def _one(number: int, random: Random) -> RequestRecord:
    e2e_s = random.lognormvariate(0.0, 0.8)
    ended_at = NOW - random.choice((60, 300, 7200)) * random.random()
    return record(
        number,
        engine=random.choice(("chat-0", "chat-1", None)),
        model=random.choice(("llama", "qwen", None)),
        tenant=random.choice(("acme", None, None)),
        status=random.choices(list(Status), (20, 1, 1, 1, 1, 1))[0],
        # Requests in a burst start at the same time.
        started_at=round(ended_at - e2e_s, 1),
        ended_at=ended_at,
        received_at=ended_at + 1,
        ttft_s=random.choices((random.lognormvariate(-1.8, 0.6), None), (9, 1))[0],
        tpot_s=random.choices((random.lognormvariate(-4.0, 0.5), None), (9, 1))[0],
        e2e_s=e2e_s,
        queue_s=random.choices((random.expovariate(50), 0.0), (9, 1))[0],
        input_tokens=random.choices((round(random.lognormvariate(6.5, 2)), None), (9, 1))[0],
        output_tokens=random.randint(0, 200),
    )


def mixed(count: int = 600) -> list[RequestRecord]:
    random = Random("mixed traffic")
    return [_one(number, random) for number in range(count)]


def verdicts_of(item: RequestRecord) -> dict[str, str]:
    """Return the verdict of each objective, and the overall one under an empty name."""
    judgement = Judge(OBJECTIVES).judgement(item)
    return {"": judgement.verdict.value} | {n: v.value for n, v in judgement.by_objective}


def chosen(
    records: Sequence[RequestRecord], objective: str | None = None, **values: str
) -> list[RequestRecord]:
    return [
        item
        for item in records
        if all(getattr(item, name) == value for name, value in values.items())
        and (objective is None or objective in verdicts_of(item))
    ]


def ended_within(
    records: Sequence[RequestRecord], from_s: float, until: float
) -> list[RequestRecord]:
    return [item for item in records if from_s <= item.ended_at < until]


def counts(records: Sequence[RequestRecord], objective: str = "") -> dict[str, int]:
    """Return the number of requests, and of each verdict."""
    verdicts = [verdicts_of(item)[objective] for item in records]
    return {
        "requests": len(records),
        **{verdict: verdicts.count(verdict) for verdict in ("met", "missed", "undetermined")},
    }


def latencies_s(records: Sequence[RequestRecord], figure: str) -> list[float | None]:
    name = figure.replace("_ms", "_s")
    return [getattr(item, name) for item in records if item.status is not Status.INVALID]


def quantile_of(values_s: Sequence[float | None], q: float) -> Any:
    """The exact quantile in milliseconds, at rank ceil(q*n), within the stated error."""
    known = sorted(value for value in values_s if value is not None)
    if not known:
        return None
    exact = 1000 * known[max(1, ceil(round(q * len(known), 9))) - 1]
    # Values below a microsecond share one bin.
    return pytest.approx(exact, rel=RELATIVE_ERROR * (1 + 1e-9), abs=0.0011)


def unix(timestamp: Any) -> float:
    """Return the Unix seconds of a timestamp that must be UTC in ISO 8601."""
    assert timestamp.endswith("Z"), timestamp
    return datetime.fromisoformat(timestamp).timestamp()
