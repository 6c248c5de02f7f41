from collections.abc import Mapping
from dataclasses import replace

import pytest

from agent.catalog import engine_facts as fact
from agent.catalog.engines import DIALECTS
from agent.records.engine import EngineSample, HistogramSnapshot
from agent.sources.engines.translate import NameDrift, expected_facts
from tests.sources.engines.fixture_pages import translated_page

SGLANG = DIALECTS["sglang"]
DURATIONS = {fact.REQUEST_DURATION.name: HistogramSnapshot((1.0, float("inf")), (1, 2), 3.0)}
USAGE = fact.KV_CACHE_USAGE.name


def sample(
    facts: Mapping[str, float] | None = None,
    *,
    finished: float | None = None,
    durations: bool = False,
) -> EngineSample:
    known: dict[tuple[str, tuple[str, ...]], float] = {
        (name, ()): value for name, value in (facts or {}).items()
    }
    if finished is not None:
        known[fact.REQUESTS_FINISHED.name, ("stop",)] = finished
    return EngineSample(
        engine="chat",
        at=1.0,
        dialect="sglang",
        model="m",
        facts=known,
        histograms=DURATIONS if durations else {},
        process_started_at=None,
    )


def test_a_restarted_engine_without_requests_has_not_lost_what_it_creates_at_first_use() -> None:
    drift = NameDrift("chat")
    assert drift.gone(sample({USAGE: 0.5}, finished=3, durations=True), SGLANG) == set()
    assert drift.gone(sample({USAGE: 0.0}), SGLANG) == set()
    # Its first request has begun, and none has finished.
    running = {USAGE: 0.1, fact.OUTPUT_TOKENS.name: 9.0, fact.REQUESTS_RUNNING.name: 1.0}
    assert drift.gone(sample(running), SGLANG) == set()


def test_what_an_earlier_run_of_the_agent_saw_is_missed_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worked = sample(finished=3)
    # The settings may have given the limit.
    earlier = {USAGE: 0.5, fact.MAX_CONTEXT_TOKENS.name: 4096.0}
    drift = NameDrift("chat", sample(earlier, finished=3))
    assert drift.gone(worked, SGLANG) == {USAGE}
    assert len(caplog.records) == 1
    marked = replace(worked, facts={**worked.facts, (fact.FACT_MISSING.name, (USAGE,)): 1.0})
    for now in (worked, sample({})):
        assert NameDrift("chat", marked).gone(now, SGLANG) == {USAGE}
    assert len(caplog.records) == 1
    # Another kind of engine at this address.
    assert NameDrift("chat", marked).gone(worked, DIALECTS["vllm"]) == set()


@pytest.mark.parametrize(
    "worked",
    [
        sample(finished=1.0),
        sample(durations=True),
        sample({fact.OUTPUT_TOKENS.name: 9.0, fact.REQUESTS_RUNNING.name: 0.0}),
    ],
)
def test_whatever_is_left_shows_that_requests_have_finished(worked: EngineSample) -> None:
    drift = NameDrift("chat")
    drift.gone(sample({USAGE: 0.5}, finished=3, durations=True), SGLANG)
    assert USAGE in drift.gone(worked, SGLANG)


def test_what_was_gone_stays_gone_over_a_restart_until_it_is_back() -> None:
    drift = NameDrift("chat")
    drift.gone(sample({USAGE: 0.5}, finished=3), SGLANG)
    assert drift.gone(sample(finished=4), SGLANG) == {USAGE}
    assert drift.gone(sample(), SGLANG) == {USAGE}
    assert drift.gone(sample({USAGE: 0.0}), SGLANG) == set()


def test_facts_that_depend_on_settings_and_requests_are_not_expected() -> None:
    drift = NameDrift("chat")
    drift.gone(sample({fact.REQUESTS_ABORTED.name: 1.0}, finished=3), SGLANG)
    assert drift.gone(sample(finished=4), SGLANG) == set()


def test_another_engine_under_the_same_name_lost_nothing() -> None:
    drift = NameDrift("chat")
    drift.gone(sample({USAGE: 0.5}, finished=3), SGLANG)
    assert drift.gone(sample(finished=4), DIALECTS["vllm"]) == set()


@pytest.mark.parametrize(
    "page",
    [
        *("vllm-0.32.0", "vllm-0.32.0-dp2", "vllm-0.32.0-idle"),
        # Of several processes, and of engines without a start time.
        *("vllm-0.33.0-dp4", "sglang-0.5.23", "sglang-0.5.23-dp2", "tgi-3.3.7", "trtllm-1.3.0"),
    ],
)
def test_a_whole_exposition_has_every_fact_that_is_expected(page: str) -> None:
    found = translated_page(page)
    given = {name for name, _ in found.facts} | found.histograms.keys()
    assert expected_facts(found.dialect) <= given
