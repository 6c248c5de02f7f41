"""Which cause of a death is reported for given evidence, starts that fail, and faults of GPUs."""

from collections.abc import Sequence

import pytest

from agent.catalog import engine_facts as fact
from agent.catalog.gpu_problems import LOST, UNSEEN
from agent.records.engine import LogSample, ProcessRole
from agent.records.event import Event
from tests.analysis.failures.polled_engine import (
    ALL,
    CHATTER,
    CORE,
    CORE_LOST_LINE,
    CUDA_ERROR_LINE,
    FATAL_LINE,
    FRONT,
    FRONT_ENDED_LINE,
    GPU,
    NEXT,
    OOM_LINE,
    SILENCE,
    SIZING_LINE,
    START_FAILED_LINE,
    STOP_LINE,
    WORKER,
    New,
    Part,
    PolledEngine,
    Scenarios,
    check,
    dying,
    engine_in_use,
    fails,
    host,
    kinds,
    logged,
    process,
    restarts,
    verdicts,
    works,
    xid,
)

KILLS: Scenarios = {
    "a kill is certain and names its victim": [
        dying(host([FRONT], kills=1, node=1, log=logged(CORE_LOST_LINE))), "HOST_OOM certain",
        {"victims": "VLLM::core (11)", "kills": 1, "log_line": CORE_LOST_LINE},
        {"memory_limit_bytes": 1000},
    ],
    "a kill of another process is suspected and does not hide the cause of a death": [
        works(host(ALL, kills=1)),
        works(host(ALL, kills=1)), "HOST_OOM suspected",
        fails(host([], kills=1, log=logged(FATAL_LINE, OOM_LINE))),
        "CUDA_OOM certain, UNREACHABLE certain",
    ],
    "a suspected kill is probable when the death has no other cause": [
        works(host(ALL, kills=1), times=2), "HOST_OOM suspected",
        fails(host([], kills=1, log=logged(CORE_LOST_LINE))),
        "HOST_OOM probable, UNREACHABLE certain",
    ],
    "a kill is probable when the processes are unknown": [
        New(), works(host(kills=0)),
        works(host(kills=1)),
        works(host(kills=1)), "HOST_OOM probable",
    ],
    "kills before the first poll are not reported": [
        New(), works(host(ALL, kills=5, node=9), times=2),
    ],
    "a new cgroup starts its own count": [works(host(ALL, kills=3, inode=8), times=2)],
    "several kills of one death are one event": [
        dying(host([FRONT], kills=1)), "HOST_OOM certain",
        fails(host([], kills=2), times=2), "UNREACHABLE certain",
    ],
    "a kill after a restart is another event": [
        fails(host([], kills=1)), "HOST_OOM certain, UNREACHABLE certain",
        restarts(host(NEXT, kills=1)), "RESTART certain",
        fails(host([], kills=2)), "HOST_OOM certain, UNREACHABLE certain",
    ],
    "each kill of repeated starts is reported": [
        fails(host([], kills=1)), "HOST_OOM certain, UNREACHABLE certain",
        fails(host(NEXT, kills=1), times=7),
        fails(host([], kills=2)), "HOST_OOM certain",
        fails(host(NEXT, kills=2), times=7),
        fails(host([], kills=3)), "HOST_OOM certain",
    ],
    "a kill reported before the death explains it during the next start": [
        works(host([FRONT], kills=1, log=CHATTER)), "HOST_OOM certain",
        fails(host(NEXT[:1], kills=1, log=logged(CORE_LOST_LINE))), "UNREACHABLE certain",
        {"cause": "HOST_OOM"},
        fails(host(NEXT[:1], kills=1, log=CHATTER), times=20),
    ],
    "a kill is the cause of its outage although the engine dies slowly": [
        New(), works(host([*ALL, WORKER], kills=0, log=CHATTER)),
        fails(host(ALL, kills=1, log=CHATTER), "timeout", after_s=40),
        "HOST_OOM certain, UNREACHABLE certain",
        fails(host([], log=logged(CORE_LOST_LINE))),
        fails(host([], log=CHATTER)),
    ],
    "a kill on the machine is ignored when the cgroup counted none": [
        fails(host([], kills=0, node=1, log=logged(CORE_LOST_LINE))), "UNREACHABLE certain",
        fails(host([], kills=0, node=1)), "ENGINE_DEAD certain",
    ],
    "a kill on the machine is ignored when the engine may be elsewhere": [
        New(), works(host(node=0)),
        fails(host(node=1), times=2), "UNREACHABLE certain",
    ],
    "a kill on the machine is suspected when the engine only disappeared": [
        New(), works(host(ALL, node=0)),
        fails(host([], node=1)), "HOST_OOM suspected, UNREACHABLE certain",
    ],
    "the example of docs/failures.md, from 12:00:05 to 12:01:20": [
        New(), works(host(ALL, kills=0, log=CHATTER)),
        dying(host([FRONT], kills=1, log=logged(CORE_LOST_LINE))), "HOST_OOM certain",
        {"victims": "VLLM::core (11)"},
        fails(host([], kills=1, log=CHATTER), after_s=65), "UNREACHABLE certain",
        {"cause": "HOST_OOM"},
        restarts(host(NEXT, kills=1, log=CHATTER)), "RESTART certain", {"gone_s": 70},
    ],
    "a helper process of the engine is no victim": [
        New(), works(host([*ALL, process(ProcessRole.OTHER, 13)], kills=0)),
        works(host(ALL, kills=1)),
        works(host(ALL, kills=1)), "HOST_OOM suspected",
    ],
}  # fmt: skip

