"""Each engine hears of its own GPUs, and what is no engine's is not lost."""

import pytest

from agent.catalog import gpu_facts as fact
from agent.pipeline.gpu_links import GpuLinks
from agent.records.gpu import Facts, GpuSample, MigInstance, ProcessMemory, XidSeen

A, B, C = "GPU-aaaa", "GPU-bbbb", "GPU-cccc"


def sample(
    gpu: str,
    index: int,
    processes: ProcessMemory | None = None,
    problem: str | None = None,
    at: float = 1.0,
) -> GpuSample:
    used, total = (fact.MEMORY_USED.name, ()), (fact.MEMORY_TOTAL.name, ())
    facts: Facts = {} if problem else {used: 60.0 + index, total: 80.0}
    return GpuSample(
        gpu=gpu,
        index=index,
        name="NVIDIA H200",
        at=at,
        facts=facts,
        processes=processes,
        problem=problem,
    )


def xid(gpu: str, number: int = 79) -> XidSeen:
    return XidSeen(gpu=gpu, xid=number, at=1.0, count=1)


def links(**named: tuple[int | str, ...]) -> GpuLinks:
    linked = GpuLinks(named)
    for index, gpu in enumerate((A, B, C)):
        linked.sample(sample(gpu, index))
    return linked


@pytest.mark.parametrize("named", [(1,), (B,), (B.upper(),)])
def test_an_engine_has_the_gpus_that_the_settings_name(named: tuple[int | str, ...]) -> None:
    linked = links(chat=named)
    linked.xid(xid(A))
    linked.xid(xid(B))
    told = linked.take("chat", ())
    assert (told.gpus, [seen.gpu for seen in told.xids]) == ((B,), [B])
    assert told.figures == {"gpu_1_memory_used_bytes": 61.0, "gpu_1_memory_total_bytes": 80.0}


def test_without_settings_an_engine_has_the_gpus_that_its_processes_are_on() -> None:
    linked = links(chat=(), code=())
    linked.sample(sample(A, 0, {10: 5}))
    linked.sample(sample(C, 2, {11: 5, 20: None}))
    assert linked.take("chat", [10, 11]).gpus == (A, C)
    assert linked.take("code", [20]).gpus == (C,)


def test_settings_count_more_than_processes() -> None:
    linked = links(chat=(B,))
    linked.sample(sample(A, 0, {10: 5}))
    assert linked.take("chat", [10]).gpus == (B,)


def test_a_dead_engine_keeps_the_gpus_that_it_had() -> None:
    linked = links(chat=())
    linked.sample(sample(A, 0, {10: 5}))
    linked.take("chat", [10])
    linked.sample(sample(A, 0, {}))
    linked.xid(xid(A))
    told = linked.take("chat", [])
    assert (told.gpus, len(told.xids)) == ((A,), 1)


def test_an_engine_that_moved_has_its_new_gpus_only() -> None:
    linked = links(chat=())
    linked.sample(sample(A, 0, {10: 5}))
    linked.take("chat", [10])
    linked.sample(sample(A, 0, {}))
    linked.sample(sample(B, 1, {30: 5}))
    assert linked.take("chat", [30]).gpus == (B,)


def test_an_engine_on_a_mig_instance_hears_of_the_whole_gpu() -> None:
    for linked in (links(chat=()), links(chat=("MIG-1",))):
        linked.sample(divided(instance(1, {10: 5})))
        assert linked.take("chat", [10]).gpus == (A,)


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
def test_an_engine_keeps_a_gpu_that_does_not_tell_its_processes_now(unread: GpuSample) -> None:
    """A lost one above all: its Xids and its loss are the engine's."""
    linked = links(chat=())
    linked.sample(sample(A, 0, {10: 5}))
    linked.sample(sample(B, 1, {11: 5}))
    linked.take("chat", [10, 11])
    linked.sample(unread)
    for _ in range(2):
        told = linked.take("chat", [10, 11])
        assert (told.gpus, list(told.problems.values())) == (
            (A, B),
            [unread.problem] if unread.problem else [],
        )
    linked.xid(xid(A))
    assert len(linked.take("chat", [11]).xids) == 1
    assert A not in linked.take_unclaimed().gpus


