"""Facts of samples with their labels as JSON, no more as one text `name{label,label}`.

A fact without labels stays as it was: `"name": value`. One with labels becomes
`"name": [{"labels": ["label", "label"], "value": value}]`. The store reads both forms: agents of an
earlier version on the same database store the old one. The rows are rewritten so that SQL of users
finds one form once all agents are upgraded. A row that cannot be parsed stays as it is.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_LOG = logging.getLogger(__name__)

_ROWS_AT_ONCE = 1000

# Rows without a labelled fact stay as they are.
_TABLES = {
    "engine_samples": (("facts",), "facts LIKE '%{%{%' OR facts LIKE '%[%'"),
    "gpu_samples": (
        ("facts", "mig_instances"),
        "facts LIKE '%{%{%' OR facts LIKE '%[%' OR mig_instances LIKE '%{%'",
    ),
}

Facts = Mapping[str, Any]


def upgrade() -> None:
    """Write every labelled fact as JSON."""
    _rewrite(_with_labels)


def downgrade() -> None:
    """Write every labelled fact as one text."""
    _rewrite(_as_texts)


def _rewrite(changed: Callable[[Facts], Facts]) -> None:
    for table, (columns, condition) in _TABLES.items():
        newest = left = 0
        while rows := _read(table, columns, condition, newest):
            newest = rows[-1]["id"]
            written = list(_rows(rows, columns, changed))
            left += len(rows) - len(written)
            if written:
                _write(table, columns, written)
        if left:
            _LOG.warning("%d rows of %s cannot be parsed and stay as they are", left, table)


def _read(table: str, columns: tuple[str, ...], condition: str, after: int) -> list[dict[str, Any]]:
    query = sa.text(
        f"SELECT id, {', '.join(columns)} FROM {table} "
        f"WHERE id > :after AND ({condition}) ORDER BY id LIMIT {_ROWS_AT_ONCE}"
    )
    return [dict(row) for row in op.get_bind().execute(query, {"after": after}).mappings()]


def _write(table: str, columns: tuple[str, ...], rows: list[dict[str, Any]]) -> None:
    values = ", ".join(f"{column} = :{column}" for column in columns)
    op.get_bind().execute(sa.text(f"UPDATE {table} SET {values} WHERE id = :id"), rows)


def _rows(
    rows: Iterable[Mapping[str, Any]], columns: tuple[str, ...], changed: Callable[[Facts], Facts]
) -> Iterator[dict[str, Any]]:
    for row in rows:
        with suppress(AttributeError, KeyError, TypeError, ValueError):
            yield _row(row, columns, changed)


def _row(
    row: Mapping[str, Any], columns: tuple[str, ...], changed: Callable[[Facts], Facts]
) -> dict[str, Any]:
    written = {"id": row["id"], "facts": json.dumps(changed(json.loads(row["facts"])))}
    if "mig_instances" in columns:
        instances = json.loads(row["mig_instances"])
        written["mig_instances"] = json.dumps(
            [{**each, "facts": changed(each["facts"])} for each in instances]
        )
    return written


def _with_labels(facts: Facts) -> Facts:
    written: dict[str, Any] = {}
    for text, value in facts.items():
        name, brace, labels = text.partition("{")
        if brace:
            entry = {"labels": labels.removesuffix("}").split(","), "value": value}
            written.setdefault(name, []).append(entry)
        else:
            written[name] = value
    return written


def _as_texts(facts: Facts) -> Facts:
    written: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, list):
            for entry in value:
                written[f"{name}{{{','.join(entry['labels'])}}}"] = entry["value"]
        else:
            written[name] = value
    return written
