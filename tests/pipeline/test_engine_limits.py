"""Limits of an engine that its exposition does not contain."""

from agent.catalog import engine_facts as fact
from agent.pipeline.monitors import EngineLimits
from agent.records.engine import EngineSample
from agent.records.host import EngineProcess, HostSample, ProcessRole
from tests.records.making import NOON

RUNNING, STEP = fact.MAX_RUNNING_REQUESTS.name, fact.MAX_STEP_TOKENS.name
FRONT = EngineProcess(
    pid=7, started_after_boot_s=1.0, role=ProcessRole.FRONT, name="vllm", state="S", cpu_s=1.0
)


def facts_with(limits: EngineLimits, **facts: float) -> dict[str, float]:
    """The facts of a sample after the limits are added."""
    sample = EngineSample(
        engine="chat-0",
        at=NOON,
        dialect="vllm",
        model="llama",
        facts={(name, ()): value for name, value in facts.items()},
    )
    return {name: value for (name, _), value in limits.added_to(sample).facts.items()}


def host_sample(limits: dict[str, int], *processes: EngineProcess) -> HostSample:
    return HostSample(at=NOON, processes=processes, limits=limits)


def test_without_settings_and_flags_limits_are_unknown() -> None:
    assert facts_with(EngineLimits({})) == {}


def test_settings_and_flags_give_limits_and_settings_come_first() -> None:
    limits = EngineLimits({RUNNING: 64})
    limits.host_sample(host_sample({RUNNING: 128, STEP: 2048}, FRONT))
    assert facts_with(limits) == {RUNNING: 64, STEP: 2048}


def test_the_engines_own_facts_override_all() -> None:
    assert facts_with(EngineLimits({RUNNING: 64}), **{RUNNING: 48.0}) == {RUNNING: 48}


def test_running_requests_are_limited_per_rank_and_steps_are_not_summed() -> None:
    ranks = fact.DATA_PARALLEL_RANKS.name
    limits = EngineLimits({RUNNING: 64, STEP: 2048})
    assert facts_with(limits, **{ranks: 4.0}) == {RUNNING: 256, STEP: 2048, ranks: 4}


def test_flags_change_at_a_restart_and_not_at_a_death() -> None:
    limits = EngineLimits({})
    limits.host_sample(host_sample({RUNNING: 128, STEP: 2048}, FRONT))
    limits.host_sample(host_sample({}))
    assert facts_with(limits) == {RUNNING: 128, STEP: 2048}
    limits.host_sample(host_sample({RUNNING: 32}, FRONT))
    assert facts_with(limits) == {RUNNING: 32}
