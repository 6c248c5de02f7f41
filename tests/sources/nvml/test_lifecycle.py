import logging
from itertools import pairwise

import pytest

from agent.catalog.gpu_problems import LOST
from agent.sources.nvml.lifecycle import (
    LONGEST_WAIT_BESIDE_OTHERS_S,
    LONGEST_WAIT_FOR_EVENTS_S,
    LONGEST_WAIT_S,
)
from tests.real_parts.waiting import eventually
from tests.sources.nvml.fake_driver import gpu_uuid
from tests.sources.nvml.watched import ARRIVES_WITHIN_S, Watched

NO_PERMISSION, GPU_IS_LOST, RESET_REQUIRED, MISMATCH, UNKNOWN = 4, 15, 16, 18, 999


def _up(watched: Watched) -> list[float | None]:
    return [watched.fact("gpu_up", index=sample.index) for sample in watched.samples]


def test_a_gpu_that_falls_off_is_told_at_once_and_the_others_go_on(watched: Watched) -> None:
    watched.driver.do("gpus 3")
    watched.poll()
    watched.poll(f"lose 1 {GPU_IS_LOST}")
    assert {sample.index: sample.fact("gpu_up") for sample in watched.samples} == {0: 1, 1: 0, 2: 1}
    assert (watched.of(1).problem, watched.of(1).at) == ("gpu_lost", watched.now)
    assert "gpu_lost" in watched.failures
    assert watched.fact("gpu_memory_used_bytes", index=1) is None
    assert watched.fact("gpu_memory_used_bytes", index=2) == 0


def test_a_gpu_is_told_as_lost_for_as_long_as_it_is(watched: Watched) -> None:
    watched.driver.do("gpus 2")
    watched.poll()
    watched.poll(f"lose 1 {GPU_IS_LOST}")
    for _ in range(100):
        watched.poll()
        assert watched.fact("gpu_up", index=0) == 1
        assert watched.of(1).problem is not None
        assert "gpu_lost" in watched.failures


def _waits(watched: Watched, seconds: int) -> list[int]:
    began = []
    for second in range(seconds):
        before = watched.driver.calls("nvmlInitWithFlags")
        watched.poll()
        if watched.driver.calls("nvmlInitWithFlags") > before:
            began.append(second)
    return [later - earlier for earlier, later in pairwise(began)]


def test_without_gpus_a_new_initialisation_comes_after_growing_waits(watched: Watched) -> None:
    watched.poll(f"lose 0 {GPU_IS_LOST}")
    assert _waits(watched, 200) == [2, 4, 8, 16, 32, LONGEST_WAIT_S, LONGEST_WAIT_S]
    begun, ended = map(watched.driver.calls, ("nvmlInitWithFlags", "nvmlShutdown"))
    assert begun == ended


def test_the_waits_where_only_xids_are_not_heard_grow_to_an_hour(watched: Watched) -> None:
    watched.poll(f"answer 0 nvmlDeviceRegisterEvents {UNKNOWN}")
    growing = [2**power for power in range(1, 12)]
    assert _waits(watched, 4096 + 3600) == [*growing, LONGEST_WAIT_FOR_EVENTS_S]
    begun, ended = map(watched.driver.calls, ("nvmlInitWithFlags", "nvmlShutdown"))
    assert begun == ended + 1


def test_the_waits_for_a_lost_gpu_grow_longer_while_others_are_read(watched: Watched) -> None:
    watched.driver.do("gpus 2")
    watched.poll()
    watched.poll(f"lose 1 {GPU_IS_LOST}")
    growing = [2, 4, 8, 16, 32, 64, 128, 256]
    assert _waits(watched, 820) == [*growing, LONGEST_WAIT_BESIDE_OTHERS_S]


def _in_a_long_wait(watched: Watched, *script: str) -> None:
    """Three GPUs, of which the first has been lost for long, some polls after a new session."""
    watched.driver.do("gpus 3", *script)
    watched.poll()
    watched.poll(f"lose 0 {GPU_IS_LOST}")
    _waits(watched, 600)
    begun = watched.driver.calls("nvmlInitWithFlags")
    while watched.driver.calls("nvmlInitWithFlags") == begun:
        watched.poll()
    for _ in range(5):
        watched.poll()


def test_a_driver_that_goes_during_a_long_wait_is_looked_for_at_once(watched: Watched) -> None:
    _in_a_long_wait(watched)
    for _ in range(5):
        watched.poll("driver 0")
    for _ in range(8):
        watched.poll("driver 1")
    assert [sample.problem for sample in watched.samples if sample.problem] == ["gpu_lost"]


def test_a_second_loss_during_a_long_wait_leaves_no_gpu_unheard(watched: Watched) -> None:
    _in_a_long_wait(watched)
    watched.driver.do(f"lose 1 {GPU_IS_LOST}")

    def deaf() -> bool:
        watched.poll(after_s=0)
        return "events_lost" in watched.failures

    eventually(deaf, within_s=ARRIVES_WITHIN_S, what="deafness is told")
    watched.poll(after_s=2)
    watched.driver.do("xid 2 79 -1 -1")
    assert watched.next_xid().gpu == gpu_uuid(2)