# Reported within two polls.
DEATHS: Scenarios = {
    "the kernel killed it beside an out-of-memory line": [
        fails(host([], kills=1, node=1, log=logged(OOM_LINE, FATAL_LINE))),
        "HOST_OOM certain, UNREACHABLE certain",
    ],
    "its container is gone with its cgroup": [
        fails(host([], node=1, log=SILENCE)), "HOST_OOM probable, UNREACHABLE certain",
        fails(host([], node=1, log=SILENCE)),
    ],
    "the line of CUDA comes in the next poll": [
        dying(host(ALL, kills=0, log=logged(FATAL_LINE))),
        fails(host([], kills=0, log=logged(OOM_LINE))), "CUDA_OOM certain, UNREACHABLE certain",
    ],
    "a CUDA error without an Xid": [
        fails(host([], kills=0, log=logged(CUDA_ERROR_LINE, FATAL_LINE))),
        "GPU_FAULT probable, UNREACHABLE certain",
    ],
    "a signal killed its core, without a log": [
        dying(host([FRONT], kills=0, node=0)),
        dying(host([FRONT], kills=0, node=0)), "ENGINE_DEAD certain",
    ],
    "a signal killed its core and left a worker behind": [
        fails(host([WORKER], kills=0, node=0)), "UNREACHABLE certain",
        fails(host([WORKER], kills=0, node=0)), "ENGINE_DEAD probable",
    ],
    "all were killed without log lines": [
        fails(host([], kills=0, node=0, log=SILENCE)), "UNREACHABLE certain",
        fails(host([], kills=0, node=0, log=SILENCE)), "ENGINE_DEAD probable",
    ],
    "a stop line after a death line does not hide the death": [
        fails(host([], kills=0, log=logged(CORE_LOST_LINE, STOP_LINE, FRONT_ENDED_LINE))),
        "UNREACHABLE certain",
        fails(host([], kills=0)), "ENGINE_DEAD certain",
    ],
    "an out-of-memory line explains no death half a minute later": [
        works(host(ALL, kills=0, log=logged(OOM_LINE)), after_s=31),
        fails(host([], kills=0, log=logged(CORE_LOST_LINE))), "UNREACHABLE certain",
        fails(host([], kills=0)), "ENGINE_DEAD certain",
    ],
    "the first line is the evidence": [
        works(host(ALL, kills=0, log=logged(OOM_LINE))),
        fails(host([], kills=0, log=logged("torch.OutOfMemoryError: later", FATAL_LINE))),
        "CUDA_OOM certain, UNREACHABLE certain", {"cause_line": OOM_LINE},
    ],
    "a death after the health check is reported at the next poll": [
        works(host([FRONT], kills=0, log=logged(OOM_LINE, FATAL_LINE))),
        dying(host([FRONT], kills=0, log=SILENCE)), "CUDA_OOM certain", {"log_line": FATAL_LINE},
    ],
    "a death seen by the health check alone at the second poll": [
        New(), works(),
        dying(),
        dying(), "ENGINE_DEAD certain",
    ],
    "a death holds the last sample before it": [
        New(), works(host(ALL, log=CHATTER), {fact.REQUESTS_RUNNING: 7}),
        dying(host([FRONT], log=logged(CORE_LOST_LINE))),
        dying(host([FRONT])), "ENGINE_DEAD certain", {"requests_running": 7, "health": 503},
    ],
    "a core is missing for two polls beside a living front": [
        New(), works(host(ALL), health=None),
        dying(host([FRONT]), health=None),
        dying(host([FRONT]), health=None), "ENGINE_DEAD probable",
        dying(host([FRONT]), health=None, times=3),
    ],
    "a silent log alone": [
        New(), works(host(log=CHATTER)),
        fails(host(log=SILENCE)), "UNREACHABLE certain",
        fails(host(log=SILENCE)), "ENGINE_DEAD suspected",
        fails(host(log=SILENCE), times=3),
    ],
    "two polls that are firm only in the second are not certain": [
        New(), works(host(ALL), health=None),
        dying(host([FRONT]), health=None),
        dying(host([FRONT])), "ENGINE_DEAD probable",
    ],
    "polls with less evidence do not end a death": [
        New(), works(host(ALL), health=None),
        dying(host([FRONT], log=logged(CORE_LOST_LINE)), health=None),
        dying(host([FRONT]), health=None), "ENGINE_DEAD certain",
        dying(health=None),
        dying(host([FRONT]), health=None, times=3),
    ],
    "events of one poll are reported worst first": [
        works(None, {fact.AWAKE: 0, fact.PREEMPTIONS: 3}, xids=[xid(79)]),
        "GPU_FAULT certain, KV_PRESSURE certain, SLEEP certain",
    ],
}  # fmt: skip

