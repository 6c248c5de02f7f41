"""Which GPU belongs to which engine, in one run and after an earlier one."""

import logging
from collections import Counter
from pathlib import Path

import pytest

from agent.pipeline.gpu_inventory import each_once
from agent.records.gpu import (
    GpuSample,
    GpuSamples,
    MigInstance,
    ProcessMemory,
)
from agent.store.connection import open_engine
from agent.store.migrating import upgrade
from agent.store.minutes import MinuteStore
from agent.store.observations import ObservationStore
from tests.pipeline.kit import (
    A,
    B,
    C,
    Inventory,
    gpus_of,
    inventory,
    remembering,
    sample,
    taken,
    xid,
)
from tests.store.making import NOON


@pytest.mark.parametrize("configured", [(1,), (B,), (B.upper(),)])
def test_an_engine_has_its_configured_gpus(configured: tuple[int | str, ...]) -> None:
    known = inventory(chat=configured)
    known.xid(xid(A))
    known.xid(xid(B))
    report = known.take("chat", ())
    assert [error.gpu for error in report.xids] == [B]
    assert report.memory == {"gpu_1_memory_used_bytes": 61.0, "gpu_1_memory_total_bytes": 80.0}


def test_without_settings_an_engine_has_the_gpus_of_its_processes() -> None:
    known = inventory(chat=(), code=())
    known.read(sample(A, 0, {10: 5}))
    known.read(sample(C, 2, {11: 5, 20: None}))
    assert taken(known, "chat", 10, 11) == (A, C)
    assert taken(known, "code", 20) == (C,)


def test_settings_override_processes() -> None:
    known = inventory(chat=(B,))
    known.read(sample(A, 0, {10: 5}))
    assert taken(known, "chat", 10) == (B,)


# By its pod


def in_pods(**pods: str) -> Inventory:
    """An inventory of engines in these pods; GPU C is in the settings of `fixed`."""
    return Inventory({**dict.fromkeys(pods, ()), "fixed": (C,)}, pods)


def test_without_settings_an_engine_has_the_gpus_of_its_pod() -> None:
    known = in_pods(chat="llm/chat-0", code="llm/code-0")
    known.read(
        sample(A, 0, pods=["llm/chat-0"]),
        sample(B, 1, pods=["llm/chat-0", "llm/code-0"]),
        sample(C, 2, pods=["other/chat-0"]),
    )
    assert gpus_of(known, "chat", "code", "fixed") == [(A, B), (B,), (C,)]
    known.xid(xid(A))
    assert len(known.take("chat", ()).xids) == 1
    assert known.take("code", ()).xids == ()


def test_a_pod_that_ended_keeps_its_gpus_until_it_has_others() -> None:
    known = in_pods(chat="llm/chat-0")
    known.read(sample(A, 0, pods=["llm/chat-0"]), sample(B, 1, pods=[]))
    assert taken(known, "chat") == (A,)
    known.read(sample(A, 0, pods=[]), sample(B, 1, pods=[]))
    assert taken(known, "chat") == (A,)
    known.read(sample(A, 0, pods=[]), sample(B, 1, pods=["llm/chat-0"]))
    assert taken(known, "chat") == (B,)


def test_a_pod_keeps_a_gpu_that_is_lost() -> None:
    known = in_pods(chat="llm/chat-0")
    known.read(sample(A, 0, pods=["llm/chat-0"]), sample(B, 1, pods=["llm/chat-0"]))
    known.take("chat", ())
    known.read(sample(A, 0, problem="gpu_missing"), sample(B, 1, pods=["llm/chat-0"]))
    assert known.take("chat", ()).problems == {A: "gpu_missing"}
    assert taken(known, "chat") == (A, B)


def test_an_exporter_that_names_no_pods_gives_no_engine_a_gpu() -> None:
    known = in_pods(chat="llm/chat-0")
    known.read(sample(A, 0, pods=[]), sample(B, 1))
    assert taken(known, "chat") == ()
    # An engine in no pod.
    alone = inventory(chat=())
    alone.read(sample(A, 0, pods=["llm/chat-0"]), sample(B, 1))
    assert taken(alone, "chat") == ()