def test_more_losses_of_one_kind_shorten_a_wait_that_was_set_for_one(watched: Watched) -> None:
    _in_a_long_wait(watched, "set -1 events 0")
    watched.poll(f"lose -1 {GPU_IS_LOST}")
    watched.poll("lose -1 0", after_s=LONGEST_WAIT_S)
    assert _up(watched) == [1, 1, 1]


def test_a_gpu_that_comes_back_is_read_again_and_the_next_loss_waits_anew(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.driver.do("gpus 2")
    watched.poll()
    for _ in range(2):
        watched.poll(f"lose 1 {GPU_IS_LOST}")
        with caplog.at_level(logging.INFO):
            watched.poll("lose 1 0")
        assert _up(watched) == [1, 1]
        assert watched.of(1).problem is None
        assert not watched.failures
    assert f"GPU {gpu_uuid(1)} (index 1) is read again" in caplog.text


def test_a_gpu_that_is_lost_at_the_start_is_a_failure_until_it_answers(watched: Watched) -> None:
    watched.driver.do("gpus 2", f"lose 0 {GPU_IS_LOST}")
    watched.poll()
    assert [sample.gpu for sample in watched.samples] == [gpu_uuid(1)]
    assert watched.failures == ["gpu_lost"]
    watched.poll("lose 0 0")
    assert _up(watched) == [1, 1]


def test_a_gpu_that_goes_while_it_is_opened_is_lost(watched: Watched) -> None:
    watched.driver.do("gpus 2", f"answer 1 nvmlGpmQueryDeviceSupport {GPU_IS_LOST}")
    watched.poll()
    assert [sample.gpu for sample in watched.samples] == [gpu_uuid(0)]
    assert watched.failures == ["gpu_lost"]
    watched.poll("answer 1 nvmlGpmQueryDeviceSupport 0")
    assert _up(watched) == [1, 1]


def test_a_lost_gpu_that_cannot_be_opened_again_is_still_lost_and_not_missing(
    watched: Watched,
) -> None:
    watched.driver.do("gpus 2")
    watched.poll()
    watched.poll(f"lose 1 {GPU_IS_LOST}")
    for _ in range(2):
        watched.poll()
        assert watched.of(1).problem == "gpu_lost"


@pytest.mark.parametrize(
    ("code", "problem"), [(GPU_IS_LOST, "gpu_lost"), (UNKNOWN, "gpu_unopened")]
)
def test_a_lost_gpu_that_gives_an_unknown_error_later_is_not_told_as_blindness(
    watched: Watched, code: int, problem: str
) -> None:
    watched.driver.do("gpus 3")
    watched.poll()
    watched.poll(f"lose 1 {code}")
    watched.poll(f"lose 1 {UNKNOWN}")
    for _ in range(10):
        watched.poll()
        assert (watched.of(1).problem, problem in LOST) == (problem, True)
        assert "nvml_unknown_error" not in watched.failures


def test_a_gpu_that_told_its_loss_is_lost_though_none_is_left(watched: Watched) -> None:
    watched.poll()
    watched.poll(f"lose 0 {GPU_IS_LOST}")
    watched.poll(f"lose 0 {UNKNOWN}")
    assert watched.of(0).problem == "gpu_lost"
    watched.poll("lose 0 0", after_s=LONGEST_WAIT_S)
    watched.poll("driver 0")
    assert watched.of(0).problem == "no_driver"


@pytest.mark.parametrize(
    ("codes", "reason"),
    [
        ((NO_PERMISSION, NO_PERMISSION), "no_permission"),
        ((UNKNOWN, UNKNOWN), "nvml_unknown_error"),
        ((NO_PERMISSION, UNKNOWN), "nvml_unknown_error"),
        ((14, 14), "init_failed"),
        ((GPU_IS_LOST, GPU_IS_LOST), "no_gpu"),
        ((GPU_IS_LOST, UNKNOWN), "no_gpu"),
    ],
)
def test_what_is_said_of_all_gpus_alike_is_no_word_about_a_gpu(
    watched: Watched, codes: tuple[int, int], reason: str
) -> None:
    watched.driver.do("gpus 2")
    watched.poll(
        *(f"answer {at} nvmlDeviceGetHandleByIndex_v2 {code}" for at, code in enumerate(codes))
    )
    assert reason in watched.failures
    assert set(watched.failures) <= {reason}


def test_a_gpu_that_asks_for_a_reset_is_lost_by_that_name(watched: Watched) -> None:
    watched.poll()
    watched.poll(f"lose 0 {RESET_REQUIRED}")
    assert watched.of(0).problem == "gpu_reset_required"


def test_a_gpu_whose_every_call_fails_is_lost(watched: Watched) -> None:
    watched.driver.do("gpus 2")
    watched.poll()
    watched.poll(f"lose 1 {UNKNOWN}")
    assert watched.of(1).problem == "gpu_silent"
    assert watched.fact("gpu_up", index=0) == 1


def test_all_gpus_lost_is_told_for_each_and_ends_when_they_return(watched: Watched) -> None:
    watched.driver.do("gpus 2")
    watched.poll()
    watched.poll(f"lose -1 {GPU_IS_LOST}")
    assert _up(watched) == [0, 0]
    watched.poll()
    assert _up(watched) == [0, 0]
    assert "no_gpu" in watched.failures
    watched.poll("lose -1 0", after_s=2)
    assert _up(watched) == [1, 1]


def test_a_gpu_that_vanishes_from_the_count_is_missing(watched: Watched) -> None:
    watched.driver.do("gpus 2")
    watched.poll()
    watched.poll("driver 0")
    watched.poll("gpus 1")
    assert watched.of(1).problem == "gpu_missing"
    assert watched.failures == ["gpu_missing"]


def test_a_driver_that_unloads_takes_every_gpu_and_comes_back(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.driver.do("gpus 2")
    watched.poll()
    for _ in range(5):
        watched.poll("driver 0")
        assert _up(watched) == [0, 0]
        assert {sample.problem for sample in watched.samples} == {"no_driver"}
        assert watched.failures == ["no_driver"]
    assert caplog.text.count("no GPU is read") == 1
    watched.poll("driver 1", after_s=LONGEST_WAIT_S)
    assert _up(watched) == [1, 1]
    assert not watched.failures


def test_what_was_read_before_the_driver_went_is_kept(watched: Watched) -> None:
    watched.driver.do("gpus 2")
    watched.poll()
    watched.poll("answer 1 nvmlDeviceGetFieldValues 9")
    assert watched.fact("gpu_up", index=0) == 1
    assert watched.of(1).problem == "no_driver"


def test_a_library_that_was_shut_down_is_initialised_again(watched: Watched) -> None:
    watched.poll()
    watched.driver.library.nvmlShutdown()
    watched.poll()
    assert watched.of(0).problem == "driver_lost"
    watched.poll()
    assert watched.fact("gpu_up") == 1


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (NO_PERMISSION, "no_permission"),
        (9, "no_driver"),
        (MISMATCH, "driver_mismatch"),
        (UNKNOWN, "nvml_unknown_error"),
        (14, "init_failed"),
    ],
)
def test_an_initialisation_that_fails_is_told_by_its_reason(
    watched: Watched, code: int, reason: str
) -> None:
    watched.poll(f"init {code}")
    assert watched.failures == [reason]
    assert not watched.samples
    watched.poll("init 0")
    assert watched.fact("gpu_up") == 1


