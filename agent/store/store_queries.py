"""What the database is asked: one function a question, answers in the program's own units."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from sqlalchemy import (
    CTE,
    Column,
    ColumnElement,
    Engine,
    ScalarSelect,
    Select,
    Table,
    bindparam,
    case,
    func,
    literal,
    or_,
    select,
    true,
    tuple_,
)

from agent.analysis.contrast import BoxCounts
from agent.analysis.conversations import TurnRequest
from agent.analysis.tally import Tally
from agent.records.gpu import Facts, GpuSample
from agent.records.queries import (
    NEWEST_FIRST,
    OF_ROWS,
    Box,
    Cursor,
    DataSource,
    Dimension,
    Dots,
    GroupCache,
    GroupCost,
    Latency,
    LengthVerdicts,
    PageOf,
    RequestFilter,
    RequestOrder,
    Selection,
    SortKey,
    Window,
)
from agent.store.beside_queries import requests_on, samples_of
from agent.store.cause_queries import CauseQueries
from agent.store.connection import read_all, reading
from agent.store.engine_counts import EngineCountQueries
from agent.store.facts import facts_by_text
from agent.store.minute_sums import MinuteQueries
from agent.store.observations import gpu_row
from agent.store.rollup_queries import selected
from agent.store.row_groups import (
    busiest,
    cached_by,
    cost_by,
    sampled,
    tallies_of_rows,
    verdicts_by_length,
)
from agent.store.scatter_queries import box_counts, dots
from agent.store.session_queries import session_turns
from agent.store.sql_functions import UnixSeconds, has_verdict
from agent.store.tables import agents, events, gpu_samples, objectives, requests
from agent.store.timeline_queries import TimelineQueries
from agent.store.unreadable import check_row, finite, json_columns, json_of, readable, readable_rows

# Six beats: a slow database delays them, and a frozen one is cut off after 30 s.
OVERDUE_AFTER_S = 30.0
# What an agent reported of its engine and stays true after its last beat.
_LASTING = {"name", "model", "dialect", "role", "read_at", "stale_after_s"}
_UNKNOWN = {**dict.fromkeys(_LASTING), "up": None}
# Agents report their engines every 5 s.
_REPORTED_WITHIN_S = 10.0

_COLUMNS = (column for column in agents.c if column.name not in ("instance", "beats"))
_AGENTS = select(
    *_COLUMNS, (UnixSeconds(func.now()) - UnixSeconds(agents.c.seen_at)).label("silent_s")
).order_by(agents.c.name)


def agents_of(engine: Engine) -> Sequence[Mapping[str, Any]]:
    """Every agent by name, the stopped ones included. Raises StoreUnavailable."""
    return readable(agents, read_all(engine, _AGENTS), _agent)


def engines_of(agents_seen: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The engines of all agents that did not stop, as the last beat of each has them.

    What an engine does now is unknown while its agent is overdue.
    """
    return [
        # An agent of another version may leave some out.
        {**_UNKNOWN, **engine, **_stale(engine), **_of_agent(row, engine)}
        for row in agents_seen
        if row["stopped_at"] is None
        for engine in row["engines"] or ()
    ]


def _stale(engine: Mapping[str, Any]) -> dict[str, Any]:
    """When an engine is stale that its agent reports a little later."""
    stale_after_s = engine.get("stale_after_s")
    return {} if stale_after_s is None else {"stale_after_s": stale_after_s + _REPORTED_WITHIN_S}


def _of_agent(row: Mapping[str, Any], engine: Mapping[str, Any]) -> dict[str, Any]:
    own = {"agent": row["name"]}
    if not row["overdue"]:
        return own
    unknown: dict[str, Any] = dict.fromkeys(engine.keys() - _LASTING)
    problem = f"its agent was last seen {row['silent_s']:.0f} s ago"
    return unknown | own | {"problem": problem}


