"""Reads a run to compare: only the columns that it needs, a batch of rows at a time."""

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement, Connection, Engine, case, func, null, select

from agent.analysis.comparison.run_columns import MinuteColumns, ObjectiveColumn, RunColumns
from agent.catalog.definitions import Verdict
from agent.errors import AgentError
from agent.records.columns import Array
from agent.records.event import Confidence
from agent.records.queries import Selection, Window
from agent.records.request import BY_CLIENT, FAILED, Status
from agent.store.connection import ROWS_PER_READ, for_reading, reading
from agent.store.rollup_queries import first_data_at
from agent.store.row_groups import ended_in
from agent.store.sql_functions import UnixSeconds
from agent.store.tables import engine_minutes, events, requests

_MINUTE = engine_minutes.c
# What no cause was found for yet.
NO_CAUSE = "no cause yet"


class RunEmpty(AgentError):
    """No request of a run is in the database."""


_KNOWN_S = _MINUTE.busy_s + _MINUTE.idle_s
# What is selected of a minute, by the columns of MinuteColumns.
_OF_MINUTE: dict[str, ColumnElement[Any]] = {
    "at_s": _MINUTE.from_at,
    "flops": _MINUTE.prefill_flops + _MINUTE.decode_flops,
    "possible_flops": _MINUTE.peak_flops_per_s * _KNOWN_S,
    # What one step read for both phases counts once, and without FLOPs the work is unknown.
    "moved_bytes": case(
        (
            (_MINUTE.prefill_flops + _MINUTE.decode_flops).is_not(None),
            func.coalesce(_MINUTE.prefill_bytes, 0.0)
            + func.coalesce(_MINUTE.decode_bytes, 0.0)
            - func.coalesce(_MINUTE.shared_bytes, 0.0),
        )
    ),
    "possible_bytes": _MINUTE.peak_bytes_per_s * _KNOWN_S,
    "bill_usd": _MINUTE.gpus_usd + func.coalesce(_MINUTE.electricity_usd, 0.0),
    "output_tokens": _MINUTE.counted_output_tokens,
    "good_tokens": _MINUTE.good_tokens,
}


def whole_window(engine: Engine) -> Window:
    """From the first counted request of a database until after its last. Raises RunEmpty."""
    query = select(func.min(requests.c.ended_at), func.max(requests.c.ended_at))
    with reading(engine) as connection:
        first, last = connection.execute(query.where(requests.c.counted)).one()
    if first is None:
        raise RunEmpty("the database has no request")
    return Window(from_s=int(first), until=last + 1e-3)


def read_run(
    engine: Engine,
    name: str,
    window: Window,
    chosen: Selection,
    targets: Mapping[str, float] | None = None,
) -> RunColumns:
    """The run of a window: the requests that ended in it, and the minutes that lie inside.

    It begins with the data, if that begins later. `targets` are those of objectives, by name.
    Raises RunEmpty and StoreUnavailable.
    """
    with reading(for_reading(engine)) as connection:
        begin = max(float(window.from_s), first_data_at(connection, chosen.source) or 0.0)
        columns = _request_columns(connection, window, chosen, targets or {})
        if not len(columns["ended_s"]):
            raise RunEmpty(f"{name}: no request that was asked for ended in this window")
        return RunColumns(
            name=name,
            length_s=max(window.until - begin, 1e-3),
            **{**columns, "ended_s": columns["ended_s"] - begin},
            minutes=_minutes(connection, begin, window, chosen),
            events=_events(connection, begin, window, chosen),
            causes=_causes(connection, window, chosen),
            began_at=begin,
        )


def read_events(engine: Engine, window: Window, chosen: Selection) -> dict[str, Array]:
    """The times of events by kind, in seconds from the begin of a window."""
    with reading(for_reading(engine)) as connection:
        return _events(connection, window.from_s, window, chosen)


