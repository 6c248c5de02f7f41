"""Verdicts on recorded runs of the real engine: see tests/real_engine/comparison_runs.py."""

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.analysis.comparison.comparing import Comparison, Outcome, compare
from agent.analysis.comparison.of_records import run_of
from agent.analysis.comparison.run_columns import RunColumns
from agent.catalog.definitions import GOODPUT
from agent.records.objective import Objective
from agent.sources.result_files import BenchedRun, read_result_file

PAIRS = 13
FOLDER = Path(__file__).parents[2] / "data" / "comparison"
OBJECTIVE = Objective(
    name="recorded", definition=GOODPUT, target=1.0, window_s=1.0, ttft_s=1.0, tpot_s=0.1
)


def recorded(name: str) -> RunColumns:
    found = read_result_file(FOLDER / f"{name}.json.gz")
    assert isinstance(found, BenchedRun)
    return run_of(name, found.records, OBJECTIVE, found.load)


@cache
def compared(pair: str) -> Comparison:
    return compare(recorded(f"{pair}-before"), recorded(f"{pair}-after"))


def excerpt(run: RunColumns, begin: float) -> RunColumns:
    """Four fifths of the time of a run, from this share of it on."""
    begin_s, length_s = begin * run.length_s, 0.8 * run.length_s
    inside = (run.ended_s >= begin_s) & (run.ended_s <= begin_s + length_s)
    columns = ("ttft_s", "tpot_s", "e2e_s", "input_tokens", "output_tokens", "met", "failed")
    values: dict[str, Any] = {name: getattr(run, name)[inside] for name in columns}
    return replace(run, length_s=length_s, ended_s=run.ended_s[inside] - begin_s, **values)


@pytest.mark.slow
def test_the_same_settings_twice_give_no_evidence_in_19_of_20_repetitions() -> None:
    """All recorded pairs, and then some again, each in an excerpt of its own."""
    found = Counter(compared(f"same-{number:02}").outcome for number in range(PAIRS))
    random = np.random.default_rng(16)
    for number in random.permutation(PAIRS)[: 20 - PAIRS]:
        begin = random.uniform(0, 0.2)
        before, after = (
            excerpt(recorded(f"same-{number:02}-{side}"), begin) for side in ("before", "after")
        )
        found[compare(before, after).outcome] += 1
    assert found.total() == 20
    assert found[Outcome.NO_EVIDENCE] >= 19, found


def test_half_the_batch_size_is_found() -> None:
    found = compared("half-00")
    assert found.outcome is Outcome.WORSE
    outcomes = {line.measure.name: line.outcome for line in found.lines}
    # Requests wait longer, and run as fast as before once they have begun.
    assert outcomes["TTFT p50"] is Outcome.WORSE
    assert outcomes["TPOT p50"] is Outcome.NO_EVIDENCE


def test_another_load_is_called_that() -> None:
    assert compared("load-00").load_changes[0] == "request rate 0.5 -> 1.25"
    # Also where nobody says which load was asked for.
    before, after = (
        replace(recorded(f"load-00-{side}"), configured_load={}) for side in ("before", "after")
    )
    found = compare(before, after)
    assert found.outcome is Outcome.LOAD_CHANGED
    assert found.load_changes[0].startswith("requests/s +")
