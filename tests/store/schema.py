"""The schema that migrations made, against the tables that this version declares."""

import re
from typing import Any

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Engine, inspect

from agent.store.tables import metadata

_PARTITION = re.compile(r"_(\d{8}|other_days)$")
# On PostgreSQL these have the time as well: see tests/store/test_day_partitions.py.
_KEYS = re.compile(r"uq_requests_trace_id_(proxy_)?span_id(_started_at)?")


def table_names(engine: Engine) -> set[str]:
    """The tables of a database, without their partitions."""
    return {name for name in inspect(engine).get_table_names() if not _PARTITION.search(name)}


def differences(engine: Engine) -> list[Any]:
    """Differences between the database and the tables that this version declares."""
    by_day = engine.dialect.name == "postgresql"

    def is_compared(_: object, name: str | None, kind: str, _found: bool, _other: object) -> bool:
        if kind == "table":
            return _PARTITION.search(name or "") is None
        return not (by_day and _KEYS.fullmatch(name or ""))

    options = {
        "compare_type": True,
        "compare_server_default": True,
        "include_object": is_compared,
    }
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts=options)
        return list(compare_metadata(context, metadata))
