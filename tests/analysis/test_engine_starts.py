"""The phases of a start: they add up to it, and each moment belongs to the innermost span."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.analysis.engine_starts import phases_s
from agent.catalog.start_phases import BOOT, FRONT, PHASE_OF_SPAN, START_PHASES
from agent.records.engine import LoadingSpan

BEGAN, READY = 1000.0, 1100.0


def span(name: str, began_s: float, ended_s: float) -> LoadingSpan:
    return LoadingSpan("chat-0", name, BEGAN + began_s, BEGAN + ended_s)


# As vLLM 0.32 sent them on a CPU: `Worker init` comes from two processes, and the KV cache is
# allocated by the worker while the core prepares the model.
REAL = (
    span("Worker init", 34.0, 36.2),
    span("Initialize model", 36.3, 36.4),
    span("Load weights", 36.8, 40.8),
    span("Load model", 36.3, 41.1),
    span("Loading (CPU)", 36.2, 41.1),
    span("Worker init", 34.0, 41.2),
    span("Executor init", 33.5, 41.2),
    span("Prepare model", 41.2, 44.4),
    span("Allocate KV cache", 41.3, 44.3),
    span("AsyncMPClient init", 32.9, 44.6),
    span("Overall Loading", 32.9, 44.6),
    span("EngineCoreProc init", 33.4, 44.6),
)


def test_the_phases_of_a_real_start() -> None:
    assert phases_s(REAL, BEGAN, BEGAN + 48.6) == pytest.approx(
        {
            BOOT: 32.9,
            "processes": 3.3 + 0.1 + 0.2,
            "model": 0.6 + 0.3,
            "weights": 4.0,
            "profiling": 0.1 + 0.1,
            "kv_cache": 3.0,
            FRONT: 4.0,
        }
    )


def test_without_spans_no_phase_is_known() -> None:
    assert phases_s((), BEGAN, READY) == {}
    assert phases_s([span("llm_request", 1, 2)], BEGAN, READY) == {}


def test_without_the_begin_of_the_process_a_start_begins_with_its_first_span() -> None:
    phases = phases_s([span("Load weights", 10, 40)], None, READY)
    assert phases == pytest.approx({"weights": 30.0, FRONT: 60.0})


def test_workers_that_read_weights_at_the_same_time_are_not_summed() -> None:
    workers = [span("Load weights", 10 + rank, 40 + rank) for rank in range(8)]
    assert phases_s(workers, BEGAN, READY)["weights"] == pytest.approx(37.0)


def test_a_span_of_the_start_before_counts_for_nothing() -> None:
    now = phases_s([span("Load weights", 10, 40)], BEGAN, READY)
    before = span("Compile graph", -500, -400)
    assert phases_s([before, span("Load weights", 10, 40)], BEGAN, READY) == now


spans = st.builds(
    lambda name, begin, length: (name, begin, begin + length),
    st.sampled_from(sorted(PHASE_OF_SPAN)),
    st.integers(-20, 120),
    st.integers(-5, 60),
)


@given(st.lists(spans, max_size=12, unique_by=lambda each: each[1]))
def test_phases_add_up_and_equal_those_counted_second_by_second(
    each: list[tuple[str, int, int]],
) -> None:
    found = phases_s([span(*of) for of in each], BEGAN, READY)
    if not found:
        return
    counted: Counter[str] = Counter()
    inside = [(name, max(a, 0), min(b, 100)) for name, a, b in each if min(b, 100) > max(a, 0)]
    first = min(a for _, a, _ in inside)
    for second in range(100):
        active = [(a, name) for name, a, b in inside if a <= second < b]
        latest = max(a for a, _ in active) if active else None
        names = {PHASE_OF_SPAN[name] for a, name in active if a == latest}
        if len(names) > 1:
            # Spans that begin together before the start: either may be the inner one.
            return
        counted[names.pop() if names else (BOOT if second < first else FRONT)] += 1
    assert found == pytest.approx(counted)
    assert sum(found.values()) == pytest.approx(READY - BEGAN)
    assert found.keys() <= START_PHASES.keys()


def test_every_span_has_a_phase_that_is_shown() -> None:
    assert set(PHASE_OF_SPAN.values()) == START_PHASES.keys() - {BOOT, FRONT}
