"""Limits of an engine that its page does not tell."""

from agent.catalog import engine_facts as fact
from agent.pipeline.engine_limits import EngineLimits
from agent.records.engine import EngineSample
from agent.records.host import EngineProcess, HostSample, ProcessRole
from tests.records.making import NOON

RUNNING, STEP = fact.MAX_RUNNING_REQUESTS.name, fact.MAX_STEP_TOKENS.name
FRONT = EngineProcess(
    pid=7, started_after_boot_s=1.0, role=ProcessRole.FRONT, name="vllm", state="S", cpu_s=1.0
)


def told(limits: EngineLimits, **facts: float) -> dict[str, float]:
    """What a page with these facts tells once the limits are added."""
    page = EngineSample(
        engine="chat-0",
        at=NOON,
        dialect="vllm",
        model="llama",
        facts={(name, ()): value for name, value in facts.items()},
    )
    return {name: value for (name, _), value in limits.added_to(page).facts.items()}


def seen(limits: dict[str, int], *processes: EngineProcess) -> HostSample:
    return HostSample(at=NOON, processes=processes, limits=limits)


def test_what_nobody_says_is_not_told() -> None:
    assert told(EngineLimits({})) == {}


def test_settings_and_flags_are_told_and_settings_come_first() -> None:
    limits = EngineLimits({RUNNING: 64})
    limits.host_sample(seen({RUNNING: 128, STEP: 2048}, FRONT))
    assert told(limits) == {RUNNING: 64, STEP: 2048}


def test_the_page_s_own_word_comes_before_all() -> None:
    assert told(EngineLimits({RUNNING: 64}), **{RUNNING: 48.0}) == {RUNNING: 48}


def test_each_rank_lets_so_many_run_and_computes_a_step_of_its_own() -> None:
    ranks = fact.DATA_PARALLEL_RANKS.name
    limits = EngineLimits({RUNNING: 64, STEP: 2048})
    assert told(limits, **{ranks: 4.0}) == {RUNNING: 256, STEP: 2048, ranks: 4}


def test_a_restart_with_other_flags_is_followed_and_a_death_is_no_restart() -> None:
    limits = EngineLimits({})
    limits.host_sample(seen({RUNNING: 128, STEP: 2048}, FRONT))
    limits.host_sample(seen({}))
    assert told(limits) == {RUNNING: 128, STEP: 2048}
    limits.host_sample(seen({RUNNING: 32}, FRONT))
    assert told(limits) == {RUNNING: 32}
