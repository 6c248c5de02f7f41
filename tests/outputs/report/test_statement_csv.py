"""Names of a statement that a spreadsheet must not take for formulas."""

import csv
import io
from dataclasses import fields
from decimal import Decimal
from typing import Any

import pytest

from agent.analysis.statement import StatementLine
from agent.outputs.report.statement_csv import as_csv

# https://owasp.org/www-community/attacks/CSV_Injection
SIGNS = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
ATTACKS = [
    *(
        f"{before}{sign}cmd|' /C calc'!A0"
        for sign in SIGNS
        for before in ("", " ", '"', "'", "\xa0")
    ),
    *(f"{before}cmd" for before in ("\t", "\r", "\n")),
    *(f"team;{sign}cmd" for sign in SIGNS),
    *(f"team{separator}=cmd" for separator in ("\t", "\r", "\n", "|", ";;", '"; ')),
]


def statement(*groups: str | None) -> str:
    unknown: dict[str, Any] = dict.fromkeys((field.name for field in fields(StatementLine)), None)
    lines = [
        StatementLine(**{**unknown, "line": "tenant", "group": group, "cost_usd": Decimal("-0.5")})
        for group in groups
    ]
    return as_csv(lines)


def is_formula(cell: str) -> bool:
    """Whether a spreadsheet may take it for one; a number is none."""
    content = cell.lstrip(" \xa0\"'")
    marked = "'" in cell[: len(cell) - len(content)]
    return not marked and content.startswith((*SIGNS, "\t", "\r", "\n")) and content != "-0.5"


@pytest.mark.parametrize("attack", ATTACKS, ids=ascii)
@pytest.mark.parametrize("delimiter", [",", ";", "\t"], ids=["comma", "semicolon", "tab"])
def test_no_cell_is_a_formula_whatever_separates_cells(attack: str, delimiter: str) -> None:
    file = io.StringIO(statement("a name", attack), newline="")
    cells = [cell for row in csv.reader(file, delimiter=delimiter) for cell in row]
    assert [cell for cell in cells if is_formula(cell)] == []


def test_every_cell_is_quoted_and_read_back() -> None:
    names = ["acme", 'a "quoted" one', "a,b", "a;b", None]
    text = statement(*names)
    assert all(cell[0] == cell[-1] == '"' for cell in text.splitlines()[1].split(","))
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["group"] or None for row in rows] == names
    assert {row["cost_usd"] for row in rows} == {"-0.5"}
