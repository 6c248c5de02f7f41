"""What an engine did between two samples of it."""

from agent.analysis.engine_moments import engine_moments
from agent.catalog import engine_facts as fact
from agent.records.gpu import Facts


def facts(**values: float) -> Facts:
    return {(getattr(fact, name).name, ()): value for name, value in values.items()}


def test_gauges_are_as_read_and_counters_as_their_increase() -> None:
    before = facts(STEPS=100, STEP_TOKENS=1000, PREEMPTIONS=3, REQUESTS_RUNNING=1)
    after = facts(
        STEPS=160, STEP_TOKENS=4000, PREEMPTIONS=5, REQUESTS_RUNNING=7, REQUESTS_WAITING=2
    )
    (moment,) = engine_moments([(10.0, before), (25.0, after)])
    assert (moment.at, moment.running, moment.waiting) == (25.0, 7, 2)
    assert (moment.steps_per_s, moment.tokens_per_step, moment.preemptions) == (4.0, 50.0, 2.0)
    assert moment.kv_cache_usage is None


def test_after_a_restart_counters_say_nothing() -> None:
    samples = [(0.0, facts(STEPS=100, PREEMPTIONS=9)), (15.0, facts(STEPS=20, PREEMPTIONS=0))]
    (moment,) = engine_moments(samples)
    assert (moment.steps_per_s, moment.preemptions) == (None, None)


def test_an_idle_engine_has_no_tokens_of_a_step() -> None:
    same = facts(STEPS=100, STEP_TOKENS=1000)
    (moment,) = engine_moments([(0.0, same), (15.0, same)])
    assert (moment.steps_per_s, moment.tokens_per_step) == (0.0, None)


def test_one_sample_has_nothing_before_it() -> None:
    assert engine_moments([(0.0, facts(STEPS=1))]) == []
    assert engine_moments([]) == []
