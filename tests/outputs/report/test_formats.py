"""A report as text, Markdown, HTML and JSON."""

import csv
import io
import json
import re
from collections import Counter
from dataclasses import fields, replace
from decimal import Decimal
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from agent.analysis.cost.bill import StatementLine
from agent.catalog.causes import CAUSES, Cause
from agent.outputs.report.document import ReportFigures, ReportTable, document_of
from agent.outputs.report.formats import as_csv, as_json, html_page, markdown, text
from tests.outputs.api.serving import open_api
from tests.outputs.api.traffic import NOW, mixed, verdicts_of
from tests.outputs.report.reported import figures, filled
from tests.real_parts.chromium import opened


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> ReportFigures:
    """The figures of two hours of traffic."""
    with open_api(tmp_path_factory.mktemp("reported")) as api:
        filled(api)
        return figures(api)


def tables(read: ReportFigures) -> dict[str, ReportTable]:
    return {table.title: table for table in document_of(read).tables}


def test_every_format_has_every_title_and_cell(read: ReportFigures) -> None:
    document = document_of(read)
    pages = (text(document, 500), markdown(document), html_page(document))
    for page in (" ".join(unescape(page).split()) for page in pages):
        assert "SIMULATED: " in page
        assert "2026-09-21 12:19:30 to 2026-09-21 14:19:33 UTC" in page
        for table in document.tables:
            assert table.title.lower() in page.lower()
            for row in table.rows:
                assert [cell for cell in row if plain(cell) not in plain(page)] == []
    assert max(map(len, text(document, 80).splitlines())) <= 80
    found = json.loads(as_json(read))
    assert found["summary"] == read.summary
    assert [event["kind"] for event in found["events"]] == ["RESTART"]


def plain(text: str) -> str:
    """The text without what a format adds or replaces so that a name steers nothing."""
    return re.sub(r"[^\w ]", "", " ".join(text.split()))


def test_the_counts_are_those_of_the_requests(read: ReportFigures) -> None:
    begin = NOW - 7200
    seen = Counter(
        verdicts_of(item).get("chat") for item in mixed() if begin <= item.ended_at <= NOW
    )
    seen["missed"] += 1
    row = next(row for row in tables(read)["Objectives"].rows if row[0] == "chat")
    assert row[3:6] == [str(seen[verdict]) for verdict in ("met", "missed", "undetermined")]
    assert ["error ratio", "-"] in [list(row) for row in tables(read)["Traffic"].rows]
    counted = {row[0]: row[1] for row in tables(read)["Counted by the engines themselves"].rows}
    assert (counted["requests"], counted["completed requests/s"]) == ("20", "3")
    rows = tables(read)["Latency by the engines' histograms, ms"].rows
    assert ["ttft", "0.0 to 500", "500 to 1,000", "500 to 1,000", "300"] in [list(r) for r in rows]


def test_the_causes_have_their_seconds_and_what_to_turn(read: ReportFigures) -> None:
    burst, kv = tables(read)["Causes of misses"].rows
    assert list(burst[:4]) == ["burst", "1", "0.75", "75.00 %"]
    assert list(kv[:4]) == ["kv pressure", "0", "0.25", "25.00 %"]
    assert burst[4] == CAUSES[Cause.BURST].text


def test_no_name_or_evidence_steers_the_terminal_or_the_page(read: ReportFigures) -> None:
    groups = dict(read.groups)
    tenant = {**groups["tenant"]["groups"][0], "group": "<script>alert(1)</script>|\x1b]0;x\x07"}
    groups["tenant"] = {**groups["tenant"], "groups": [tenant]}
    document = document_of(replace(read, groups=groups))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text(document, 200))
    assert "<script>alert" not in markdown(document) + html_page(document)
    widths = {line.count(" | ") for line in _markdown_table(markdown(document), "By tenant")}
    assert len(widths) == 1


def _markdown_table(page: str, title: str) -> list[str]:
    lines = page.split(f"## {title}\n\n")[1].split("\n\n")[0].splitlines()
    return [line.replace("\\|", "") for line in lines]


@pytest.mark.slow
def test_the_page_draws_its_charts_alone(read: ReportFigures, tmp_path: Path) -> None:
    """The policy in the file lets nothing in from elsewhere, and the file has no address of any."""
    made = html_page(document_of(read))
    file = tmp_path / "report.html"
    file.write_text(made, encoding="utf-8")
    assert not re.search(r"""(?:src|href)\s*=\s*["']|url\(|@import|fetch\(""", made)
    with opened(f"file://{file}") as there:
        page = there.html("Time per output token")
        assert there.problems == []
    assert page.count("<canvas") == 5
    assert """content="default-src 'none'; script-src 'sha256-""" in page


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


@pytest.mark.parametrize("delimiter", [",", ";", "\t"], ids=["comma", "semicolon", "tab"])
def test_no_cell_is_a_formula_whatever_separates_cells(delimiter: str) -> None:
    for attack in ATTACKS:
        file = io.StringIO(statement("a name", attack), newline="")
        cells = [cell for row in csv.reader(file, delimiter=delimiter) for cell in row]
        assert [cell for cell in cells if is_formula(cell)] == [], ascii(attack)


def test_every_cell_is_quoted_and_read_back() -> None:
    names = ["acme", 'a "quoted" one', "a,b", "a;b", None]
    text = statement(*names)
    assert all(cell[0] == cell[-1] == '"' for cell in text.splitlines()[1].split(","))
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["group"] or None for row in rows] == names
    assert {row["cost_usd"] for row in rows} == {"-0.5"}
