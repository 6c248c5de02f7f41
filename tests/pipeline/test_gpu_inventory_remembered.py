"""GPUs that an earlier run of the agent read, and GPUs that are lost."""

import logging

import pytest

from tests.pipeline.inventory import A, B, C, gpus_of, remembering, sample, xid


def test_when_a_remembered_gpu_is_lost_indexes_are_those_of_the_earlier_run() -> None:
    gpus = remembering(sample(A, 0), sample(B, 1), chat=(0,), code=(1,))
    for at in (9.0, 10.0):
        gpus.read(sample(B, 0, at=at))
        assert gpus_of(gpus, "chat", "code") == [(A,), (B,)]
    assert gpus.take("chat", ()).problems == {A: "gpu_missing"}


def test_an_index_that_two_gpus_had_in_the_earlier_run_is_the_later_one() -> None:
    """C was lost during that run, and later GPUs took lower indexes."""
    before = (sample(C, 0, at=1.0), sample(A, 0, at=9.0), sample(B, 1, at=9.0))
    gpus = remembering(*before, chat=(0,), code=(1,))
    gpus.read(sample(B, 0, at=20.0))
    assert gpus_of(gpus, "chat", "code") == [(A,), (B,)]


def test_an_index_of_two_remembered_gpus_is_the_present_one() -> None:
    gpus = remembering(sample(A, 0), sample(B, 0), chat=(0,))
    gpus.read(sample(A, 0))
    assert gpus_of(gpus, "chat") == [(A,)]


def test_after_a_restart_an_index_is_the_gpu_that_replaced_a_lost_one() -> None:
    gpus = remembering(sample(A, 0), sample(B, 1), chat=(0,))
    gpus.read(sample(C, 0), sample(B, 1))
    assert gpus_of(gpus, "chat") == [(C,)]
    assert gpus.take_unclaimed().problems == {}


def test_after_a_restart_an_index_is_the_new_gpu_though_the_lost_one_is_remembered() -> None:
    before = (sample(C, 0, at=1.0), sample(A, 0, at=9.0), sample(B, 1, at=9.0))
    gpus = remembering(*before, chat=(0,), code=(1,))
    gpus.read(sample(A, 0, at=20.0), sample(B, 1, at=20.0))
    assert gpus_of(gpus, "chat", "code") == [(A,), (B,)]
    assert gpus.take_unclaimed().problems == {C: "gpu_missing"}


def test_an_index_of_a_gpu_that_is_no_longer_missing_is_resolved_again() -> None:
    gpus = remembering(sample(A, 0), sample(B, 1), chat=(0,))
    gpus.read(sample(B, 1))
    assert gpus_of(gpus, "chat") == [(A,)]
    gpus.read(sample(B, 1), sample(C, 0))
    assert gpus_of(gpus, "chat") == [(C,)]


def lost(earlier: range, present: range) -> list[str]:
    """The lost GPUs when a run with GPUs `earlier` is followed by one with `present`."""
    found = remembering(*(sample(f"GPU-{number}", number) for number in earlier))
    found.read(*(sample(f"GPU-{number}", number) for number in present))
    return [gpu for gpu, why in found.take_unclaimed().problems.items() if why == "gpu_missing"]


def test_a_remembered_gpu_that_is_absent_is_lost() -> None:
    assert lost(range(3), range(2)) == ["GPU-2"]
    assert lost(range(2), range(2)) == []


def test_nothing_is_lost_in_a_first_run() -> None:
    assert lost(range(0), range(2)) == []


def test_with_other_gpus_than_before_none_is_lost() -> None:
    assert lost(range(2), range(2, 4)) == []
    assert lost(range(2), range(1, 3)) == []


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


def test_a_gpu_that_comes_back_is_no_longer_lost() -> None:
    gpus = remembering(sample(A, 0))
    gpus.read(failures=["no_gpu"])
    assert gpus.read(sample(A, 0)) == []
    assert gpus.take_unclaimed().problems == {}


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