def test_gpus_that_cannot_be_counted_are_a_failure(watched: Watched) -> None:
    watched.poll(f"answer -1 nvmlDeviceGetCount_v2 {UNKNOWN}")
    assert watched.failures == ["nvml_unknown_error"]
    assert watched.driver.calls("nvmlShutdown") == 1


def test_a_gpu_of_another_container_is_left_alone(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.driver.do("gpus 2", f"answer 0 nvmlDeviceGetHandleByIndex_v2 {NO_PERMISSION}")
    for _ in range(5):
        watched.poll()
        assert [sample.gpu for sample in watched.samples] == [gpu_uuid(1)]
        assert not watched.failures
    assert watched.driver.calls("nvmlInitWithFlags") == 1
    (line,) = [line for line in caplog.messages if "nvmlDeviceGetHandleByIndex" in line]
    assert "access to the GPU's device files" in line


def test_counts_of_xids_outlive_the_gpu(watched: Watched) -> None:
    watched.driver.do("gpus 2")
    watched.poll()
    watched.driver.do("xid 1 79 -1 -1")
    watched.next_xid()
    watched.poll(f"lose 1 {GPU_IS_LOST}")
    assert watched.fact("gpu_xid_errors", "79", index=1) == 1
    assert watched.fact("gpu_xid_last_seen_timestamp_seconds", "79", index=1) == 1001.0
    assert watched.fact("gpu_xid_errors", "79", index=0) == 0


def test_deafness_to_xids_is_told_and_ends_with_the_next_initialisation(watched: Watched) -> None:
    watched.poll()
    watched.driver.do(f"answer -1 nvmlEventSetWait_v2 {UNKNOWN}")

    def deaf() -> bool:
        watched.poll(after_s=0)
        return "events_lost" in watched.failures

    eventually(deaf, within_s=ARRIVES_WITHIN_S, what="deafness is told")
    assert watched.fact("gpu_up") == 1
    watched.poll("answer -1 nvmlEventSetWait_v2 0", after_s=2)
    watched.driver.do("xid 0 31 -1 -1")
    assert watched.next_xid().xid == 31
    watched.poll()
    assert not watched.failures
