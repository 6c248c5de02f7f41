"""Queries of charts over time: phases of a sample of requests, and the use of GPUs."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Engine, select

from agent.analysis.phase_means import RequestPhases, request_phases
from agent.records.gpu import GpuUse
from agent.records.queries import Selection, Window
from agent.store.connection import read_all
from agent.store.row_groups import ended_in, sampled
from agent.store.tables import gpu_samples, requests
from agent.store.unreadable import check_row, json_of, readable

MOST_PHASES = 6_000
MOST_GPU_ROWS = 20_000
_PHASES = ("ended_at", "e2e_s", "engine_e2e_s", "queue_s", "prefill_s", "decode_s")
_GPU = ("gpu", "gpu_index", "name", "agent", "at", "facts")


class TimelineQueries:
    """Queries of charts over time. Raises StoreUnavailable."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def phases(
        self, window: Window, selection: Selection, total: int
    ) -> tuple[int, Sequence[RequestPhases | None]]:
        """One in how many of `total` requests was read, and the phases of these.

        None is a request of which the engine told no phases.
        """
        one_in = -(-total // MOST_PHASES) or 1
        slices = sampled(window, one_in)
        columns = [requests.c[name] for name in ("id", *_PHASES)]
        # Rollups may count fewer requests than there are rows.
        query = select(*columns).limit(2 * MOST_PHASES // len(slices))
        rows = [
            row._mapping
            for each in slices
            for row in read_all(self._engine, query.where(*ended_in(each, selection)))
        ]
        return one_in, readable(requests, rows, _phases)

    def gpu_use(self, since: float, until: float, agent: str | None) -> Sequence[GpuUse]:
        """Stored samples of all GPUs, the newest first, at most MOST_GPU_ROWS."""
        at = gpu_samples.c.at
        conditions = [at >= since, at < until]
        if agent is not None:
            conditions.append(gpu_samples.c.agent == agent)
        columns = (gpu_samples.c[name] for name in ("id", *_GPU))
        query = select(*columns).where(*conditions).order_by(at.desc()).limit(MOST_GPU_ROWS)
        rows = read_all(self._engine, query)
        return readable(gpu_samples, (row._mapping for row in rows), _gpu_use)


def _phases(row: Mapping[str, Any]) -> RequestPhases | None:
    # Of thousands of rows, a check of every column takes longer than all the rest.
    values = {name: row[name] for name in _PHASES}
    if not all(isinstance(value, float | int | None) for value in values.values()):
        raise ValueError("a time is no number")
    return request_phases(**values)


def _gpu_use(row: Mapping[str, Any]) -> GpuUse:
    check_row(gpu_samples, row)
    facts = json_of(gpu_samples, "facts", row["facts"])
    return GpuUse(
        gpu=row["gpu"],
        index=row["gpu_index"],
        name=row["name"],
        agent=row["agent"],
        at=row["at"],
        busy=facts.get("gpu_utilization_ratio"),
    )