def test_a_dead_engine_keeps_its_gpus() -> None:
    known = inventory(chat=())
    known.read(sample(A, 0, {10: 5}))
    known.take("chat", [10])
    known.read(sample(A, 0, {}))
    known.xid(xid(A))
    assert len(known.take("chat", []).xids) == 1
    assert taken(known, "chat") == (A,)


def test_an_engine_on_a_mig_instance_gets_events_of_the_whole_gpu() -> None:
    for known in (inventory(chat=()), inventory(chat=("MIG-1",))):
        known.read(divided(instance(1, {10: 5})))
        assert taken(known, "chat", 10) == (A,)


def instance(number: int, processes: ProcessMemory | None) -> MigInstance:
    return MigInstance(
        uuid=f"MIG-{number}",
        name="1g.10gb",
        gpu_instance=number,
        compute_instance=0,
        gpu_slices=1,
        facts={},
        processes=processes,
    )


def divided(*instances: MigInstance) -> GpuSample:
    return GpuSample(gpu=A, index=0, name="H", at=1.0, facts={}, mig_instances=instances)


@pytest.mark.parametrize(
    "unread",
    [
        sample(A, 0, problem="gpu_lost"),
        sample(A, 0, processes=None),
        divided(instance(1, None), instance(2, {12: 5})),
    ],
)
def test_an_engine_keeps_a_gpu_whose_processes_are_unknown_now(unread: GpuSample) -> None:
    """This matters most for a lost GPU: its Xids and its loss belong to the engine."""
    known = inventory(chat=())
    known.read(sample(A, 0, {10: 5}))
    known.read(sample(B, 1, {11: 5}))
    known.take("chat", [10, 11])
    known.read(unread)
    for _ in range(2):
        problems = known.take("chat", [10, 11]).problems
        assert problems == ({A: unread.problem} if unread.problem else {})
        assert taken(known, "chat", 10, 11) == (A, B)
    known.xid(xid(A))
    assert len(known.take("chat", [11]).xids) == 1
    report = known.take_unclaimed()
    assert (report.xids, report.problems, len(report.memory)) == ((), {}, 2)


def test_an_engine_leaves_a_gpu_with_only_other_processes() -> None:
    known = inventory(chat=())
    for empty in (sample(A, 0, {}), divided(instance(1, {}), instance(2, {12: 5}))):
        known.read(sample(A, 0, {10: 5}))
        known.read(sample(B, 1, {11: 5}))
        assert taken(known, "chat", 10, 11) == (A, B)
        known.read(empty)
        assert taken(known, "chat", 10, 11) == (B,)


def test_a_restarted_engine_has_left_the_lost_gpu() -> None:
    known = inventory(chat=())
    known.read(sample(A, 0, {10: 5}))
    known.read(sample(B, 1, {11: 5}))
    known.take("chat", [10, 11])
    known.read(sample(A, 0, problem="gpu_lost"))
    known.read(sample(B, 1, {30: 5}))
    known.read(sample(C, 2, {31: 5}))
    assert taken(known, "chat", 30, 31) == (B, C)


# Indexes and UUIDs of the settings


