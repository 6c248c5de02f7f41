"""The tables in ClickHouse: steps of DDL in their order, each of which may run again.

Of rows with one key, queries see the one with the highest `row_version`. Sums are rows that a merge
adds up: a rollup has a row for each count and each filled bin. Agents insert the differences of
their sums as one block into `forwarded`, from which views fill the rollups of each width.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import Engine, Table

from agent.catalog.time_units import DAY_S
from agent.errors import StoreUnavailable
from agent.store.clickhouse.column_types import type_of, types_of
from agent.store.clickhouse.connecting import using
from agent.store.rollups import ANY_LENGTH, FIGURES, KEEP_S, SUMMED_WIDTHS_S, WIDTHS_S, Series
from agent.store.tables import (
    agents,
    engine_minutes,
    engine_samples,
    events,
    gpu_samples,
    objectives,
    requests,
)

# A table knows the tokens of this many of its newest blocks: those of 100,000 batches. In
# `forwarded` a batch makes two blocks, its sums and its mark. In a table of sums it makes one for
# each partition: of four widths, and mostly of one month.
_KNOWN = "SETTINGS non_replicated_deduplication_window = {}".format
_FORWARDED_KNOWN, _SUMMED_KNOWN = 200_000, 500_000
_STATES_KEPT_DAYS, _MARKS_KEPT_DAYS = 2, 60
_LONGEST_KEPT_S = 20.0 * 365 * DAY_S

_VERSION = {"row_version": "UInt64", "is_deleted": "UInt8"}
_SERIES = {name: "LowCardinality(String)" for name in Series._fields}
_SERIES_NAMES = ", ".join(_SERIES)
_CAUSE_PLACE = dict.fromkeys(("objective", "limit_name", "cause"), "LowCardinality(String)")

# Differences of sums, as agents forward them. A row with `what` = mark says that a run is stored up
# to a number. `numbers` are the counts and bins of a rollup; `figures` and `places` have the figure
# of each number, and its place in this figure.
FORWARDED_COLUMNS: Mapping[str, str] = {
    "run": "String",
    "last": "Int64",
    "what": "LowCardinality(String)",
    "width_s": "UInt32",
    "starts_at": "Int64",
    **_SERIES,
    "figures": "Array(LowCardinality(String))",
    "places": "Array(Int32)",
    "numbers": "Array(Int64)",
    **_CAUSE_PLACE,
    "requests": "Int64",
    "top_requests": "Int64",
    "excess_s": "Nullable(Float64)",
}

# Tables with the columns of the other databases, each with further columns, the key by which rows
# replace each other, and the expression of its partitions.
_REPLACED: Sequence[tuple[Table, Mapping[str, str], str, str]] = (
    (requests, _VERSION, "started_at, trace_id, span_id", "toYYYYMM(started_at)"),
    (
        engine_minutes,
        _VERSION,
        "agent, engine, starts_at",
        "toYYYYMM(toDateTime(starts_at, 'UTC'))",
    ),
    (engine_samples, {}, "engine, at, agent, id", "toYYYYMM(at)"),
    (gpu_samples, {}, "gpu, at, agent, id", "toYYYYMM(at)"),
    (events, {}, "at, id, agent", "toYYYYMM(at)"),
    (objectives, _VERSION, "agent, name, in_force_from", ""),
    (agents, _VERSION, "name", ""),
)
KEYS = {table.name: key.split(", ") for table, _, key, _ in _REPLACED}
_INDEXES = {
    requests.name: (
        *(
            f"INDEX {name}_bloom {name} TYPE bloom_filter(0.01)"
            for name in ("trace_id", "request_id", "engine_request_id", "response_id")
        ),
        "INDEX ended_at_range ended_at TYPE minmax",
    ),
}


def _declared(columns: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {type_name}" for name, type_name in columns.items())


def _replacing(table: Table, own: Mapping[str, str], key: str, month: str) -> str:
    version = f"({', '.join(own)})" if own else ""
    parts = [_declared({**types_of(table), **own}), *_INDEXES.get(table.name, ())]
    by_month = f"PARTITION BY {month} " if month else ""
    return (
        f"CREATE TABLE IF NOT EXISTS {table.name} ({', '.join(parts)}) "
        f"ENGINE = ReplacingMergeTree{version} {by_month}ORDER BY ({key})"
    )


_STARTED = "toDateTime(starts_at, 'UTC')"
_NARROW_KEPT = ", ".join(
    f"{_STARTED} + toIntervalSecond({width_s + int(kept_s)}) DELETE WHERE width_s = {width_s}"
    for width_s, kept_s in KEEP_S.items()
)


def _summed(name: str, place: Mapping[str, str], sums: Mapping[str, str]) -> str:
    return (
        f"CREATE TABLE IF NOT EXISTS {name} ({_declared({**place, **sums})}) "
        f"ENGINE = AggregatingMergeTree PARTITION BY (width_s, toYYYYMM({_STARTED})) "
        f"PRIMARY KEY ({', '.join([*place][:4])}) ORDER BY ({', '.join(place)}) "
        f"TTL {_NARROW_KEPT} {_KNOWN(_SUMMED_KNOWN)}"
    )


def _placed() -> str:
    """SQL of the pairs of width and input length in whose rollups a difference is counted."""
    both = [
        f"({width_s}, {length})"
        for width_s in WIDTHS_S
        for length in ("input_length", f"'{ANY_LENGTH}'")
        if length == "input_length" or width_s in SUMMED_WIDTHS_S
    ]
    return f"arrayJoin([{', '.join(both)}])"


# A query reads either all lengths together or each length: such rows lie side by side.
_SUM_PLACE = {"width_s": "UInt32", "input_length": _SERIES["input_length"], "starts_at": "Int64"}
_FIGURE = ", ".join(f"'{name}' = {number}" for number, name in enumerate(FIGURES))
_NUMBER_PLACE = {"figure": f"Enum8({_FIGURE})", "place": "Int16"}
_OF_FLEET = {name: _SERIES[name] for name in ("model", "tenant", "judged_by")}

_SUM = "SimpleAggregateFunction(sum, {})".format


def _view(name: str, into: str, series: Iterable[str]) -> str:
    """DDL of the view that fills the rollups of each width from differences."""
    # No alias has the name of a column: which of both such a name means would depend on the
    # settings of the inserting client.
    names = ", ".join(series)
    return (
        f"CREATE MATERIALIZED VIEW IF NOT EXISTS {name} TO {into} AS "
        "SELECT placed.1 AS width_s, intDiv(narrow_at, placed.1) * placed.1 AS starts_at, "
        f"{names}, placed.2 AS input_length, figure, place, sum(number) AS n FROM ("
        f"SELECT starts_at AS narrow_at, {names}, figures, places, numbers, {_placed()} AS placed "
        "FROM forwarded WHERE what = 'rollup') "
        "ARRAY JOIN figures AS figure, places AS place, numbers AS number "
        f"GROUP BY width_s, starts_at, {names}, input_length, figure, place"
    )


_TABLES = (
    *(_replacing(*each) for each in _REPLACED),
    f"CREATE TABLE IF NOT EXISTS forwarded (at DateTime DEFAULT now(), "
    f"{_declared(FORWARDED_COLUMNS)}) ENGINE = MergeTree ORDER BY (run, last, what) "
    f"TTL at + toIntervalDay({_STATES_KEPT_DAYS}) DELETE WHERE what != 'mark', "
    f"at + toIntervalDay({_MARKS_KEPT_DAYS}) DELETE {_KNOWN(_FORWARDED_KNOWN)}",
    _summed("rollups", {**_SUM_PLACE, **_SERIES, **_NUMBER_PLACE}, {"n": _SUM("Int64")}),
    # The same figures for all agents and engines together.
    _summed("fleet_rollups", {**_SUM_PLACE, **_OF_FLEET, **_NUMBER_PLACE}, {"n": _SUM("Int64")}),
    _summed(
        "cause_rollups",
        {**_SUM_PLACE, **_SERIES, **_CAUSE_PLACE},
        {
            "requests": _SUM("Int64"),
            "top_requests": _SUM("Int64"),
            "excess_s": _SUM("Nullable(Float64)"),
        },
    ),
    _view("forwarded_rollups", "rollups", [name for name in _SERIES if name != "input_length"]),
    _view("forwarded_fleet", "fleet_rollups", _OF_FLEET),
    "CREATE MATERIALIZED VIEW IF NOT EXISTS forwarded_causes TO cause_rollups AS "
    f"SELECT width_s, starts_at, {_SERIES_NAMES}, objective, limit_name, cause, "
    "sum(counted) AS requests, sum(top) AS top_requests, sum(seconds) AS excess_s FROM ("
    f"SELECT width_s, starts_at, {_SERIES_NAMES}, objective, limit_name, cause, "
    "requests AS counted, top_requests AS top, excess_s AS seconds "
    "FROM forwarded WHERE what = 'cause') "
    f"GROUP BY width_s, starts_at, {_SERIES_NAMES}, objective, limit_name, cause",
)

# The revision of a database is the number of steps that it has.
STEPS: Sequence[Sequence[str]] = (_TABLES,)

_VERSIONS = (
    "CREATE TABLE IF NOT EXISTS schema_versions (version UInt32, at DateTime DEFAULT now()) "
    "ENGINE = ReplacingMergeTree ORDER BY version"
)
_CANNOT = "the database cannot be prepared"


def revision_of(client: Any) -> int:
    """The revision of a database; 0 of an empty one."""
    if not int(client.command("EXISTS TABLE schema_versions")):
        return 0
    found = client.query("SELECT max(version) FROM schema_versions").first_row[0]
    return int(found or 0)


def upgrade_clickhouse(engine: Engine) -> tuple[str | None, str | None]:
    """Run the steps that a database lacks; returns its revisions before and after.

    Another agent may run the same steps at the same time. Raises StoreUnavailable where the
    database does not answer, or was made by a newer version.
    """
    with using(engine, _CANNOT) as client:
        client.command(_VERSIONS)
        before = revision_of(client)
        _require_known(before)
        for number in range(before, len(STEPS)):
            for statement in STEPS[number]:
                client.command(statement)
            client.command(f"INSERT INTO schema_versions (version) VALUES ({number + 1})")
        for statement in _missing_columns(client):
            client.command(statement)
    return _named(before), _named(len(STEPS))


def require_newest_clickhouse(engine: Engine) -> None:
    """Raise StoreUnavailable unless a database has all steps and columns of this version."""
    with using(engine, "the database does not answer") as client:
        found = revision_of(client)
        _require_known(found)
        missing = [*_missing_columns(client)] if found else []
    if found < len(STEPS) or missing:
        raise StoreUnavailable(
            f"the database is at revision {_named(found)}, and this version reads "
            f"{_named(len(STEPS))} with all its columns; "
            "run `goodput-agent db upgrade` of this version on it"
        )


def _require_known(found: int) -> None:
    if found > len(STEPS):
        raise StoreUnavailable(
            f"the database is at revision {_named(found)}, which this version does not know (its "
            f"newest is {_named(len(STEPS))}); start the version that made it, or a newer one"
        )


def _named(revision: int) -> str | None:
    return f"clickhouse-{revision}" if revision else None


def _missing_columns(client: Any) -> Iterator[str]:
    """DDL that adds the declared columns that the database lacks."""
    query = "SELECT table, name FROM system.columns WHERE database = currentDatabase()"
    there = {tuple(row) for row in client.query(query).result_rows}
    for table, *_ in _REPLACED:
        for column in table.c:
            if (table.name, column.name) not in there:
                added = f"ADD COLUMN IF NOT EXISTS {column.name} {type_of(column)}"
                yield f"ALTER TABLE {table.name} {added}"


def keep_for(client: Any, requests_s: float, rollups_s: float) -> None:
    """Let the server delete rows that are older than these seconds.

    The agent that started last decides for all agents. ClickHouse's times end in 2106, so longer
    than 20 years counts as 20 years.
    """
    requests_s, rollups_s = min(requests_s, _LONGEST_KEPT_S), min(rollups_s, _LONGEST_KEPT_S)
    for table, at, kept_s in (
        (requests.name, "started_at", requests_s),
        (engine_samples.name, "at", requests_s),
        (gpu_samples.name, "at", requests_s),
        (events.name, "at", rollups_s),
        (engine_minutes.name, "toDateTime(starts_at, 'UTC')", rollups_s),
    ):
        _set_ttl(client, table, f"toDateTime({at}) + toIntervalSecond({kept_s:.0f})")
    days = f"{_STARTED} + toIntervalSecond({DAY_S + rollups_s:.0f}) DELETE"
    for table in ("rollups", "fleet_rollups", "cause_rollups"):
        _set_ttl(client, table, f"{_NARROW_KEPT}, {days}")


def _set_ttl(client: Any, table: str, ttl: str) -> None:
    """Change the TTL of a table, unless it has this one already."""
    query = (
        "SELECT engine_full FROM system.tables "
        "WHERE database = currentDatabase() AND name = {name:String}"
    )
    ((engine,),) = client.query(query, {"name": table}).result_rows
    # The server's text of a table leaves out DELETE, which is the default.
    if f"TTL {ttl.replace(' DELETE', '')}" not in engine:
        client.command(f"ALTER TABLE {table} MODIFY TTL {ttl}")
