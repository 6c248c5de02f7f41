"""A comparison reads well on a terminal, in a pull request, and for a program."""

import json
from dataclasses import replace
from functools import cache
from io import StringIO

import numpy as np
from rich.console import Console

from agent.analysis.comparison.comparing import Comparison, compare
from agent.analysis.comparison.run_columns import MinuteColumns, ObjectiveColumn, RunColumns
from agent.outputs.comparison import (
    explanations,
    json_text,
    markdown,
    print_comparison,
    table_cells,
)
from tests.analysis.comparison.queue_runs import QueuedRun


def _run(name: str, seed: int, servers: int) -> RunColumns:
    """A run with all that a database knows; fewer servers use their GPUs less."""
    run = QueuedRun(seed=seed, servers=servers, length_s=1200.0, rate=1.0, mean_s=3.0).run()
    random, used = np.random.default_rng(seed), servers / 8
    varying = {
        column: value * random.normal(1, 0.05, 20)
        for column, value in (("flops", 40.0 * used), ("moved_bytes", 60.0 * used))
    }
    constant = {
        column: np.full(20, value)
        for column, value in (
            *(("possible_flops", 100.0), ("possible_bytes", 100.0), ("bill_usd", 0.05)),
            *(("output_tokens", 1920.0), ("good_tokens", 1500.0)),
        )
    }
    at_s = np.arange(20) * run.length_s / 20
    return replace(
        run,
        name=name,
        minutes=MinuteColumns(at_s=at_s, **varying, **constant),
        events={},
        causes={"sequence_cap": round(run.requests * (1 - used)), "burst": 12},
    )


@cache
def worse() -> Comparison:
    return compare(_run("2026-11-20T10:00/20m", 1, 8), _run("2026-11-21T10:00/20m", 2, 4))


@cache
def other_load() -> Comparison:
    after = QueuedRun(seed=2, rate=6.0).run()
    return compare(QueuedRun(seed=1).run(), replace(after, name="more | requests"))


def printed_comparison(comparison: Comparison, width: int) -> str:
    file = StringIO()
    print_comparison(comparison, Console(file=file, width=width, highlight=False))
    return file.getvalue()


def test_figures_have_their_unit_interval_change_and_verdict() -> None:
    cells = {each.figure: each[1:] for each in table_cells((*worse().load, *worse().lines))}
    ttft = ("464 [452, 489]", "10742", "+2213 %", "worse")
    assert cells["TTFT p95, ms"] == ttft
    assert cells["attainment, %"][2:] == ("-29.33 pp", "no evidence")
    assert cells["OOMs per hour"] == ("0 [0, 0]", "0 [0, 0]", "+0.00", "no evidence")
    assert cells["requests/s"][2:] == ("+7.1 %", "no evidence")
    assert cells["requests in flight"][2:] == ("+87 %", "no evidence")


def test_the_terminal_and_the_markdown_have_the_verdict_the_runs_every_cell_and_the_causes() -> (
    None
):
    texts = (printed_comparison(worse(), 300), markdown(worse()).replace("**", ""))
    for text in (" ".join(text.replace("|", " ").split()) for text in texts):
        assert "Worse than before" in text
        assert "Worse: TTFT p95 +2213 %, " in text
        for run in ("2026-11-20T10:00/20m: 1,200 requests in 20.5 min", "2026-11-21T10:00/20m: "):
            assert run in text
        for cells in table_cells((*worse().load, *worse().lines)):
            assert " ".join(cells) in text
        assert "sequence_cap 0.00 50.00 " in text


def test_each_format_has_its_shape() -> None:
    lines = markdown(worse()).splitlines()
    assert lines[0] == "### :x: Worse than before"
    rows = [line for line in lines if line.startswith("|")]
    # A bar in a name would be another column.
    assert {row.replace("\\|", "").count("|") for row in rows} <= {4, 6}
    assert "more \\| requests" in markdown(other_load())
    assert max(map(len, printed_comparison(worse(), 80).splitlines())) <= 80
    for comparison in (worse(), other_load()):
        assert json.loads(json_text(comparison))["verdict"] == comparison.outcome


def test_facts_and_the_period_that_makes_the_difference_are_told_in_each_format() -> None:
    first, second = (_run(name, seed, 8) for seed, name in ((1, "a"), (2, "b")))
    met = np.ones(first.requests)
    met[:150] = 0.0
    second = replace(
        second,
        began_at=1_790_000_040.0,
        events={"HANG": np.array([60.0])},
        failed=np.where(np.arange(second.requests) < 2, 1.0, 0.0),
        ttft_s=np.where(np.arange(second.requests) < 100, 30.0, second.ttft_s),
        objectives={"chat": ObjectiveColumn(0.9, met)},
    )
    first = replace(first, objectives={"chat": ObjectiveColumn(0.9, np.ones(first.requests))})
    found = compare(first, second)
    sentences = list(explanations(found))
    assert sentences[0] == "Failures of engines: 1 HANG (2026-09-21T14:15:00Z); none before."
    few = "Failed: 2 of 1,200 requests, none of 1,200 before. May be chance (25 %)."
    assert sentences[1] == few
    assert sentences[2].startswith("Target of chat, 90 %: attainment 100.0 % [99.5, 100.0] before")
    (period,) = [each for each in sentences if each.startswith("One period of `after`, 2026-09-21")]
    assert "TTFT p95 +" in period
    for text in (printed_comparison(found, 500), markdown(found)):
        for sentence in sentences:
            assert sentence in text
    as_json = json.loads(json_text(found))
    facts = {each["name"]: each for each in as_json["facts"]}
    assert facts["other failures"]["at_s"] == {"HANG": [60.0]}
    assert (facts["error ratio"]["worse"], facts["error ratio"]["failed"]) == (False, 2)
    assert facts["attainment"]["after"]["value"] == 0.875
    lines = {each["name"]: each for each in as_json["figures"]}
    assert (lines["TTFT p95"]["period"]["run"], lines["TTFT p50"]["period"]) == ("after", None)
