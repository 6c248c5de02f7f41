"""How long an engine was busy for requests without a row."""

from typing import Any

import pytest

from agent.analysis.efficiency.busy_time import time_parts
from agent.analysis.efficiency.time_range import TimeRange
from tests.analysis.cost.engine_days import engine_sample, observation, request
from tests.records.booking import active

TWENTY = TimeRange(0.0, 20.0)
# In the first 10 s: 1,000 prompt tokens in 0.1 s, and 100 tokens, one every 10 ms.
ROW = request(1, 2.0, prefill_s=0.1, decode_s=1.0, input_tokens=1000, output_tokens=101)
ROW = ROW._replace(ended_at=3.1)
NOTHING = {"running": 0.0, "steps": 0.0, "input": 0.0, "output": 0.0, "drafts": 0.0}
OF_ROW = {"running": 0.0, "steps": 101.0, "input": 1000.0, "output": 101.0}


def busy_s(at_10: dict[str, float], at_20: dict[str, float], **both: Any) -> float:
    """Seconds that the engine was busy, with the row in the first half."""
    counts = [NOTHING | both, at_10 | both, at_20 | both]
    samples = [engine_sample(10.0 * n, **each) for n, each in enumerate(counts)]
    return time_parts(observation(samples, TWENTY), active([ROW])).busy_s


def more(**counts: float) -> dict[str, float]:
    """The counters after this more than the row's."""
    return {name: OF_ROW[name] + counts.get(name, 0.0) for name in OF_ROW}


def test_counts_without_a_row_take_the_time_that_rows_took_for_as_many() -> None:
    after = more(steps=50.0, input=2000.0, output=50.0)
    assert busy_s(OF_ROW, after) == pytest.approx(1.1 + 50 * 0.01 + 2 * 0.1)


def test_tokens_in_the_steps_of_a_row_take_no_time_of_their_own() -> None:
    """Two streams, of which one has no row: in proportion to tokens it is 2.2 s."""
    both = more(output=100.0)
    assert busy_s(both, both) == pytest.approx(1.1, abs=0.01)


def test_steps_beyond_those_of_rows_take_time() -> None:
    later = more(steps=50.0, output=150.0)
    assert busy_s(later, later) == pytest.approx(1.1 + 50 * 0.01, abs=0.02)


def test_with_drafts_the_steps_of_a_row_are_unknown_and_tokens_decide() -> None:
    drafted = more(output=101.0) | {"drafts": 40.0}
    assert busy_s(drafted, drafted) == pytest.approx(2.2)


def test_a_prompt_that_is_not_counted_yet_makes_the_interval_busy() -> None:
    assert busy_s(OF_ROW, OF_ROW | {"running": 1.0}) == pytest.approx(11.1)


def test_work_without_a_row_makes_the_interval_busy_where_ranks_step_apart() -> None:
    after = more(steps=50.0, output=50.0)
    assert busy_s(OF_ROW, after, ranks=2.0) == pytest.approx(11.1)


def test_without_any_row_the_pace_is_unknown_and_the_interval_busy() -> None:
    samples = [engine_sample(10.0 * n, **each) for n, each in enumerate((NOTHING, OF_ROW))]
    assert time_parts(observation(samples, TimeRange(0.0, 10.0)), active([])).busy_s == 10.0