def test_an_engine_leaves_a_gpu_whose_processes_are_known_and_not_its_own() -> None:
    linked = links(chat=())
    for empty in (sample(A, 0, {}), divided(instance(1, {}), instance(2, {12: 5}))):
        linked.sample(sample(A, 0, {10: 5}))
        linked.sample(sample(B, 1, {11: 5}))
        assert linked.take("chat", [10, 11]).gpus == (A, B)
        linked.sample(empty)
        assert linked.take("chat", [10, 11]).gpus == (B,)


def test_an_engine_that_started_anew_has_left_the_gpu_that_was_lost() -> None:
    linked = links(chat=())
    linked.sample(sample(A, 0, {10: 5}))
    linked.sample(sample(B, 1, {11: 5}))
    linked.take("chat", [10, 11])
    linked.sample(sample(A, 0, problem="gpu_lost"))
    linked.sample(sample(B, 1, {30: 5}))
    linked.sample(sample(C, 2, {31: 5}))
    assert linked.take("chat", [30, 31]).gpus == (B, C)


def test_an_index_stays_that_of_the_gpu_which_had_it_first() -> None:
    """Those behind a lost GPU move up."""
    linked = links(first=(0,), second=(1,))
    linked.sample(sample(A, 0, problem="gpu_missing"))
    linked.sample(sample(B, 0))
    linked.sample(sample(C, 1))
    assert (linked.take("first", ()).gpus, linked.take("second", ()).gpus) == ((A,), (B,))
    assert linked.shared() == {}


def test_an_index_that_gpus_of_several_hosts_have_is_nobodys() -> None:
    linked = GpuLinks({"chat": (0, 1), "code": (A,)})
    for gpu, index in ((A, 0), (B, 1), (C, 0)):
        linked.sample(sample(gpu, index))
    assert linked.take("chat", ()).gpus == (B,)
    assert linked.take("code", ()).gpus == (A,)
    assert (linked.shared(), linked.missing()) == ({"chat": [0]}, {})


def test_the_index_of_a_gpu_that_nobody_waits_for_goes_to_the_next() -> None:
    linked = GpuLinks({"chat": (0,)})
    linked.sample(sample(A, 0, problem="gpu_missing"))
    linked.sample(sample(B, 0))
    assert linked.take("chat", ()).gpus == (A,)
    linked.forget(A)
    linked.sample(sample(B, 0))
    assert (linked.take("chat", ()).gpus, linked.shared()) == ((B,), {})


def test_a_new_gpu_takes_the_index_of_the_lost_one_whose_place_it_took() -> None:
    """Whichever of the two is told first, and though both fail now and then."""
    lost, new = sample(A, 0, problem="gpu_missing", at=5.0), sample(C, 0, at=5.0)
    for told in ((lost, new, new), (new, lost, new)):
        linked = GpuLinks({"chat": (0,), "code": (1,)})
        for seen in (sample(A, 0), sample(B, 1), sample(A, 0, problem="no_driver", at=2.0), *told):
            linked.sample(seen)
        linked.sample(sample(C, 0, problem="gpu_lost", at=6.0))
        assert [linked.take(engine, ()).gpus for engine in ("chat", "code")] == [(C,), (B,)]
        assert linked.shared() == {}


LOST_AND_REPLACED = (
    sample(A, 0),
    sample(B, 1),
    sample(A, 0, problem="gpu_missing", at=2.0),
    sample(C, 0, at=2.0),
)


@pytest.mark.parametrize(
    "back", [(sample(A, 0, at=3.0), sample(C, 2, at=3.0)), (sample(C, 2), sample(A, 0))]
)
def test_a_gpu_that_was_lost_for_a_moment_has_its_index_back(back: tuple[GpuSample, ...]) -> None:
    """Though another came in that moment, which then has the index that it is read under."""
    linked = GpuLinks({"chat": (0,), "code": (1,), "more": (2,)})
    for seen in (*LOST_AND_REPLACED, *back, *back):
        linked.sample(seen)
    gpus = [linked.take(engine, ()).gpus for engine in ("chat", "code", "more")]
    assert (gpus, linked.shared()) == ([(A,), (B,), (C,)], {})


def test_a_gpu_that_comes_back_under_another_index_first_leaves_that_one_again() -> None:
    linked = GpuLinks({"chat": (0,), "more": (2,)})
    for seen in (*LOST_AND_REPLACED, sample(A, 2, at=3.0), sample(C, 0, at=3.0)):
        linked.sample(seen)
    assert [linked.take(engine, ()).gpus for engine in ("chat", "more")] == [(C,), (A,)]
    for seen in (sample(A, 0, at=4.0), sample(C, 2, at=4.0)):
        linked.sample(seen)
    assert [linked.take(engine, ()).gpus for engine in ("chat", "more")] == [(A,), (C,)]


