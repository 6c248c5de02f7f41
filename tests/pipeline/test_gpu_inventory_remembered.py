"""GPUs that an earlier run of the agent read, and GPUs that are lost."""

import logging

import pytest

from tests.pipeline.inventory import A, B, C, after, gpus_of, sample


def test_where_a_remembered_gpu_is_lost_indexes_are_those_of_the_earlier_run() -> None:
    known = after(sample(A, 0), sample(B, 1), chat=(0,), code=(1,))
    for at in (9.0, 10.0):
        known.read(sample(B, 0, at=at))
        assert gpus_of(known, "chat", "code") == [(A,), (B,)]
    assert known.take("chat", ()).problems == {A: "gpu_missing"}


def test_of_two_gpus_that_had_an_index_in_the_earlier_run_the_later_one_means_it() -> None:
    """C was lost in the middle of that run, and those behind it moved up."""
    before = (sample(C, 0, at=1.0), sample(A, 0, at=9.0), sample(B, 1, at=9.0))
    known = after(*before, chat=(0,), code=(1,))
    known.read(sample(B, 0, at=20.0))
    assert gpus_of(known, "chat", "code") == [(A,), (B,)]


def test_an_index_of_two_remembered_gpus_means_the_one_that_is_there() -> None:
    known = after(sample(A, 0), sample(B, 0), chat=(0,))
    known.read(sample(A, 0))
    assert gpus_of(known, "chat") == [(A,)]


def test_after_a_restart_an_index_is_the_gpu_that_took_the_place_of_a_lost_one() -> None:
    known = after(sample(A, 0), sample(B, 1), chat=(0,))
    known.read(sample(C, 0), sample(B, 1))
    assert gpus_of(known, "chat") == [(C,)]
    assert A not in known.take_unclaimed().gpus


def test_after_a_restart_an_index_is_the_new_gpu_though_the_lost_one_is_remembered() -> None:
    before = (sample(C, 0, at=1.0), sample(A, 0, at=9.0), sample(B, 1, at=9.0))
    known = after(*before, chat=(0,), code=(1,))
    known.read(sample(A, 0, at=20.0), sample(B, 1, at=20.0))
    assert gpus_of(known, "chat", "code") == [(A,), (B,)]
    assert known.take_unclaimed().problems == {C: "gpu_missing"}


def test_an_index_of_a_gpu_that_is_not_missed_any_more_is_resolved_again() -> None:
    known = after(sample(A, 0), sample(B, 1), chat=(0,))
    known.read(sample(B, 1))
    assert gpus_of(known, "chat") == [(A,)]
    known.read(sample(B, 1), sample(C, 0))
    assert gpus_of(known, "chat") == [(C,)]


def lost(known: range, seen: range) -> list[str]:
    """The lost GPUs, when a run that had the first is followed by one that has the second."""
    found = after(*(sample(f"GPU-{number}", number) for number in known))
    found.read(*(sample(f"GPU-{number}", number) for number in seen))
    return [gpu for gpu, why in found.take_unclaimed().problems.items() if why == "gpu_missing"]


def test_a_remembered_gpu_is_lost_where_it_did_not_come_back() -> None:
    assert lost(range(3), range(2)) == ["GPU-2"]
    assert lost(range(2), range(2)) == []


def test_nothing_is_lost_in_a_first_run() -> None:
    assert lost(range(0), range(2)) == []


def test_an_agent_that_was_given_other_gpus_misses_none() -> None:
    assert lost(range(2), range(2, 4)) == []
    assert lost(range(2), range(1, 3)) == []


def test_no_gpu_is_lost_before_the_source_answered() -> None:
    """A driver takes seconds to load, and an exporter may start after the agent."""
    known = after(sample(A, 0))
    assert known.read(failures=["not_answering"]) == ["not_answering"]
    assert (known.newest(), known.answered) == ([], False)


def test_every_remembered_gpu_is_lost_where_a_source_that_works_finds_none() -> None:
    known = after(sample(A, 0), sample(B, 1), chat=(1,))
    assert known.read(failures=["no_gpu"]) == ["no_gpu", "gpu_missing"]
    assert known.take("chat", ()).problems == {B: "gpu_missing"}
    assert known.take_unclaimed().problems == {A: "gpu_missing"}


def test_a_lost_gpu_has_its_name_and_no_facts_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    known = after(sample("GPU-3", 3, {7: 1}))
    for now in (60.0, 61.0):
        assert known.read(failures=["no_gpu"], now=now) == ["no_gpu", "gpu_missing"]
        (lost,) = known.newest()
        assert (lost.gpu, lost.index, lost.name) == ("GPU-3", 3, "NVIDIA H200")
        assert (lost.at, lost.problem) == (now, "gpu_missing")
        assert (lost.facts, lost.processes) == ({("gpu_up", ()): 0.0}, None)
    assert caplog.messages == ["GPU GPU-3 (index 3) was there and is gone"]


def test_a_gpu_that_comes_back_later_is_not_lost_any_more() -> None:
    known = after(sample(A, 0))
    known.read(failures=["no_gpu"])
    assert known.read(sample(A, 0)) == []
    assert known.take_unclaimed().problems == {}


def test_a_lost_gpu_is_not_missed_any_more_once_others_are_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    known = after(sample(A, 0), sample(B, 1))
    assert known.read(sample(B, 1)) == ["gpu_missing"]
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert known.read(sample(B, 1), sample(C, 2)) == []
    assert [each.gpu for each in known.newest()] == [B, C]
    assert caplog.text.count(f"GPU {A} is not missed any more") == 1


def test_no_gpu_is_seen_while_the_source_reports_why_it_sees_none() -> None:
    known = after(sample(A, 0), sample(B, 1), chat=(0,))
    assert known.read(failures=["no_driver"]) == ["no_driver"]
    for failure in ("no_driver", "not_answering"):
        known.read(failures=[failure])
        unseen = [(each.gpu, each.problem) for each in known.newest()]
        assert unseen == [(A, "no_driver"), (B, "no_driver")]
        assert known.newest()[0].facts == {("gpu_up", ()): 0.0}
    assert (known.answered, gpus_of(known, "chat")) == (False, [()])


def test_gpus_that_were_not_seen_are_judged_once_the_source_answers() -> None:
    known = after(sample(A, 0), sample(B, 1))
    known.read(failures=["no_driver"])
    assert known.read(sample(B, 1)) == ["gpu_missing"]
    assert known.take_unclaimed().problems == {A: "gpu_missing"}
    known.read(sample(B, 1), sample(C, 2))
    assert [each.gpu for each in known.newest()] == [B, C]