NO_DEATHS: Scenarios = {
    "a lost core while the health check passes": [
        works(host([FRONT], kills=0, log=CHATTER), times=5),
    ],
    "an out-of-memory line before an outage": [
        fails(host(ALL, kills=0, log=logged(OOM_LINE))), "UNREACHABLE certain",
        fails(host(ALL, kills=0, log=CHATTER)),
    ],
    "a health check that never passed": [
        New(dialect="sglang"), works(host(ALL), health=503, times=5),
    ],
    "constant facts while it starts": [New(dialect="sglang"), dying(times=5)],
    "it still computes despite its log": [
        New(), works(health=None),
        works(host(log=logged(CORE_LOST_LINE)), health=None),
        works(health=None, times=2),
    ],
    "death lines at every poll of a healthy engine": [
        works(host(ALL, kills=0, log=logged(OOM_LINE, CORE_LOST_LINE)), stalled=True, times=5),
    ],
}  # fmt: skip

STARTS: Scenarios = {
    "a reason may be logged one poll after the failed start": [
        New(), fails(host([FRONT], kills=0, log=logged(START_FAILED_LINE))),
        fails(host([FRONT], kills=0, log=logged(SIZING_LINE))), "SIZING_ERROR certain",
    ],
    "a start that fails after a death is another event": [
        fails(host([], kills=0, log=logged(FATAL_LINE, OOM_LINE)), after_s=60),
        "CUDA_OOM certain, UNREACHABLE certain",
        fails(host([FRONT], kills=0, log=logged(SIZING_LINE, START_FAILED_LINE))),
        "SIZING_ERROR certain",
    ],
    "without a reason it is a death": [
        New(), fails(host([FRONT], kills=0, log=logged(START_FAILED_LINE))),
        fails(host([], kills=0, log=SILENCE)), "ENGINE_DEAD certain", {"exit_code": 1},
    ],
}  # fmt: skip

GPU_FAULTS: Scenarios = {
    "an Xid that repeats is one fault": [
        works(xids=[xid(74), xid(74)]), "GPU_FAULT certain",
        works(xids=[xid(74), xid(74)], times=9),
    ],
    "an Xid explains the death that follows": [
        works(xids=[xid(79)]), "GPU_FAULT certain",
        fails(host([], kills=0, log=logged(CUDA_ERROR_LINE, FATAL_LINE))), "UNREACHABLE certain",
        {"cause": "GPU_FAULT"},
        fails(host([], kills=0)),
    ],
    "an Xid after a kill is no fault": [
        fails(host([], kills=0, log=logged(CORE_LOST_LINE)), xids=[xid(45)]), "UNREACHABLE certain",
        fails(host([], kills=0)), "ENGINE_DEAD certain", {"xids": f"{GPU}: 45"},
    ],
    "a GPU that stays lost explains no death long after": [
        works(host(ALL, kills=0), problems={GPU: "gpu_lost"}), "GPU_FAULT certain",
        works(host(ALL, kills=0), problems={GPU: "gpu_lost"}, times=19),
        dying(host([FRONT], kills=0, log=logged(CORE_LOST_LINE)), problems={GPU: "gpu_lost"}),
        dying(host([FRONT], kills=0), problems={GPU: "gpu_lost"}), "ENGINE_DEAD certain",
        {"gpus_lost": f"{GPU}: gpu_lost"},
    ],
    "a fault before a restart does not explain a death after it": [
        works(host(ALL, kills=0), xids=[xid(79)]), "GPU_FAULT certain",
        restarts(host(NEXT, kills=0)), "RESTART certain",
        fails(host([], kills=0, log=logged(CORE_LOST_LINE))), "UNREACHABLE certain",
        fails(host([], kills=0)), "ENGINE_DEAD certain",
    ],
    "an Xid repeated just before a death explains it": [
        works(host(ALL, kills=0), xids=[xid(74)]), "GPU_FAULT certain",
        works(host(ALL, kills=0), xids=[xid(74)], times=19),
        fails(host([], kills=0, log=logged(FATAL_LINE))), "GPU_FAULT probable, UNREACHABLE certain",
        {"cause_line": f"{GPU}: Xid 74, NVLink error"},
    ],
    "a driver that blocks its calls is suspected and explains no death": [
        works(problems={GPU: "not_answering"}, times=6),
        works(problems={GPU: "not_answering"}), "GPU_FAULT suspected",
        works(problems={GPU: "not_answering"}, times=10),
        fails(host([], kills=0, log=logged(CORE_LOST_LINE))), "UNREACHABLE certain",
        fails(host([], kills=0)), "ENGINE_DEAD certain",
    ],
}  # fmt: skip


