"""GPUs that an earlier run of the agent read."""

from agent.pipeline.lost_gpus import LostGpus
from agent.records.gpu import Facts, GpuSample
from tests.records.making import NOON


def gpu(number: int) -> GpuSample:
    facts: Facts = {("gpu_up", ()): 1.0, ("gpu_power_watts", ()): 300.0}
    return GpuSample(
        gpu=f"GPU-{number}",
        index=number,
        name="NVIDIA H200",
        at=NOON,
        facts=facts,
        processes={7: 1},
    )


def lost(known: range, seen: range) -> list[str]:
    """The GPUs that are told as lost, when a run that had the first is followed by one of these."""
    gpus = LostGpus(gpu(number) for number in known)
    for number in seen:
        gpus.sample(gpu(number))
    return [sample.gpu for sample in gpus.lost(NOON + 60)]


def test_what_came_back_is_not_lost_and_what_did_not_is() -> None:
    assert lost(range(3), range(2)) == ["GPU-2"]
    assert lost(range(2), range(2)) == []


def test_no_gpu_is_lost_before_the_source_answered() -> None:
    """A driver takes seconds to load, and an exporter may start after the agent."""
    gpus = LostGpus([gpu(0)])
    assert (gpus.lost(NOON + 60), gpus.answered) == ([], False)


def test_every_gpu_is_lost_where_a_source_that_works_finds_none() -> None:
    gpus = LostGpus([gpu(0), gpu(1)])
    gpus.none_there()
    assert [sample.gpu for sample in gpus.lost(NOON + 60)] == ["GPU-0", "GPU-1"]


def test_nothing_is_lost_in_a_first_run() -> None:
    assert lost(range(0), range(2)) == []


def test_an_agent_that_was_given_other_gpus_misses_none() -> None:
    assert lost(range(2), range(2, 4)) == []
    assert lost(range(2), range(1, 3)) == []


def test_a_lost_gpu_is_told_with_who_it_is_and_no_reading() -> None:
    gpus = LostGpus([gpu(3)])
    gpus.none_there()
    (sample,) = gpus.lost(NOON + 60)
    assert (sample.gpu, sample.index, sample.name) == ("GPU-3", 3, "NVIDIA H200")
    assert (sample.at, sample.problem) == (NOON + 60, "gpu_missing")
    assert sample.facts == {("gpu_up", ()): 0.0}
    assert sample.processes is None


def test_a_gpu_that_comes_back_later_is_not_lost_any_more() -> None:
    gpus = LostGpus([gpu(0)])
    gpus.none_there()
    assert gpus.lost(NOON + 60) != []
    gpus.sample(gpu(0))
    assert gpus.lost(NOON + 61) == []
    assert gpus.not_missed() == set()


def test_a_lost_gpu_is_not_missed_any_more_once_others_are_there() -> None:
    gpus = LostGpus([gpu(0), gpu(1)])
    gpus.sample(gpu(1))
    assert [sample.gpu for sample in gpus.lost(NOON + 60)] == ["GPU-0"]
    assert gpus.not_missed() == set()
    gpus.sample(gpu(2))
    assert gpus.lost(NOON + 61) == []
    assert [gpus.not_missed(), gpus.not_missed()] == [{"GPU-0"}, set()]


def test_no_gpu_is_seen_while_the_source_says_why_it_sees_none() -> None:
    gpus = LostGpus([gpu(0), gpu(1)])
    assert gpus.unseen(NOON + 60) == []
    gpus.none_seen("no_driver")
    told = gpus.unseen(NOON + 60)
    assert [(sample.gpu, sample.problem) for sample in told] == [
        ("GPU-0", "no_driver"),
        ("GPU-1", "no_driver"),
    ]
    assert (told[0].facts, told[0].processes) == ({("gpu_up", ()): 0.0}, None)
    assert (gpus.lost(NOON + 60), gpus.not_missed(), gpus.answered) == ([], set(), False)


def test_gpus_that_were_not_seen_are_judged_once_the_source_answers() -> None:
    gpus = LostGpus([gpu(0), gpu(1)])
    gpus.none_seen("no_driver")
    gpus.unseen(NOON + 60)
    gpus.sample(gpu(1))
    assert gpus.unseen(NOON + 61) == []
    assert [sample.problem for sample in gpus.lost(NOON + 61)] == ["gpu_missing"]
    gpus.sample(gpu(2))
    assert gpus.not_missed() == {"GPU-0"}