def _request_columns(
    connection: Connection, window: Window, chosen: Selection, targets: Mapping[str, float]
) -> dict[str, Any]:
    # A refusal takes no time, and would hide how long real responses take.
    timed = requests.c.status != Status.INVALID.value
    selected = {
        "ended_s": UnixSeconds(requests.c.ended_at),
        **{name: case((timed, requests.c[name])) for name in ("ttft_s", "tpot_s", "e2e_s")},
        "input_tokens": requests.c.input_tokens,
        "output_tokens": requests.c.output_tokens,
        "failed": case(
            (requests.c.status.in_(BY_CLIENT), null()),
            (requests.c.status.in_(FAILED), 1.0),
            else_=0.0,
        ),
        "verdict": requests.c.verdict,
        "verdicts": requests.c.verdicts,
    }
    query = select(*selected.values()).where(*ended_in(window, chosen))
    rows = connection.execute(query, execution_options={"yield_per": ROWS_PER_READ})
    judges = [_Met(chosen.objective), *map(_Met, targets)]
    parts = [_columns(batch, judges) for batch in chain(rows.partitions(), [[]])]
    columns = [np.concatenate(each) for each in zip(*parts, strict=True)]
    numbers, (of_all, *of_objectives) = columns[:_NUMBERS], columns[_NUMBERS:]
    objectives = zip(targets.items(), of_objectives, strict=True)
    return {
        **dict(zip(list(selected)[:_NUMBERS], numbers, strict=True)),
        "met": of_all,
        "objectives": {name: ObjectiveColumn(target, met) for (name, target), met in objectives},
    }


class _Met(dict[str, float]):
    """1 for a stored verdict that is met, 0 for missed, NaN else; verdicts are few."""

    def __init__(self, objective: str | None) -> None:
        self.objective = objective

    def __missing__(self, stored: str) -> float:
        verdict = stored if self.objective is None else json.loads(stored).get(self.objective)
        found = {Verdict.MET.value: 1.0, Verdict.MISSED.value: 0.0}.get(verdict, np.nan)
        self[stored] = found
        return found


_NUMBERS = 7


def _columns(rows: Sequence[Sequence[Any]], met: Sequence[_Met]) -> list[Array]:
    *numbers, verdict, verdicts = zip(*rows, strict=True) if rows else [()] * (_NUMBERS + 2)
    # Unknown becomes NaN.
    found = [np.array(each, dtype=np.float64) for each in numbers]
    for of_one in met:
        stored = verdict if of_one.objective is None else verdicts
        found.append(np.array([of_one[each] for each in stored], dtype=np.float64))
    return found


def _minutes(
    connection: Connection, begin: float, window: Window, chosen: Selection
) -> MinuteColumns:
    """The minutes of an engine are those of all tenants, and of all objectives."""
    if chosen.tenant is not None:
        return MinuteColumns()
    conditions = [_MINUTE.from_at >= begin, _MINUTE.until <= window.until]
    conditions += _of_engine(engine_minutes, chosen)
    if chosen.model is not None:
        conditions.append(_MINUTE.model == chosen.model)
    rows = connection.execute(select(*_OF_MINUTE.values()).where(*conditions)).all()
    table = np.array([tuple(row) for row in rows], dtype=np.float64).reshape(-1, len(_OF_MINUTE))
    columns = dict(zip(_OF_MINUTE, table.T, strict=True))
    return MinuteColumns(**{**columns, "at_s": columns["at_s"] - begin})


def _events(
    connection: Connection, begin: float, window: Window, chosen: Selection
) -> dict[str, Array]:
    """Without those that are only suspected. One model's are those of engines that served it."""
    query = select(events.c.kind, events.c.at).where(
        events.c.at >= begin,
        events.c.at < window.until,
        events.c.confidence != Confidence.SUSPECTED.value,
        *_of_engine(events, chosen),
    )
    if chosen.model is not None:
        served = select(requests.c.engine).where(*ended_in(window, chosen)).distinct()
        query = query.where(events.c.engine.in_(served))
    found: dict[str, list[float]] = {}
    for kind, at in connection.execute(query):
        found.setdefault(kind, []).append(at - begin)
    return {kind: np.array(times) for kind, times in found.items()}


def _causes(connection: Connection, window: Window, chosen: Selection) -> dict[str, int]:
    cause = func.coalesce(requests.c.cause, NO_CAUSE)
    query = select(cause, func.count()).where(
        *ended_in(window, chosen), requests.c.verdict == Verdict.MISSED.value
    )
    return {name: count for name, count in connection.execute(query.group_by(cause))}


def _of_engine(table: Any, chosen: Selection) -> list[ColumnElement[bool]]:
    return [] if chosen.engine is None else [table.c.engine == chosen.engine]