# Of each case: the GPUs of an earlier run, those at each read, and those of each configured index.
LOST_A = sample(A, 0, problem="gpu_missing")
# C was lost during that run, and later GPUs took lower indexes.
TWO_HAD_0 = [sample(C, 0, at=1.0), sample(A, 0, at=9.0), sample(B, 1, at=9.0)]
RESOLVED: dict[str, tuple[list[GpuSample], list[list[GpuSample]], list[tuple[str, ...]]]] = {
    "the driver renumbers the GPUs behind a lost one": (
        *([], [[sample(A, 0), sample(B, 1)], [LOST_A, sample(B, 0), sample(C, 1)]]),
        [(A,), (B,), ()],
    ),
    "a GPU that was lost before the start comes back": (
        *([], [[sample(B, 0), sample(C, 1)], [sample(A, 0), sample(B, 1), sample(C, 2)]]),
        [(B,), (C,), ()],
    ),
    "another host joins later": (
        [],
        [[sample(A, 0)], [sample(A, 0), sample(C, 0)]],
        [(A,), (), ()],
    ),
    "a remembered GPU is lost": (
        *([sample(A, 0), sample(B, 1)], [[sample(B, 0, at=9.0)], [sample(B, 0, at=10.0)]]),
        [(A,), (B,), ()],
    ),
    "two remembered GPUs had the index": (TWO_HAD_0, [[sample(B, 0, at=20.0)]], [(A,), (B,), ()]),
    "the later of two is there": (
        *(TWO_HAD_0, [[sample(A, 0, at=20.0), sample(B, 1, at=20.0)]]),
        [(A,), (B,), ()],
    ),
    "one of two remembered GPUs is there": (
        *([sample(A, 0), sample(B, 0)], [[sample(A, 0)]]),
        [(A,), (), ()],
    ),
    "another GPU replaced a remembered one": (
        *([sample(A, 0), sample(B, 1)], [[sample(C, 0), sample(B, 1)]]),
        [(C,), (B,), ()],
    ),
    "another GPU replaces a missing one": (
        *([sample(A, 0), sample(B, 1)], [[sample(B, 1)], [sample(B, 1), sample(C, 0)]]),
        [(C,), (B,), ()],
    ),
}


@pytest.mark.parametrize(("before", "reads", "expected"), RESOLVED.values(), ids=RESOLVED)
def test_an_index_is_resolved_once_and_to_the_gpu_that_was_meant(
    before: list[GpuSample], reads: list[list[GpuSample]], expected: list[tuple[str, ...]]
) -> None:
    known = remembering(*before, first=(0,), second=(1,), third=(2,))
    for samples in reads:
        known.read(*samples)
    assert gpus_of(known, "first", "second", "third") == expected


def test_the_uuid_of_each_configured_gpu_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    known = Inventory({"chat": (0, B.upper()), "code": ("MIG-1",)})
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            known.read(divided(instance(1, None)), sample(B, 1))
    assert caplog.messages == [
        f"engine chat: GPU 0 is {A}",
        f"engine chat: GPU {B.upper()} is {B}",
        f"engine code: GPU MIG-1 is {A}",
    ]


def test_an_engine_on_a_mig_instance_keeps_the_gpu_when_the_gpu_is_lost() -> None:
    known = Inventory({"chat": ("MIG-1",)})
    known.read(divided(instance(1, None)))
    known.read(sample(A, 0, problem="gpu_lost"))
    assert known.take("chat", ()).problems == {A: "gpu_lost"}


def test_a_configured_gpu_that_appears_later_is_resolved_then() -> None:
    known = Inventory({"chat": (1,), "code": (C,)})
    assert known.read(sample(A, 0)) == ["not_there", "not_there"]
    assert known.read(sample(A, 0), sample(B, 1), sample(C, 2)) == []
    assert gpus_of(known, "chat", "code") == [(B,), (C,)]


def test_an_index_that_gpus_of_several_hosts_have_belongs_to_no_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    known = Inventory({"chat": (0, 1), "code": (A,)})
    hosts = [sample(gpu, index) for gpu, index in ((A, 0), (B, 1), (C, 0))]
    assert known.read(*hosts) == ["index_shared"]
    assert known.read(*hosts) == []
    assert gpus_of(known, "chat", "code") == [(B,), (A,)]
    known.read(sample(A, 0), sample(B, 1), sample(C, 0, problem="gpu_missing"))
    assert gpus_of(known, "chat") == [(B,)]
    assert "engine chat: GPUs of several hosts have the index 0" in caplog.text