GONE = host([], kills=None, log=SILENCE)


def is_gone(engine: PolledEngine) -> Sequence[Event]:
    """A poll at which an outage may begin."""
    engine.fails(host=GONE)
    return ()


@pytest.mark.parametrize("parts", DEATHS.values(), ids=DEATHS)
def test_the_cause_of_a_death_is_reported_once(parts: Sequence[Part]) -> None:
    check([*parts, is_gone, fails(GONE, times=19)])


OTHERS = {**KILLS, **NO_DEATHS, **STARTS, **GPU_FAULTS}


@pytest.mark.parametrize("parts", OTHERS.values(), ids=OTHERS)
def test_kills_starts_that_fail_and_faults_of_gpus(parts: Sequence[Part]) -> None:
    check(parts)


STOPS: Scenarios = {
    "it stopped in order": [
        works(host(ALL, kills=0, log=logged(STOP_LINE))),
        fails(host([FRONT], kills=0, log=logged(FRONT_ENDED_LINE))), "UNREACHABLE certain",
        fails(host([], kills=0, log=SILENCE)),
    ],
    "it stopped slowly with its core gone first": [
        works(host([FRONT], kills=0, log=logged(STOP_LINE)), stalled=True),
        dying(host([FRONT], kills=0, log=CHATTER)),
        fails(host([], kills=0, log=logged(FRONT_ENDED_LINE))), "UNREACHABLE certain",
    ],
    "it is gone after the line of the front, and does not log at the level of the stop line": [
        fails(host([], kills=0, log=logged(FRONT_ENDED_LINE))), "UNREACHABLE certain",
        fails(host([], kills=0, log=SILENCE)),
    ],
    "it ran out of memory while it stopped": [
        works(host(ALL, kills=0, log=logged(STOP_LINE))),
        fails(host([], kills=0, log=logged(OOM_LINE, FATAL_LINE, FRONT_ENDED_LINE))),
        "UNREACHABLE certain",
    ],
    "a supervisor killed it because it took too long to stop": [
        works(host(ALL, kills=0, log=logged(STOP_LINE))),
        fails(host([CORE], kills=0, log=SILENCE, node=0)), "UNREACHABLE certain",
        fails(host([], kills=0, log=SILENCE, node=0)),
    ],
}  # fmt: skip