def _agent(row: Mapping[str, Any]) -> Mapping[str, Any]:
    check_row(agents, row)
    silent_s = None if row["silent_s"] is None else max(row["silent_s"], 0.0)
    overdue = None if silent_s is None else silent_s > OVERDUE_AFTER_S
    engines = row["engines"]
    return dict(row) | {
        "engines": None if engines is None else json_of(agents, "engines", engines),
        "silent_s": silent_s,
        "overdue": overdue and row["stopped_at"] is None,
    }


Row = Mapping[str, Any]


# Clocks of agents that share a database may differ by less.
CLOCKS_DIFFER_S = 60.0


def _newest_row(gpus: CTE, *, until: ColumnElement[float] | None = None) -> ScalarSelect[Any]:
    of_one = gpu_samples.alias("of_one")
    rows = select(of_one.c.id).where(of_one.c.gpu == gpus.c.gpu)
    if until is not None:
        rows = rows.where(of_one.c.at <= until)
    newest = rows.order_by(of_one.c.at.desc(), of_one.c.id.desc()).limit(1)
    return newest.correlate(gpus).scalar_subquery()


def _newest_of_each_gpu() -> Select[Any]:
    """One step in the index a GPU: grouping would read every row that is kept."""
    gpus = select(func.min(gpu_samples.c.gpu).label("gpu")).cte("gpus", recursive=True)
    following = select(func.min(gpu_samples.c.gpu)).where(gpu_samples.c.gpu > gpus.c.gpu)
    gpus = gpus.union_all(
        select(following.correlate(gpus).scalar_subquery()).where(gpus.c.gpu.is_not(None))
    )
    until = bindparam("until", type_=gpu_samples.c.at.type)
    newest = func.coalesce(_newest_row(gpus, until=until), _newest_row(gpus))
    return (
        select(gpu_samples)
        .join(gpus, gpu_samples.c.id == newest)
        .order_by(gpu_samples.c.agent, gpu_samples.c.gpu_index, gpu_samples.c.gpu)
    )


_NEWEST_OF_EACH_GPU = _newest_of_each_gpu()

_SORTED_BY: Mapping[SortKey, Column[Any]] = {
    "started": requests.c.started_at,
    **{name: requests.c[f"{name}_s"] for name in ("ttft", "tpot", "e2e", "queue")},
    **{name: requests.c[name] for name in ("input_tokens", "output_tokens")},
    "cost": requests.c.cost_usd,
}
_IDS = ("request_id", "engine_request_id", "response_id", "trace_id")


# Of more requests than these, lengths are counted in a sample.
MOST_BY_LENGTH = 50_000