def test_missing_configured_gpus_are_logged_and_counted_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    known = Inventory({"chat": (0, 7), "code": ("GPU-nowhere", B), "both": ()})
    reads = [known.read(sample(A, 0), sample(B, 1)) for _ in range(2)]
    assert reads == [["not_there", "not_there"], []]
    assert [line.partition(";")[0] for line in caplog.messages] == [
        "engine chat: its GPU 7 is not there",
        "engine code: its GPU 'GPU-nowhere' is not there",
    ]
    assert f"{A} (index 0), {B} (index 1)" in caplog.text


# Reports


def test_each_xid_is_reported_once_to_each_engine_that_owns_the_gpu() -> None:
    known = inventory(chat=(A,), code=(A, B))
    known.xid(xid(A))
    assert [len(known.take(name, ()).xids) for name in ("chat", "code", "chat")] == [1, 1, 0]
    assert known.take_unclaimed().xids == ()


def test_gpus_without_an_engine_have_a_report_of_their_own() -> None:
    known = inventory(chat=(A,))
    known.xid(xid(C))
    known.read(sample(B, 1, problem="gpu_lost"))
    report = known.take_unclaimed()
    assert [error.gpu for error in report.xids] == [C]
    assert report.problems == {B: "gpu_lost"}
    assert known.take_unclaimed().xids == ()


def test_a_lost_gpu_is_a_problem_of_its_engine_until_it_is_back() -> None:
    known = inventory(chat=(A,))
    known.read(sample(A, 0, problem="gpu_lost"))
    assert known.take("chat", ()).problems == {A: "gpu_lost"}
    known.read(sample(A, 0))
    assert known.take("chat", ()).problems == {}


def test_a_burst_of_xids_of_one_gpu_hides_no_xid_of_another() -> None:
    known = inventory()
    known.xid(xid(A))
    for _ in range(1500):
        known.xid(xid(B))
    assert Counter(error.gpu for error in known.take_unclaimed().xids) == {A: 1, B: 1000}


def test_an_xid_of_the_first_read_belongs_to_its_engine() -> None:
    known = Inventory({"chat": (0,)})
    known.update(GpuSamples((sample(A, 0),), (xid(A),)), 60.0)
    assert len(known.take("chat", ()).xids) == 1


# Samples of the last minutes


def sample_at(at: float) -> GpuSample:
    return GpuSample(gpu="GPU-1", index=0, name="NVIDIA H200", at=NOON + at, facts={})


def test_a_sample_that_is_recent_and_stored_counts_once(tmp_path: Path) -> None:
    """The database rounds the time, and samples a quarter of a second apart stay separate."""
    database = open_engine(f"sqlite:///{tmp_path / 'goodput.db'}")
    upgrade(database)
    known, observations = Inventory({}), ObservationStore(database, "agent-0")
    for at in (0.1234567, 0.3734567, 60.0000004):
        known.read(sample_at(at))
        observations.write_gpu_samples([sample_at(at)])
    observations.write_gpu_samples([sample_at(-60.0000004)])
    recent = known.history(["GPU-1"])
    stored = MinuteStore(database, "agent-0").gpu_samples(["GPU-1"], NOON - 120, NOON + 120)
    database.dispose()
    assert len(stored) == 4
    times = sorted(sample.at - NOON for sample in each_once(recent, stored))
    assert [round(at, 2) for at in times] == [-60.0, 0.12, 0.37, 60.0]


def test_only_samples_of_the_last_minutes_are_held_after_the_clock_was_set_back() -> None:
    known = Inventory({})
    for at in (0.0, 1.0, 1e6, *(float(second) for second in range(2, 2000))):
        known.read(sample_at(at))
    held = [sample.at - NOON for sample in known.history(["GPU-1"])]
    assert held == [float(second) for second in range(1699, 2000)]


