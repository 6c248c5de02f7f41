"""Rollups and changes in one encoding; the objectives of a series as a JSON list.

Before, bins were in one of three forms and counts in LEB128. Now each column holds every number
from the first to the last that is not zero, each in as many bits as the largest needs. Before, the
names of objectives were joined by commas.

The column of names is renamed, so that agents of an earlier version on the same database fail to
write rather than write in the old encoding. They still store samples with the facts of before
revision 0008, which this version reads.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from struct import pack, unpack, unpack_from
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_MEASURES = ("ttft_s", "tpot_s", "e2e_s", "queue_s")
_FIGURES = ("counts", *_MEASURES)
_ROWS_AT_ONCE = 2000

# How the old encoding and `struct` call a number of so many bytes.
_CODES = {1: "B", 2: "H", 4: "I", 8: "Q"}
_SPARSE = 16
_DENSE = 32
_BITS = (1, 2, 4, 8, 16, 32, 64)


def upgrade() -> None:
    """Encode every row anew."""
    connection = op.get_bind()
    # In the order in which agents of earlier versions read them: the other one may deadlock.
    for table in ("rollup_changes", "rollup_series"):
        with op.batch_alter_table(table) as batch:
            batch.alter_column(
                "objectives",
                existing_type=sa.String(1000),
                type_=sa.Text(),
                existing_nullable=False,
            )
        op.execute(f"ALTER TABLE {table} RENAME COLUMN objectives TO judged_by")
        _list_objectives(connection, table)
    _encode_anew(connection, "rollups", ("width_s", "series", "starts_at"))
    _encode_anew(connection, "rollup_changes", ("id",))


def _list_objectives(connection: sa.Connection, table: str) -> None:
    names = connection.execute(sa.text(f"SELECT DISTINCT judged_by FROM {table}")).scalars().all()
    if names:
        connection.execute(
            sa.text(f"UPDATE {table} SET judged_by = :listed WHERE judged_by = :joined"),
            [{"joined": joined, "listed": _listed(joined)} for joined in names],
        )


def _listed(joined: str) -> str:
    names = joined.split(",") if joined else []
    return json.dumps(names, ensure_ascii=False, separators=(",", ":"))


def _encode_anew(connection: sa.Connection, table: str, key: Sequence[str]) -> None:
    update = sa.text(
        f"UPDATE {table} SET {', '.join(f'{name} = :{name}' for name in _FIGURES)} "
        f"WHERE {' AND '.join(f'{name} = :{name}' for name in key)}"
    ).bindparams(*(sa.bindparam(name, type_=sa.LargeBinary) for name in _FIGURES))
    for rows in _slices(connection, table, key):
        encoded = [
            {name: row[name] for name in key} | {name: _anew(name, row[name]) for name in _FIGURES}
            for row in rows
        ]
        connection.execute(update, encoded)


def _slices(
    connection: sa.Connection, table: str, key: Sequence[str]
) -> Iterator[Sequence[Mapping[Any, Any]]]:
    """The rows in the order of their key, some at a time: a database may hold millions."""
    names, places = ", ".join(key), ", ".join(f":{name}" for name in key)
    columns = ", ".join((*key, *_FIGURES))
    order = f"ORDER BY {names} LIMIT {_ROWS_AT_ONCE}"
    after: dict[str, Any] = dict.fromkeys(key, -1)
    query = sa.text(f"SELECT {columns} FROM {table} WHERE ({names}) > ({places}) {order}")
    while rows := connection.execute(query, after).mappings().all():
        yield rows
        after = {name: rows[-1][name] for name in key}


def _anew(name: str, old: bytes | None) -> bytes | None:
    if old is None:
        return None
    return _encoded(0, _counts(old)) if name == "counts" else _encoded(*_bins(old))


def _counts(old: bytes) -> list[int]:
    """Numbers in LEB128."""
    numbers = []
    number = shift = 0
    for byte in old:
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            numbers.append(number)
            number = shift = 0
    return numbers


def _bins(old: bytes) -> tuple[int, list[int]]:
    """The place of the first bin, and the counts from there on."""
    form, first = unpack_from("<BH", old)
    body = old[3:]
    if form > _DENSE:
        return first, _numbers(body, form - _DENSE)
    if form == 0:
        steps, counts = b"\0" + body, [1] * (len(body) + 1)
    else:
        width = form - _SPARSE
        filled = len(body) // (1 + width)
        steps, counts = body[:filled], _numbers(body[filled:], width)
    places = list(accumulate(steps))
    dense = [0] * (places[-1] + 1)
    for place, count in zip(places, counts, strict=True):
        dense[place] += count
    return first, dense


def _numbers(body: bytes, width: int) -> list[int]:
    return list(unpack(f"<{len(body) // width}{_CODES[width]}", body))


def _encoded(first: int, numbers: list[int]) -> bytes | None:
    """The numbers from the first that is not zero to the last, in the bits of the largest."""
    filled = [place for place, number in enumerate(numbers) if number]
    if not filled:
        return None
    held = numbers[filled[0] : filled[-1] + 1]
    bits = next(bits for bits in _BITS if max(held) < 1 << bits)
    return pack("<BH", bits, first + filled[0]) + _packed(held, bits)


def _packed(numbers: Sequence[int], bits: int) -> bytes:
    if bits >= 8:
        return pack(f"<{len(numbers)}{_CODES[bits // 8]}", *numbers)
    whole = sum(number << bits * place for place, number in enumerate(numbers))
    return whole.to_bytes(-(-bits * len(numbers) // 8), "little")


def downgrade() -> None:
    """Empty the tables, which `goodput-agent db rebuild` fills from the rows that are kept."""
    for table in ("rollup_changes", "rollups", "rollup_series"):
        op.execute(f"DELETE FROM {table}")
    for table in ("rollup_changes", "rollup_series"):
        op.execute(f"ALTER TABLE {table} RENAME COLUMN judged_by TO objectives")
        with op.batch_alter_table(table) as batch:
            batch.alter_column(
                "objectives",
                existing_type=sa.Text(),
                type_=sa.String(1000),
                existing_nullable=False,
            )