def test_two_that_had_an_index_one_after_the_other_and_are_back_under_it_share_it() -> None:
    linked, last = GpuLinks({"chat": (0,)}), "GPU-dddd"
    replaced = (sample(C, 0, problem="gpu_missing", at=3.0), sample(last, 0, at=3.0))
    for seen in (*LOST_AND_REPLACED, *replaced, *(sample(A, 0), sample(C, 0)) * 2):
        linked.sample(seen)
    assert linked.shared() == {"chat": [0]}


def test_a_lost_gpu_that_is_still_lost_has_no_index_back() -> None:
    linked = GpuLinks({"chat": (0,)})
    for seen in (*LOST_AND_REPLACED, sample(A, 0, problem="gpu_missing", at=3.0)):
        linked.sample(seen)
    assert linked.take("chat", ()).gpus == (C,)


def test_a_new_gpu_takes_no_index_of_one_that_only_is_not_seen() -> None:
    linked = GpuLinks({"chat": (0,)})
    for seen in (sample(A, 0), sample(A, 0, problem="no_driver", at=2.0), sample(C, 0, at=2.0)):
        linked.sample(seen)
    assert linked.take("chat", ()).gpus == (A,)


def test_a_gpu_that_was_there_beside_a_lost_one_does_not_take_its_index() -> None:
    linked = GpuLinks({"chat": (1,)})
    for seen in (sample(A, 0), sample(B, 1), sample(A, 0, problem="gpu_lost", at=2.0)):
        linked.sample(seen)
    for told in (sample(B, 0, at=3.0), sample(B, 0, problem="gpu_lost", at=4.0)):
        linked.sample(told)
        linked.sample(sample(C, 1, at=told.at))
    assert linked.take("chat", ()).gpus == (B,)


def test_where_a_gpu_of_an_earlier_run_is_lost_all_have_the_indexes_of_then() -> None:
    linked = GpuLinks({"chat": (0,), "code": (1,)})
    linked.sample(sample(B, 0, at=9.0))
    linked.count_as_before([sample(A, 0), sample(B, 1)])
    linked.sample(sample(A, 0, problem="gpu_missing", at=9.0))
    for _ in range(2):
        assert [linked.take(engine, ()).gpus for engine in ("chat", "code")] == [(A,), (B,)]
        assert linked.missing() == {}
        linked.sample(sample(B, 0, at=10.0))


def test_indexes_are_the_drivers_own_where_those_of_the_earlier_run_are_in_doubt() -> None:
    """A GPU that was lost in the middle of that run left its index to another."""
    linked = GpuLinks({"chat": (0,)})
    linked.sample(sample(B, 0))
    linked.count_as_before([sample(B, 0), sample(A, 0)])
    assert linked.take("chat", ()).gpus == (B,)


def test_each_xid_is_heard_once_by_each_engine_on_the_gpu() -> None:
    linked = links(chat=(A,), code=(A, B))
    linked.xid(xid(A))
    assert [len(linked.take(name, ()).xids) for name in ("chat", "code", "chat")] == [1, 1, 0]
    assert linked.take_unclaimed().xids == ()


def test_what_gpus_of_no_engine_tell_is_told_apart() -> None:
    linked = links(chat=(A,))
    linked.xid(xid(C))
    linked.sample(sample(B, 1, problem="gpu_lost"))
    told = linked.take_unclaimed()
    assert [seen.gpu for seen in told.xids] == [C]
    assert told.problems == {B: "gpu_lost"}
    assert linked.take_unclaimed().xids == ()


def test_a_lost_gpu_is_a_problem_of_its_engine_until_it_is_back() -> None:
    linked = links(chat=(A,))
    linked.sample(sample(A, 0, problem="gpu_lost"))
    assert linked.take("chat", ()).problems == {A: "gpu_lost"}
    linked.sample(sample(A, 0))
    assert linked.take("chat", ()).problems == {}


def test_gpus_that_were_never_seen_are_named() -> None:
    linked = links(chat=(0, 7), code=("GPU-nowhere", B), both=())
    assert linked.missing() == {"chat": [7], "code": ["GPU-nowhere"]}
    assert linked.seen() == [f"{A} (index 0)", f"{B} (index 1)", f"{C} (index 2)"]