class StoreQueries(CauseQueries):
    """Queries of the API. Raises StoreUnavailable where the database does not answer."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.minutes = MinuteQueries(engine).minutes
        self.engine_counts = EngineCountQueries(engine).engine_counts
        timelines = TimelineQueries(engine)
        self.phases = timelines.phases
        self.gpu_use = timelines.gpu_use

    def agents(self) -> Sequence[Row]:
        """Every agent that writes to the database, by name."""
        return agents_of(self._engine)

    def requests(
        self,
        wanted: RequestFilter,
        after: Cursor | None,
        limit: int,
        order: RequestOrder = NEWEST_FIRST,
    ) -> PageOf[Row]:
        """Requests after a cursor. Any order but that of time looks at all that match."""
        sorted_by = _SORTED_BY[order.key]
        conditions = _conditions(wanted)
        if order == NEWEST_FIRST:
            return self._newest(requests, sorted_by, conditions, after, limit)
        is_time = order.key == "started"
        conditions.append((sorted_by if is_time else finite(sorted_by)).is_not(None))
        return self._page(requests, sorted_by, conditions, after, limit, ascending=order.ascending)

    def dots(self, wanted: RequestFilter, by: Latency) -> Dots:
        """The requests with a latency as dots, or a sample of them."""
        started = RequestFilter(
            started_from=wanted.started_from, started_until=wanted.started_until
        )
        others = replace(wanted, started_from=None, started_until=None)
        with reading(self._engine) as connection:
            return dots(connection, _conditions(started), _conditions(others), by)

    def box_counts(self, wanted: RequestFilter, box: Box) -> BoxCounts:
        """The requests that match, in a box and outside of it, by their names."""
        with reading(self._engine) as connection:
            return box_counts(connection, _conditions(wanted), box)

    def session_turns(
        self, chosen: Selection, from_s: float, until: float, session: str | None = None
    ) -> Sequence[TurnRequest]:
        """The requests of one session, or of all, that began between two Unix times."""
        with reading(self._engine) as connection:
            return session_turns(connection, chosen, from_s, until, session)

    def requests_on(self, of: DataSource, from_s: float, until: float) -> Sequence[Row]:
        """The requests that ran on an engine between two Unix times, the oldest first."""
        with reading(self._engine) as connection:
            return requests_on(connection, of, from_s, until)

    def samples_of(
        self, of: DataSource, from_s: float, until: float
    ) -> Sequence[tuple[float, Facts]]:
        """The samples of an engine between two Unix times, and the one before."""
        with reading(self._engine) as connection:
            return samples_of(connection, of, from_s, until)

    def verdicts_by_length(
        self, window: Window, selection: Selection, total: int
    ) -> tuple[int, Sequence[LengthVerdicts]]:
        """One in how many of `total` kept rows was read, and their verdicts by length."""
        one_in = -(-total // MOST_BY_LENGTH) or 1
        counts: Counter[tuple[str, str, str]] = Counter()
        for part in sampled(window, one_in):
            for of_input, of_output, met, missed in self._all(verdicts_by_length(part, selection)):
                counts[of_input, of_output, "met"] += met
                counts[of_input, of_output, "missed"] += missed
        lengths = dict.fromkeys((of_input, of_output) for of_input, of_output, _ in counts)
        return one_in, [
            LengthVerdicts(
                input_length=of_input,
                output_length=of_output,
                met=counts[of_input, of_output, "met"],
                missed=counts[of_input, of_output, "missed"],
            )
            for of_input, of_output in sorted(lengths)
        ]

    def request(self, request_id: str, span_id: str | None = None) -> Sequence[Row]:
        """Every span with this request id, that one and then the newest first; clients repeat ids.

        A request that the proxy saw has the id of its client or else one of the proxy. The engine's
        own id, the one in the response and the trace's find it too.
        """
        spans = or_(*(requests.c[name] == span_id for name in ("span_id", "proxy_span_id")))
        order = [requests.c.started_at.desc(), requests.c.id.desc()]
        query = (
            select(requests)
            .where(_has_id(request_id))
            .order_by(*order if span_id is None else [case((spans, 0), else_=1), *order])
            .limit(100)
        )
        return plain_rows(requests, self._rows_of(requests, query))

    def events(
        self,
        after: Cursor | None,
        limit: int,
        *,
        since: float | None = None,
        until: float | None = None,
        agent: str | None = None,
        engine: str | None = None,
        gpu: str | None = None,
        kind: str | None = None,
        confidence: str | None = None,
    ) -> PageOf[Row]:
        """Events after a cursor and between Unix times, the newest first; None matches any."""
        wanted = {"agent": agent, "engine": engine, "gpu": gpu}
        wanted |= {"kind": kind, "confidence": confidence}
        conditions = [
            events.c[name] == value for name, value in wanted.items() if value is not None
        ]
        if since is not None:
            conditions.append(events.c.at >= since)
        if until is not None:
            conditions.append(events.c.at < until)
        return self._newest(events, events.c.at, conditions, after, limit)

    def tallies_by(
        self, dimension: Dimension, window: Window, selection: Selection
    ) -> dict[str | None, Tally]:
        """The counts of the requests that ended in the window, by engine, model and so on.

        By a dimension that only rows know, this reads every row of the window that is kept.
        """
        if dimension not in OF_ROWS:
            return super().tallies_by(dimension, window, selection)
        with reading(self._engine) as connection:
            return tallies_of_rows(connection, dimension, window, selection)

    def costs_by(
        self, dimension: Dimension, window: Window, selection: Selection
    ) -> dict[str | None, GroupCost]:
        """The cost of the requests that ended in a window, by engine, model and so on.

        This reads every row of the window that is kept.
        """
        with reading(self._engine) as connection:
            of_rows = dimension in OF_ROWS
            names = busiest(connection, dimension, window, selection) if of_rows else ()
            rows = connection.execute(cost_by(dimension, window, selection, names)).all()
        return {
            group: GroupCost(requests=count, cost_usd=usd, gpu_hours=hours)
            for group, count, usd, hours in rows
            if isinstance(group, str | None)
        }

    def caches_by(
        self, dimension: Dimension, window: Window, selection: Selection
    ) -> dict[str | None, GroupCache]:
        """The cached tokens of the requests that ended in a window, by tenant and so on.

        This reads every row of the window that is kept.
        """
        with reading(self._engine) as connection:
            of_rows = dimension in OF_ROWS
            names = busiest(connection, dimension, window, selection) if of_rows else ()
            rows = connection.execute(cached_by(dimension, window, selection, names)).all()
        return {
            group: GroupCache(
                requests=count,
                input_tokens=int(prompts),
                cached_tokens=int(cached),
                cached_ratio=int(cached) / int(prompts) if prompts else None,
            )
            for group, count, prompts, cached in rows
            if isinstance(group, str | None)
        }

    def objectives_in_force(self) -> Sequence[Row]:
        """The objectives by which any agent judges now."""
        query = (
            select(objectives)
            .where(objectives.c.in_force_until.is_(None))
            .order_by(objectives.c.name, objectives.c.agent)
        )
        return plain_rows(objectives, self._rows_of(objectives, query))

    def newest_gpu_samples(self, now: float) -> Sequence[Row]:
        """The newest stored sample of each GPU at a Unix time, from any agent.

        A sample from the future is used only where there is no other: the clock was set back.
        """
        newest = _NEWEST_OF_EACH_GPU.params(until=now + CLOCKS_DIFFER_S)
        return plain_rows(gpu_samples, self._rows_of(gpu_samples, newest))

    def gpu_samples(
        self, gpu: str, since: float, until: float, after: Cursor | None, limit: int
    ) -> PageOf[Row]:
        """Samples of a GPU between Unix times, after a cursor, the newest first."""
        at = gpu_samples.c.at
        conditions = [gpu_samples.c.gpu == gpu, at >= since, at <= until]
        return self._newest(gpu_samples, gpu_samples.c.at, conditions, after, limit)

    def knows_gpu(self, gpu: str) -> bool:
        """Whether any sample of this GPU is stored."""
        return bool(self._all(select(gpu_samples.c.id).where(gpu_samples.c.gpu == gpu).limit(1)))

    def _newest(
        self,
        table: Table,
        sorted_by: ColumnElement[float],
        conditions: Sequence[ColumnElement[bool]],
        after: Cursor | None,
        limit: int,
    ) -> PageOf[Row]:
        return self._page(table, sorted_by, conditions, after, limit)

    def _page(
        self,
        table: Table,
        sorted_by: ColumnElement[float],
        conditions: Sequence[ColumnElement[bool]],
        after: Cursor | None,
        limit: int,
        *,
        ascending: bool = False,
    ) -> PageOf[Row]:
        following = [*conditions, _after(table, sorted_by, after, ascending=ascending)]
        order = [each.asc() if ascending else each.desc() for each in (sorted_by, table.c.id)]
        rows = self._whole(table, following, order, limit + 1)
        items = tuple(plain_rows(table, rows[:limit]))
        if len(rows) <= limit:
            return PageOf(items, None)
        last = rows[limit - 1]._mapping
        return PageOf(items, Cursor(last[sorted_by], last["id"]))

    def _whole(
        self,
        table: Table,
        conditions: Sequence[ColumnElement[bool]],
        order: Sequence[ColumnElement[Any]],
        limit: int,
    ) -> Sequence[Any]:
        """The first rows that match, with all columns.

        They are found first: sorting, SQLite would carry every column of every row.
        """
        if self._engine.dialect.name != "sqlite":
            query = select(table).where(*conditions).order_by(*order).limit(limit)
            return self._rows_of(table, query)
        found = select(table.c.id).where(*conditions).order_by(*order).limit(limit).correlate(None)
        return self._rows_of(table, select(table).where(table.c.id.in_(found)).order_by(*order))

    def _rows_of(self, table: Table, query: Select[Any]) -> Sequence[Any]:
        return readable_rows(self._engine, table, query)

    def _all(self, query: Select[Any]) -> Sequence[Any]:
        return read_all(self._engine, query)


def _after(
    table: Table, sorted_by: ColumnElement[float], after: Cursor | None, *, ascending: bool
) -> ColumnElement[bool]:
    if after is None:
        return true()
    # One step in the index of time, however deep the page lies.
    place = tuple_(sorted_by, table.c.id)
    last = tuple_(literal(after.at, sorted_by.type), after.row)
    return place > last if ascending else place < last


def _has_id(request_id: str) -> ColumnElement[bool]:
    return or_(*(requests.c[name] == request_id for name in _IDS))


def _conditions(wanted: RequestFilter) -> list[ColumnElement[bool]]:
    conditions = selected(requests, wanted.selection)
    if wanted.status is not None:
        conditions.append(requests.c.status == wanted.status)
    conditions += [
        requests.c[name] >= value
        for name, value in (
            ("started_at", wanted.started_from),
            ("ttft_s", wanted.min_ttft_s),
            ("tpot_s", wanted.min_tpot_s),
            ("e2e_s", wanted.min_e2e_s),
        )
        if value is not None
    ]
    conditions += [
        requests.c[name] == getattr(wanted, name)
        for name in ("cause", "end_user", "workload", "session", "priority")
        if getattr(wanted, name) is not None
    ]
    conditions += [
        requests.c[f"{name}_s"] <= value
        for name in ("ttft", "tpot", "e2e")
        if (value := getattr(wanted, f"max_{name}_s")) is not None
    ]
    if wanted.any_id is not None:
        conditions.append(_has_id(wanted.any_id))
    lengths = requests.c.input_tokens
    if wanted.min_input_tokens is not None:
        conditions.append(lengths >= wanted.min_input_tokens)
    if wanted.max_input_tokens is not None:
        conditions.append(lengths <= wanted.max_input_tokens)
    if wanted.started_until is not None:
        conditions.append(requests.c.started_at < wanted.started_until)
    return conditions + _verdict_conditions(wanted)


def _verdict_conditions(wanted: RequestFilter) -> list[ColumnElement[bool]]:
    if wanted.selection.objective is None:
        return [requests.c.verdict == wanted.verdict] if wanted.verdict is not None else []
    return [has_verdict(requests.c.verdicts, wanted.selection.objective, wanted.verdict)]


def plain_rows(table: Table, rows: Iterable[Any]) -> list[Row]:
    """Rows with the content of their JSON; those that cannot be read are left out and counted."""
    return readable(table, rows, partial(plain_row, table))


def shown_gpu(agent: str, sample: GpuSample) -> Row:
    """A sample as `newest_gpu_samples` returns it, without a database."""
    return plain_row(gpu_samples, gpu_row(agent, sample))


def plain_row(table: Table, row: Mapping[str, Any]) -> Row:
    """A row with the content of its JSON. Raises one of DAMAGED for one that cannot be read."""
    check_row(table, row)
    plain = dict(row)
    for name in json_columns(table):
        if plain.get(name) is not None:
            plain[name] = json_of(table, name, plain[name])
    if "facts" in plain:
        for part in (plain, *plain.get("mig_instances", ())):
            part["facts"] = facts_by_text(part["facts"])
    if plain.get("gaps") is not None:
        plain["gaps"] = {int(place): count for place, count in plain["gaps"].items()}
    return plain