@pytest.mark.parametrize(
    ("earlier", "present", "missing"),
    [
        (range(3), range(2), ["GPU-2"]),
        (range(2), range(2), []),
        (range(0), range(2), []),
        # With other GPUs than before none is lost.
        (range(2), range(2, 4), []),
        (range(2), range(1, 3), []),
    ],
)
def test_a_remembered_gpu_is_lost_if_it_is_absent_and_none_is_new(
    earlier: range, present: range, missing: list[str]
) -> None:
    found = remembering(*(sample(f"GPU-{number}", number) for number in earlier))
    found.read(*(sample(f"GPU-{number}", number) for number in present))
    problems = found.take_unclaimed().problems.items()
    assert [gpu for gpu, why in problems if why == "gpu_missing"] == missing


def test_no_gpu_is_lost_before_the_first_successful_read() -> None:
    """A driver takes seconds to load, and an exporter may start remembering the agent."""
    gpus = remembering(sample(A, 0))
    assert gpus.read(failures=["not_answering"]) == ["not_answering"]
    assert (gpus.newest(), gpus.answered) == ([], False)


def test_every_remembered_gpu_is_lost_when_a_working_source_finds_none() -> None:
    gpus = remembering(sample(A, 0), sample(B, 1), chat=(1,))
    assert gpus.read(failures=["no_gpu"]) == ["no_gpu", "gpu_missing"]
    assert gpus.take("chat", ()).problems == {B: "gpu_missing"}
    assert gpus.take_unclaimed().problems == {A: "gpu_missing"}
    assert gpus.read(sample(A, 0), sample(B, 1)) == []
    assert gpus.take_unclaimed().problems == {}


def test_a_lost_gpu_has_its_name_and_no_facts_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gpus = remembering(sample("GPU-3", 3, {7: 1}))
    for now in (60.0, 61.0):
        assert gpus.read(failures=["no_gpu"], now=now) == ["no_gpu", "gpu_missing"]
        (lost,) = gpus.newest()
        assert (lost.gpu, lost.index, lost.name) == ("GPU-3", 3, "NVIDIA H200")
        assert (lost.at, lost.problem) == (now, "gpu_missing")
        assert (lost.facts, lost.processes) == ({("gpu_up", ()): 0.0}, None)
    assert caplog.messages == ["GPU GPU-3 (index 3) was there and is gone"]


def test_a_lost_gpu_is_no_longer_missing_once_others_are_present(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gpus = remembering(sample(A, 0), sample(B, 1))
    assert gpus.read(sample(B, 1)) == ["gpu_missing"]
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert gpus.read(sample(B, 1), sample(C, 2)) == []
    assert [each.gpu for each in gpus.newest()] == [B, C]
    assert caplog.text.count(f"GPU {A} is not missed any more") == 1


def test_no_gpu_is_known_while_the_source_reports_a_failure() -> None:
    gpus = remembering(sample(A, 0), sample(B, 1), chat=(0,))
    assert gpus.read(failures=["no_driver"]) == ["no_driver"]
    for failure in ("no_driver", "not_answering"):
        gpus.read(failures=[failure])
        unseen = [(each.gpu, each.problem) for each in gpus.newest()]
        assert unseen == [(A, "no_driver"), (B, "no_driver")]
        assert gpus.newest()[0].facts == {("gpu_up", ()): 0.0}
    assert (gpus.answered, gpus_of(gpus, "chat")) == (False, [()])


def test_until_the_source_answers_gpus_without_an_engine_report_only_xids() -> None:
    gpus = remembering(sample(A, 0), sample(B, 1), chat=(A,))
    gpus.read(failures=["no_driver"])
    gpus.xid(xid(B))
    report = gpus.take_unclaimed()
    assert ([error.gpu for error in report.xids], report.problems) == ([B], {})


def test_unread_gpus_are_judged_after_the_first_successful_read() -> None:
    gpus = remembering(sample(A, 0), sample(B, 1))
    gpus.read(failures=["no_driver"])
    assert gpus.read(sample(B, 1)) == ["gpu_missing"]
    assert gpus.take_unclaimed().problems == {A: "gpu_missing"}
    gpus.read(sample(B, 1), sample(C, 2))
    assert [each.gpu for each in gpus.newest()] == [B, C]
