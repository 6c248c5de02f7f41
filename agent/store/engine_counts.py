"""What engines counted themselves, by minute, hour and day: written at each poll, and queried."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, insert, select

from agent.analysis.engine_counts import total_counts
from agent.records.engine import EngineSample, HistogramSnapshot
from agent.records.engine_counts import CountsRow, EngineCounts, GaugeSum
from agent.records.gpu import FactKey
from agent.records.queries import Selection, Window
from agent.store.connection import read_all
from agent.store.facts import facts_from, facts_json
from agent.store.rollup_queries import RollupRange, cover
from agent.store.rollups import WIDTHS_S
from agent.store.tables import engine_counts
from agent.store.unreadable import DAMAGED, UNREADABLE

# Engines are polled every few seconds, so nothing narrower than a minute would be whole.
COUNT_WIDTHS_S = tuple(width_s for width_s in WIDTHS_S if width_s >= 60)

_COUNTS = engine_counts.c
_KEY = ("agent", "engine", "width_s", "starts_at")


def add_counts(
    connection: Connection, agent: str, sample: EngineSample, counts: EngineCounts
) -> None:
    """Add what an engine counted until this sample to its minute, its hour and its day."""
    rows = [_added(connection, agent, sample, counts, width_s) for width_s in COUNT_WIDTHS_S]
    connection.execute(insert(engine_counts).prefix_with("OR REPLACE"), rows)


def _added(
    connection: Connection, agent: str, sample: EngineSample, counts: EngineCounts, width_s: int
) -> dict[str, Any]:
    starts_at = int(sample.at // width_s) * width_s
    key = dict(zip(_KEY, (agent, sample.engine, width_s, starts_at), strict=True))
    query = select(engine_counts).where(*(_COUNTS[name] == value for name, value in key.items()))
    before = [row.counts for row in _readable(connection.execute(query).mappings())]
    total = total_counts([*before, counts]) or counts
    return {**key, "model": sample.model, "until": sample.at, **_written(total)}


def _written(counts: EngineCounts) -> dict[str, Any]:
    return {
        "covered_s": counts.covered_s,
        "counters": json.dumps(facts_json(counts.counters)),
        "gauges": json.dumps({_name(key): list(each) for key, each in counts.gauges.items()}),
        "histograms": json.dumps(
            {name: _histogram_json(each) for name, each in counts.histograms.items()}
        ),
    }


def _name(key: FactKey) -> str:
    """A name with its labels: few gauges have any."""
    return "|".join((key[0], *key[1]))


def _key(name: str) -> FactKey:
    first, *labels = name.split("|")
    return first, tuple(labels)


def _histogram_json(histogram: HistogramSnapshot) -> dict[str, Any]:
    """JSON has no infinity, so the last bound is left out."""
    return {
        "bounds": histogram.bounds[:-1],
        "counts": histogram.counts,
        "sum": histogram.sum,
    }


def _readable(rows: Iterable[Mapping[Any, Any]]) -> Iterator[CountsRow]:
    for row in rows:
        try:
            yield _row(row)
        except DAMAGED as error:
            UNREADABLE.add(engine_counts.name, {name: row[name] for name in _KEY}, error)


def _row(row: Mapping[Any, Any]) -> CountsRow:
    gauges = dict(json.loads(row["gauges"]))
    histograms = dict(json.loads(row["histograms"]))
    counts = EngineCounts(
        covered_s=float(row["covered_s"]),
        counters=facts_from(row["counters"]),
        gauges={_key(name): GaugeSum(*map(float, each)) for name, each in gauges.items()},
        histograms={name: _histogram(each) for name, each in histograms.items()},
    )
    return CountsRow(
        agent=row["agent"],
        engine=row["engine"],
        model=row["model"],
        width_s=row["width_s"],
        starts_at=row["starts_at"],
        until=row["until"],
        counts=counts,
    )


def _histogram(stored: Mapping[str, Any]) -> HistogramSnapshot:
    bounds = (*map(float, stored["bounds"]), inf)
    counts = tuple(map(float, stored["counts"]))
    if len(bounds) != len(counts):
        raise ValueError(f"{len(counts)} counts of {len(bounds)} buckets")
    return HistogramSnapshot(bounds, counts, float(stored["sum"]))


class EngineCountQueries:
    """Queries what engines counted. Raises StoreUnavailable."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def engine_counts(
        self, over: Window, chosen: Selection, step_s: int | None = None
    ) -> Sequence[CountsRow]:
        """The rows of a window, of the chosen agent, engine and model: the widest ones inside it.

        It begins and ends with whole minutes. With a step in seconds, a multiple of a minute, no
        row reaches into two steps; steps begin with the window.
        """
        fitting = [w for w in COUNT_WIDTHS_S if step_s is None or _fits(w, step_s, over.from_s)]
        narrow_s = COUNT_WIDTHS_S[0]
        from_s = int(over.from_s // narrow_s) * narrow_s
        until_s = -int(-over.until // narrow_s) * narrow_s
        return [
            row
            for each in cover(from_s, until_s, fitting or COUNT_WIDTHS_S[:1])
            for row in self._rows(each, chosen)
        ]

    def _rows(self, wanted: RollupRange, chosen: Selection) -> Iterator[CountsRow]:
        query = select(engine_counts).where(
            _COUNTS.width_s == wanted.width_s,
            _COUNTS.starts_at >= wanted.from_s,
            _COUNTS.starts_at < wanted.until_s,
            *_of(chosen),
        )
        return _readable([row._mapping for row in read_all(self._engine, query)])


def _fits(width_s: int, step_s: int, from_s: float) -> bool:
    return not (step_s % width_s or from_s % width_s)


def _of(chosen: Selection) -> list[ColumnElement[bool]]:
    wanted = {name: getattr(chosen, name) for name in ("agent", "engine", "model")}
    return [_COUNTS[name] == value for name, value in wanted.items() if value is not None]
