"""Makes and books minutes of an engine on a database; times are seconds from NOON."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import fsum
from typing import Any

import pytest
from sqlalchemy import Engine, select

from agent.analysis.efficiency.request_activity import TimeRange
from agent.pipeline.deployment import EngineDeployment
from agent.pipeline.minute_jobs import MinuteJob, Timing
from agent.records.gpu import GpuSample
from agent.records.minute import MinuteRow
from agent.records.model import Parallelism
from agent.records.objective import JudgedRequest
from agent.records.prices import Electricity, Price, PriceList
from agent.store.minutes import MinuteStore
from agent.store.observations import ObservationStore
from agent.store.tables import engine_samples, metadata, publishing, requests
from tests.analysis.cost.engine_days import engine_sample
from tests.store.making import MET, NOON, request, store

SETTLE_S = 15.0
MAX_GAP_S = 15.0

# 0.1 cent a second.
A_SECOND_USD = 0.001
PRICE = Price(setting="test", engine="chat-0", gpu_hour_usd=3.6)


class Minutes:
    """One engine with one GPU of known price, and the job that books its minutes."""

    def __init__(self, database: Engine, *prices: Price, **deployed: Any) -> None:
        self.database = database
        self.gpu_samples: list[GpuSample] = []
        self.failures: list[str] = []
        self.missing: list[tuple[str, str]] = []
        self.published: list[tuple[MinuteRow, MinuteRow | None]] = []
        self.store = MinuteStore(database, "agent-0")
        electricity: Electricity | None = deployed.pop("electricity", None)
        max_gap_s: float = deployed.pop("max_gap_s", MAX_GAP_S)
        self._dialect: str = deployed.pop("dialect", "vllm")
        known: dict[str, Any] = {"parallelism": Parallelism(), "gpus": self._last}
        self._job = MinuteJob(
            EngineDeployment(
                engine="chat-0",
                prices=PriceList(prices=prices, electricity=electricity),
                missing=lambda *why: self.missing.append(why),
                **(known | deployed),
            ),
            self.store,
            self._gpu_samples,
            timing=Timing(max_gap_s=max_gap_s, settle_s=SETTLE_S, keep_s=86400.0),
            on_minute=lambda *minutes: self.published.append(minutes),
            on_failure=self.failures.append,
        )

    def _last(self) -> Sequence[GpuSample]:
        newest = {sample.gpu: sample for sample in self.gpu_samples}
        return list(newest.values())

    def _gpu_samples(self, _gpus: Any, _window: TimeRange) -> Sequence[GpuSample]:
        return self.gpu_samples

    def read(self, times: Iterable[float], **increase_per_s: float) -> None:
        """Store samples at these seconds; `increase_per_s` is of counters, gauges are always 1."""
        observations = ObservationStore(self.database, "agent-0")
        for at in times:
            facts = {name: each * at for name, each in increase_per_s.items()}
            observations.write_engine_sample(engine_sample(NOON + at, **facts))

    def read_one(self, at: float, model: str = "llama", /, **values: float) -> None:
        sample = engine_sample(NOON + at, **values)
        sample = replace(sample, model=model, dialect=self._dialect)
        ObservationStore(self.database, "agent-0").write_engine_sample(sample)

    def take(self, *judged: JudgedRequest) -> None:
        store(self.database, judged)

    def computed(self, at: float) -> list[MinuteRow]:
        """Compute at this second; returns all stored minutes."""
        self.compute(at)
        return self.store.between("chat-0", NOON - 86400, NOON + 86400)

    def compute(self, at: float) -> None:
        self._job.compute(NOON + at)

    def rows(self) -> list[Mapping[str, Any]]:
        with self.database.connect() as connection:
            found = connection.execute(select(requests).order_by(requests.c.id)).mappings()
            return [{str(name): value for name, value in row.items()} for row in found]

    def costs(self) -> list[float | None]:
        return [row["cost_usd"] for row in self.rows()]


def timed_request(
    number: int, started_at: float, length_s: float, /, **given: Any
) -> JudgedRequest:
    """A request without a queue, a fifth of it prefill: 100 tokens in, 26 out."""
    facts: dict[str, Any] = {
        "started_at": NOON + started_at,
        "ended_at": NOON + started_at + length_s,
        "received_at": NOON + started_at + length_s,
        "queue_s": 0.0,
        "prefill_s": length_s / 5,
        "decode_s": length_s * 4 / 5,
        "ttft_s": length_s / 5,
        "e2e_s": length_s,
        "input_tokens": 100,
        "cached_tokens": 0,
        "output_tokens": 26,
    }
    return request(number, given.pop("judged", MET), **(facts | given))


def every_5_s(until: float, after: float = 0.0) -> list[float]:
    return [at for step in range(int(until // 5) + 1) if (at := 5.0 * step) >= after]


def split_usd(windows: list[MinuteRow]) -> float:
    """The part of the bill that belongs to no request."""
    costs = [window.cost for window in windows if window.cost is not None]
    return fsum(cost.idle + cost.unknown + cost.unseen for cost in costs)


def billed_usd(windows: list[MinuteRow]) -> float:
    return fsum(window.bill_usd or 0.0 for window in windows)


def adds_up(minutes: Minutes, windows: list[MinuteRow]) -> bool:
    """Whether the costs of requests and the rest add up to the bill."""
    costs = fsum(usd or 0.0 for usd in minutes.costs())
    return costs + split_usd(windows) == pytest.approx(billed_usd(windows), rel=1e-9)


def emptied(database: Engine) -> None:
    """Leave nothing but samples of engines."""
    with database.begin() as connection:
        for table in metadata.sorted_tables:
            if table not in (engine_samples, publishing):
                connection.execute(table.delete())