STOPS_WITHOUT_LOG: Scenarios = {
    "it is gone without an error": [
        fails(host([], kills=0, node=0)), "UNREACHABLE certain",
        fails(host([], kills=0, node=0)),
    ],
    "the network cuts it off": [
        fails(host(ALL, kills=0, log=SILENCE)), "UNREACHABLE certain",
        fails(host(ALL, kills=0, log=SILENCE)),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("parts", "log"),
    [
        *((parts, SILENCE) for parts in STOPS.values()),
        *((parts, None) for parts in STOPS_WITHOUT_LOG.values()),
    ],
    ids=[*STOPS, *STOPS_WITHOUT_LOG],
)
def test_an_engine_that_did_not_crash_is_only_unreachable(
    parts: Sequence[Part], log: LogSample | None
) -> None:
    gone = fails(host([], kills=0, node=0, log=log), times=5)
    check([*parts, gone, restarts(host(NEXT, kills=0)), "RESTART certain"])


@pytest.mark.parametrize("dialect", ["sglang", "tgi", "trtllm"])
def test_a_failing_health_check_of_other_engines_is_no_proof_of_a_death(dialect: str) -> None:
    check(
        [
            New(dialect=dialect), works(times=2),
            # It finishes its requests before it stops.
            works(health=503, times=5),
            fails(), "UNREACHABLE certain",
            fails(),
            New(dialect=dialect), works(),
            works(stalled=True, health=503, times=4), "ENGINE_DEAD suspected",
            works(stalled=True, health=503),
        ]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("dialect", "logs", "dies"),
    [
        ("vllm", [SILENCE], False),
        ("vllm", [CHATTER, CHATTER, SILENCE, SILENCE], False),
        # TGI does not log its stops.
        ("tgi", [CHATTER], False),
        # A line may come after its poll.
        ("vllm", [CHATTER, CHATTER, SILENCE], True),
    ],
)
def test_only_the_silence_of_an_engine_that_logs_often_shows_a_death(
    dialect: str, logs: list[LogSample], dies: bool
) -> None:
    engine = PolledEngine(dialect=dialect)
    for log in logs:
        engine.works(host=host(ALL, kills=0, log=log))
    no_lines = host([], kills=0, log=SILENCE)
    events = [event for _ in range(5) for event in engine.fails(host=no_lines)]
    assert kinds(events) == ["UNREACHABLE", *["ENGINE_DEAD"] * dies]


@pytest.mark.parametrize(
    ("line", "expected"),
    [(SIZING_LINE, "SIZING_ERROR"), (OOM_LINE, "CUDA_OOM"), (CUDA_ERROR_LINE, "GPU_FAULT")],
)
def test_a_failed_start_is_reported_with_its_reason(line: str, expected: str) -> None:
    starting = PolledEngine()
    assert starting.fails(host=host([FRONT, CORE], kills=0, log=CHATTER)) == ()
    (event,) = starting.fails(host=host([FRONT], kills=0, log=logged(line, START_FAILED_LINE)))
    assert event.kind.value == expected
    assert event.evidence["at_start"] == 1
    assert starting.fails(host=host([], kills=0, log=logged(START_FAILED_LINE))) == ()


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        *((number, [("GPU_FAULT", "certain")]) for number in (79, 48, 94)),
        (99999, [("GPU_FAULT", "probable")]),
        *((number, []) for number in (13, 31, 43, 45, 63, 154)),
    ],
)
def test_which_xids_are_faults_of_the_gpu(number: int, expected: list[tuple[str, str]]) -> None:
    events = engine_in_use().works(xids=[xid(number)])
    assert verdicts(events) == expected
    assert all(event.gpu == GPU and event.evidence["xid"] == number for event in events)


@pytest.mark.parametrize("problem", sorted(LOST))
def test_every_problem_that_means_a_lost_gpu_is_a_fault(problem: str) -> None:
    check([works(problems={GPU: problem}), "GPU_FAULT certain"])


@pytest.mark.parametrize("problem", UNSEEN)
def test_a_gpu_that_the_agent_cannot_read_is_no_fault_and_explains_no_death(problem: str) -> None:
    engine, unseen = engine_in_use(), {GPU: problem}
    log = logged(CORE_LOST_LINE)
    events = [event for _ in range(3) for event in engine.works(problems=unseen)]
    for sample in (host([FRONT], kills=0, log=log), host([FRONT], kills=0)):
        events += engine.works(stalled=True, health=503, host=sample, problems=unseen)
    assert kinds(events) == ["ENGINE_DEAD"]
    assert "gpus_lost" not in events[0].evidence


def test_a_slow_driver_that_recovers_within_a_few_polls_is_no_fault() -> None:
    check([works(problems={GPU: "not_answering"}, times=3), works(problems={})] * 10)


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        *((1, "reset"), (2, "reboot"), (3, "drain"), (4, "drain and reset")),
        *((6, "bus reset"), (7, "system reboot")),
        *((unknown, None) for unknown in (0, 5, 8)),
    ],
)
def test_a_recovery_action_of_the_driver_is_reported_once(
    action: int, expected: str | None
) -> None:
    engine = engine_in_use()
    events = [e for _ in range(20) for e in engine.works(recovery_actions={GPU: action})]
    assert verdicts(events) == [("GPU_FAULT", "probable")] * (expected is not None)
    if expected is not None:
        assert (events[0].gpu, events[0].evidence["recovery_action"]) == (GPU, expected)
