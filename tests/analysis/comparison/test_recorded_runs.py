"""Verdicts on recorded runs of the real engine: see tests/real_engine/comparison_runs.py."""

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from agent.analysis.comparison.comparing import Comparison, Outcome, compare
from agent.analysis.comparison.run_columns import RunColumns, run_of
from agent.catalog.definitions import GOODPUT
from agent.records.objective import Objective
from agent.sources.result_files import BenchedRun, read_result_file

PAIRS = 20
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


@pytest.mark.slow
def test_the_same_settings_twice_give_no_evidence_in_19_of_20_repetitions() -> None:
    found = Counter(compared(f"same-{number:02}").outcome for number in range(PAIRS))
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
