"""The tables in ClickHouse: steps of DDL in their order, each of which may run again.

Of rows with one key, queries see the one with the highest version. That is `changed`, the number of
the transaction in the agent's file: a row that is written again, or too late, changes nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Engine,
    Float,
    Integer,
    LargeBinary,
    String,
    Table,
)
from sqlalchemy.types import TypeEngine

from agent.catalog.time_units import DAY_S
from agent.errors import StoreUnavailable
from agent.store.clickhouse.connecting import using
from agent.store.rollups import KEEP_S
from agent.store.tables import (
    agents,
    cause_rollups,
    engine_counts,
    engine_minutes,
    engine_samples,
    events,
    gpu_samples,
    objectives,
    published_files,
    requests,
    rollup_series,
    rollups,
)
from agent.store.utc_timestamp import UtcTimestamp

# Columns with few different texts: LowCardinality stores each text once in a part.
_FEW_TEXTS = frozenset(
    (
        *("agent", "engine", "model", "tenant", "route", "service_name", "requested_model"),
        *("vantage", "status", "engine_status", "verdict", "verdicts", "cause", "finish_reason"),
        *("error", "workload", "kind", "confidence", "dialect", "gpu", "name", "problem"),
        *("method", "steps", "input_length", "judged_by", "objective", "limit_name", "file"),
    )
)
TIMESTAMP = "DateTime64(6, 'UTC')"
# The first match counts: BigInteger is a subclass of Integer.
_TYPES: tuple[tuple[type[TypeEngine[Any]], str], ...] = (
    (UtcTimestamp, TIMESTAMP),
    (Boolean, "Bool"),
    (BigInteger, "Int64"),
    (Integer, "Int32"),
    (Float, "Float64"),
    (String, "String"),
    # Any bytes are a String; BINARY of agent.store.rollup_queries reads them as they are.
    (LargeBinary, "String"),
)


def type_of(column: Column[Any]) -> str:
    """The type of a column; it is Nullable where the column is nullable."""
    plain = next(name for kind, name in _TYPES if isinstance(column.type, kind))
    if column.name == "id":
        plain = "Int64"
    if column.nullable:
        plain = f"Nullable({plain})"
    has_few = column.name in _FEW_TEXTS and isinstance(column.type, String)
    return f"LowCardinality({plain})" if has_few else plain


def types_of(table: Table) -> Mapping[str, str]:
    """The types of all columns of a table by name."""
    return {column.name: type_of(column) for column in table.c}


_LONGEST_KEPT_S = 20.0 * 365 * DAY_S
_FILES_KEPT_DAYS = 400

DELETED = {"is_deleted": "UInt8"}
ROW_VERSION = {"row_version": "UInt64"}
# When an agent last wrote a rollup of the series.
_WRITTEN_AT = {"written_at": "DateTime DEFAULT now()"}


class _Replacing(NamedTuple):
    """A table whose rows replace those with the same key and a lower version.

    `own` are columns that the other databases do not have.
    """

    table: Table
    key: str
    partition: str = ""
    version: str = "changed"
    own: Mapping[str, str] = {}
    rest: str = ""


# A query reads ranges of many series: with smaller granules it reads fewer rows beside them.
_SMALL_GRANULES = "SETTINGS index_granularity = 256"
_MONTH_OF_START = "toYYYYMM(toDateTime(starts_at, 'UTC'))"
_TABLES = (
    _Replacing(requests, "started_at, trace_id, span_id", "toYYYYMM(started_at)", own=DELETED),
    _Replacing(engine_minutes, "agent, engine, starts_at", _MONTH_OF_START, own=DELETED),
    _Replacing(engine_counts, "agent, engine, width_s, starts_at", "width_s"),
    _Replacing(engine_samples, "engine, at, agent, id", "toYYYYMM(at)"),
    _Replacing(gpu_samples, "gpu, at, agent, id", "toYYYYMM(at)"),
    _Replacing(events, "at, id, agent", "toYYYYMM(at)"),
    _Replacing(rollup_series, "id", version="written_at", own=_WRITTEN_AT),
    _Replacing(rollups, "width_s, series, starts_at", "width_s", rest=_SMALL_GRANULES),
    _Replacing(
        cause_rollups,
        "width_s, series, starts_at, objective, limit_name, cause",
        "width_s",
        rest=_SMALL_GRANULES,
    ),
    _Replacing(
        published_files,
        "agent, file",
        version="last",
        rest=f"TTL toDateTime(at) + toIntervalDay({_FILES_KEPT_DAYS})",
    ),
    _Replacing(objectives, "agent, name, in_force_from", version="row_version", own=ROW_VERSION),
    _Replacing(agents, "name", version="row_version", own=ROW_VERSION),
)
KEYS = {each.table.name: each.key.split(", ") for each in _TABLES}
_INDEXES = {
    requests.name: (
        *(
            f"INDEX {name}_bloom {name} TYPE bloom_filter(0.01)"
            for name in (
                *("trace_id", "request_id", "engine_request_id", "response_id"),
                "session",
            )
        ),
        "INDEX ended_at_range ended_at TYPE minmax",
    ),
}


def _created(each: _Replacing) -> str:
    columns = {**types_of(each.table), **each.own}
    declared = [f"{name} {type_name}" for name, type_name in columns.items()]
    version = ", ".join([each.version, *(DELETED if each.own is DELETED else ())])
    by = f"PARTITION BY {each.partition} " if each.partition else ""
    return (
        f"CREATE TABLE IF NOT EXISTS {each.table.name} "
        f"({', '.join([*declared, *_INDEXES.get(each.table.name, ())])}) "
        f"ENGINE = ReplacingMergeTree({version}) {by}ORDER BY ({each.key}) {each.rest}"
    )


# The revision of a database is the number of steps that it has. The first one was never released.
_FIRST_STEP = 1
STEPS: Sequence[Sequence[str]] = ((), tuple(map(_created, _TABLES)))

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
        for number in range(max(before, _FIRST_STEP), len(STEPS)):
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
    if found == _FIRST_STEP:
        raise StoreUnavailable(
            f"the database is at revision {_named(found)!r} of a version that was never released, "
            "and cannot be migrated; set the URL of an empty database"
        )
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
    for table, *_ in _TABLES:
        for column in table.c:
            if (table.name, column.name) not in there:
                added = f"ADD COLUMN IF NOT EXISTS {column.name} {type_of(column)}"
                yield f"ALTER TABLE {table.name} {added}"


_STARTED = "toDateTime(starts_at, 'UTC')"
_NARROW_KEPT = ", ".join(
    f"{_STARTED} + toIntervalSecond({width_s + int(kept_s)}) DELETE WHERE width_s = {width_s}"
    for width_s, kept_s in KEEP_S.items()
)


def keep_for(client: Any, requests_s: float, rollups_s: float) -> None:
    """Let the server delete rows that are older than these seconds.

    The agent that started last decides for all agents. ClickHouse's times end in 2106, so longer
    than 20 years counts as 20 years.
    """
    requests_s, rollups_s = min(requests_s, _LONGEST_KEPT_S), min(rollups_s, _LONGEST_KEPT_S)
    for table, at, kept_s in (
        (requests, "started_at", requests_s),
        (engine_samples, "at", requests_s),
        (gpu_samples, "at", requests_s),
        (events, "at", rollups_s),
        (engine_minutes, _STARTED, rollups_s),
        (rollup_series, "written_at", DAY_S + rollups_s),
    ):
        _set_ttl(client, table, f"toDateTime({at}) + toIntervalSecond({kept_s:.0f})")
    days = f"{_STARTED} + toIntervalSecond({DAY_S + rollups_s:.0f}) DELETE"
    for table in (rollups, cause_rollups, engine_counts):
        _set_ttl(client, table, f"{_NARROW_KEPT}, {days}")


def _set_ttl(client: Any, table: Table, ttl: str) -> None:
    """Change the TTL of a table, unless it has this one already."""
    query = (
        "SELECT engine_full FROM system.tables "
        "WHERE database = currentDatabase() AND name = {name:String}"
    )
    ((engine,),) = client.query(query, {"name": table.name}).result_rows
    # The server's text of a table leaves out DELETE, which is the default.
    if f"TTL {ttl.replace(' DELETE', '')}" not in engine:
        client.command(f"ALTER TABLE {table.name} MODIFY TTL {ttl}")
