"""Stores rollups by minute, hour and day, by engine, model, tenant and input length, compactly.

Rollups of ten seconds and of a minute are converted, and summed by hour and by day. The input
length of their requests is unknown: it was not stored.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from struct import pack
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_row_number = sa.BigInteger().with_variant(sa.Integer, "sqlite")

_SHARED = {"agent": 100, "engine": 100, "model": 256, "tenant": 256}
_MEASURES = ("ttft_s", "tpot_s", "e2e_s", "queue_s")
_TOKENS = ("input_tokens", "output_tokens")
_STATUSES = ("ok", "error", "timeout", "cancelled", "throttled")
_VERDICTS = ("met", "missed", "undetermined")
_OLD_WIDTHS_S = (10, 60)
_SUMMED_WIDTHS_S = (3600, 86400)
_DAY_S = 86400

# The lowest bin of scale 6: one microsecond.
_LOWEST_BIN = -1275
_BYTES = {1: "B", 2: "H", 4: "I", 8: "Q"}


def upgrade() -> None:
    """Create the new tables and fill them from the old one."""
    op.rename_table("rollups", "old_rollups")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE old_rollups RENAME CONSTRAINT pk_rollups TO pk_old_rollups")
    _make_series()
    _make_rollups()
    _make_changes()
    _write_anew(op.get_bind())
    op.drop_table("old_rollups")


def _shared() -> list[sa.Column[Any]]:
    return [
        *(sa.Column(name, sa.String(size), nullable=False) for name, size in _SHARED.items()),
        sa.Column("input_length", sa.String(8), nullable=False),
        sa.Column("objectives", sa.String(1000), nullable=False),
    ]


def _figures() -> list[sa.Column[Any]]:
    return [
        sa.Column("counts", sa.LargeBinary, nullable=False),
        *(sa.Column(name, sa.LargeBinary) for name in _MEASURES),
    ]


def _make_series() -> None:
    key = [column.name for column in _shared()]
    op.create_table(
        "rollup_series",
        sa.Column("id", _row_number, nullable=False),
        *_shared(),
        sa.PrimaryKeyConstraint("id", name="pk_rollup_series"),
        sa.UniqueConstraint(*key, name="uq_rollup_series_key"),
    )


def _make_rollups() -> None:
    op.create_table(
        "rollups",
        sa.Column("width_s", sa.Integer, nullable=False),
        sa.Column("series", sa.BigInteger, nullable=False),
        sa.Column("starts_at", sa.BigInteger, nullable=False),
        *_figures(),
        sa.PrimaryKeyConstraint("width_s", "series", "starts_at", name="pk_rollups"),
        sqlite_with_rowid=False,
    )


def _make_changes() -> None:
    op.create_table(
        "rollup_changes",
        sa.Column("id", _row_number, nullable=False),
        sa.Column("starts_at", sa.BigInteger, nullable=False),
        *_shared(),
        sa.Column("gone", sa.Boolean, nullable=False),
        *_figures(),
        sa.PrimaryKeyConstraint("id", name="pk_rollup_changes"),
    )


_SERIES_KEY = (*_SHARED, "objectives")
_Place = tuple[int, int, int]


def _write_anew(connection: sa.Connection) -> None:
    numbers = _number_series(connection)
    days = sa.text("SELECT DISTINCT starts_at / 86400 FROM old_rollups ORDER BY 1")
    read = sa.text("SELECT * FROM old_rollups WHERE starts_at >= :start AND starts_at < :end")
    for day in list(connection.execute(days).scalars()):
        edges = {"start": day * _DAY_S, "end": (day + 1) * _DAY_S}
        told: dict[_Place, Counter[Any]] = {}
        for row in connection.execute(read, edges).mappings():
            numbers_of = numbers[tuple(row[name] for name in _SERIES_KEY)]
            for place in _places(row["width_s"], row["starts_at"], *numbers_of):
                told.setdefault(place, Counter()).update(_counted(json.loads(row["tally"])))
        _write(connection, told, {n: key[-1] for key, ns in numbers.items() for n in ns})


def _number_series(connection: sa.Connection) -> dict[tuple[str, ...], tuple[int, int]]:
    """Return the ids of each series: for unknown input length, and for any."""
    names = ", ".join(_SERIES_KEY)
    distinct = sa.text(f"SELECT DISTINCT {names} FROM old_rollups ORDER BY {names}")
    places = ", ".join(f":{name}" for name in _SERIES_KEY)
    insert = sa.text(
        f"INSERT INTO rollup_series ({names}, input_length) VALUES ({places}, :input_length) "
        "RETURNING id"
    )
    numbers = {}
    for row in connection.execute(distinct).mappings().all():
        one, other = (
            connection.execute(insert, {**row, "input_length": length}).scalar_one()
            for length in ("", "*")
        )
        numbers[tuple(row[name] for name in _SERIES_KEY)] = (one, other)
    return numbers


def _places(width_s: int, starts_at: int, unknown: int, any_length: int) -> Iterator[_Place]:
    """Return the new rollups of an old one: a minute also goes to its hour and its day."""
    yield width_s, unknown, starts_at
    if width_s == _OLD_WIDTHS_S[-1]:
        for summed_s in _SUMMED_WIDTHS_S:
            yield summed_s, unknown, starts_at // summed_s * summed_s
            yield summed_s, any_length, starts_at // summed_s * summed_s


def _counted(told: Mapping[str, Any]) -> dict[Any, int]:
    """Return the counts in the old text, by name; counts can be added."""
    counts: dict[Any, int] = {"requests": told["requests"], "seen": told["seen_at_proxy"]}
    for name in _TOKENS:
        counts[name], counts[name, "known"] = told[name]
    counts.update({("status", status): n for status, n in told["statuses"].items()})
    for objective, verdict, requests, output_tokens in told["verdicts"]:
        counts["verdict", objective, verdict] = requests
        counts["tokens", objective, verdict] = output_tokens
    for measure, (first, bins) in told["bins"].items():
        counts.update({("bin", measure, first + n): count for n, count in enumerate(bins) if count})
    return counts


def _write(
    connection: sa.Connection,
    told: Mapping[_Place, Counter[Any]],
    objectives: Mapping[int, str],
) -> None:
    columns = ("width_s", "series", "starts_at", "counts", *_MEASURES)
    places = ", ".join(f":{name}" for name in columns)
    insert = sa.text(f"INSERT INTO rollups ({', '.join(columns)}) VALUES ({places})").bindparams(
        *(sa.bindparam(name, type_=sa.LargeBinary) for name in ("counts", *_MEASURES))
    )
    rows = [
        dict(zip(columns, (*place, *_encoded(counts, objectives[place[1]])), strict=True))
        for place, counts in told.items()
    ]
    connection.execute(insert, rows)


def _encoded(counts: Counter[Any], objectives: str) -> list[bytes | None]:
    names = ["", *objectives.split(",")] if objectives else [""]
    numbers = [
        counts["requests"],
        counts["seen"],
        *(
            counts[key]
            for name in ("input_tokens", "output_tokens")
            for key in (name, (name, "known"))
        ),
        *(counts["status", status] for status in _STATUSES),
        *(
            counts[what, name, verdict]
            for name in names
            for verdict in _VERDICTS
            for what in ("verdict", "tokens")
        ),
    ]
    return [_leb128(numbers), *(_bins(counts, measure) for measure in _MEASURES)]


def _leb128(numbers: Sequence[int]) -> bytes:
    encoded = bytearray()
    for number in numbers:
        left = number
        while left > 127:
            encoded.append(left & 127 | 128)
            left >>= 7
        encoded.append(left)
    return bytes(encoded)


def _bins(counts: Counter[Any], measure: str) -> bytes | None:
    """Return the shortest of three encodings: steps, steps with counts, or all counts."""
    bins = {key[2]: n for key, n in counts.items() if key[0] == "bin" and key[1] == measure and n}
    if not bins:
        return None
    filled = sorted(bins)
    steps = [after - before for before, after in pairwise(filled)]
    width = next(width for width in _BYTES if max(bins.values()) < 1 << 8 * width)
    dense = [bins.get(index, 0) for index in range(filled[0], filled[-1] + 1)]
    forms = [(32 + width, _packed(dense, width))]
    if max(steps, default=0) < 256:
        gaps = [0, *steps]
        spelled = b"".join(
            bytes((gap,)) + bytes(bins[at] - 1) for gap, at in zip(gaps, filled, strict=True)
        )
        sparse = bytes(gaps) + _packed([bins[index] for index in filled], width)
        forms = [(0, spelled[1:]), (16 + width, sparse), *forms]
    form, body = min(forms, key=lambda form: len(form[1]))
    return pack("<BH", form, filled[0] - _LOWEST_BIN) + body


def _packed(counts: Sequence[int], width: int) -> bytes:
    return pack(f"<{len(counts)}{_BYTES[width]}", *counts)


def downgrade() -> None:
    """Create the old table again, empty: the rollups are lost, the rows are kept."""
    for table in ("rollup_changes", "rollups", "rollup_series"):
        op.drop_table(table)
    key = ("width_s", "starts_at", *_SHARED, "objectives")
    op.create_table(
        "rollups",
        sa.Column("width_s", sa.Integer, nullable=False),
        sa.Column("starts_at", sa.BigInteger, nullable=False),
        *(sa.Column(name, sa.String(size), nullable=False) for name, size in _SHARED.items()),
        sa.Column("objectives", sa.String(1000), nullable=False),
        sa.Column("tally", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint(*key, name="pk_rollups"),
    )
