"""A report as text, Markdown, HTML and JSON."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from agent.catalog.causes import CAUSES, Cause
from agent.outputs.report.document import ReportTable
from agent.outputs.report.figures import ReportFigures
from agent.outputs.report.formats import as_json, markdown, text
from agent.outputs.report.html_page import html_page
from agent.outputs.report.sections import document_of
from tests.outputs.api.traffic import NOW, mixed, verdicts_of
from tests.outputs.report.golden_texts import GOLDEN, WIDTHS
from tests.real_parts.chromium import opened


def tables(read: ReportFigures) -> dict[str, ReportTable]:
    return {table.title: table for table in document_of(read).tables}


@pytest.mark.parametrize("width", WIDTHS)
def test_the_text_is_the_golden_one(read: ReportFigures, width: int) -> None:
    made = text(document_of(read), width)
    assert max(map(len, made.splitlines())) <= width
    assert made == (GOLDEN / f"{width}-columns.txt").read_text(encoding="utf-8")


def test_the_counts_are_those_of_the_requests(read: ReportFigures) -> None:
    begin = NOW - 7200
    seen = Counter(
        verdicts_of(item).get("chat") for item in mixed() if begin <= item.ended_at <= NOW
    )
    seen["missed"] += 1
    row = next(row for row in tables(read)["Objectives"].rows if row[0] == "chat")
    assert row[3:6] == [str(seen[verdict]) for verdict in ("met", "missed", "undetermined")]


def test_the_causes_have_their_seconds_and_what_to_turn(read: ReportFigures) -> None:
    burst, kv = tables(read)["Causes of misses"].rows
    assert list(burst[:4]) == ["burst", "1", "0.75", "75.00 %"]
    assert list(kv[:4]) == ["kv pressure", "0", "0.25", "25.00 %"]
    assert burst[4] == CAUSES[Cause.BURST].knob


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


def test_an_unknown_figure_is_a_dash(read: ReportFigures) -> None:
    assert ["error ratio", "-"] in [list(row) for row in tables(read)["Traffic"].rows]


def test_the_json_is_that_of_the_api(read: ReportFigures) -> None:
    found = json.loads(as_json(read))
    assert found["summary"] == read.summary
    assert found["summary"]["efficiency"]["prefix_cache"]["hit_ratio"] == 0.25
    assert [event["kind"] for event in found["events"]] == ["RESTART"]


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
