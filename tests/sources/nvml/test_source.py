"""GPUs that are read, lost and read again, and a driver that fails, hangs or gives odd answers."""

import logging
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pynvml  # type: ignore[import-untyped]
import pytest

from agent.catalog.gpu_facts import GPU_FACTS
from agent.catalog.gpu_problems import COUNTED_XIDS
from agent.sources.nvml.source import LONGEST_WAIT_S, Lifecycle
from tests.real_parts.waiting import eventually
from tests.sources.nvml.fake_driver import (
    ARRIVES_WITHIN_S,
    Poll,
    Scenarios,
    ScriptedNvml,
    Seen,
    check,
    gpu_uuid,
    poll,
)


def test_every_fact_of_the_catalogue_can_be_read(nvml: ScriptedNvml) -> None:
    nvml.driver.do("field 0 29 1", "field 0 30 2", "field 0 31 1")
    nvml.poll()
    nvml.poll()
    nvml.driver.do("xid 0 31 -1 -1")
    nvml.next_xid()
    nvml.poll()
    labels = {fact.name: len(fact.labels) for fact in GPU_FACTS}
    assert {name: len(values) for name, values in nvml.of(0).facts} == labels


def test_no_visible_gpu_is_a_failure_and_no_sample(
    nvml: ScriptedNvml, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            nvml.poll("gpus 0")
            assert nvml.failures == ["no_gpu"]
            assert not nvml.samples
    (line,) = caplog.messages
    assert "no GPU is visible" in line


def _poll_until_read(nvml: ScriptedNvml) -> None:
    def read() -> bool:
        nvml.poll(after_s=0)
        return any(sample.problem is None for sample in nvml.samples)

    eventually(read, within_s=ARRIVES_WITHIN_S, what="NVML answers")


def test_a_driver_that_does_not_answer_delays_no_poll_and_is_reported(
    impatient: ScriptedNvml,
) -> None:
    nvml = impatient
    _poll_until_read(nvml)
    nvml.poll("hold nvmlDeviceGetUtilizationRates")
    for _ in range(3):
        nvml.poll()
        assert nvml.failures == ["not_answering"]
        assert (nvml.of(0).problem, nvml.of(0).at) == ("not_answering", nvml.now)
        assert nvml.fact("gpu_up") == 0
        assert nvml.fact("gpu_memory_used_bytes") is None
    asked_at = nvml.now
    nvml.poll("release", "set 0 utilization 50", after_s=100)
    _poll_until_read(nvml)
    assert nvml.of(0).at <= asked_at + 100


def test_an_xid_is_returned_while_the_driver_does_not_answer(impatient: ScriptedNvml) -> None:
    nvml = impatient
    _poll_until_read(nvml)
    nvml.poll("hold nvmlDeviceGetFieldValues")
    nvml.driver.do("xid 0 79 -1 -1")
    assert nvml.next_xid().xid == 79
    nvml.poll()
    assert nvml.fact("gpu_xid_errors", "79") == 1


def test_a_driver_that_does_not_answer_delays_no_close(
    impatient: ScriptedNvml, caplog: pytest.LogCaptureFixture
) -> None:
    _poll_until_read(impatient)
    impatient.poll("hold nvmlDeviceGetUtilizationRates")
    impatient.source.close()
    assert "NVML does not answer and is not shut down" in caplog.text
    impatient.driver.do("release")
    eventually(
        lambda: impatient.driver.calls("nvmlShutdown"), within_s=ARRIVES_WITHIN_S, what="shutdown"
    )


def test_an_initialisation_that_hangs_is_reported_too(impatient: ScriptedNvml) -> None:
    impatient.poll("hold nvmlInitWithFlags")
    assert impatient.failures == ["not_answering"]
    impatient.driver.do("release")
    _poll_until_read(impatient)


def test_close_gives_everything_back_and_ends_the_threads(nvml: ScriptedNvml) -> None:
    nvml.driver.do("gpus 2")
    nvml.poll()
    nvml.poll()
    nvml.source.close()
    assert nvml.driver.calls("nvmlGpmSampleFree") == 4
    assert nvml.driver.calls("nvmlEventSetFree") == 1
    assert nvml.driver.calls("nvmlShutdown") == 1
    eventually(
        lambda: not {"nvml", "nvml events"} & {thread.name for thread in threading.enumerate()},
        within_s=ARRIVES_WITHIN_S,
        what="the end of the threads",
    )


def test_after_close_a_read_is_empty_and_closing_again_is_harmless(nvml: ScriptedNvml) -> None:
    nvml.poll()
    nvml.source.close()
    nvml.source.close()
    nvml.poll()
    assert not nvml.samples
    assert not nvml.failures


NO_PERMISSION, GPU_IS_LOST, RESET_REQUIRED, MISMATCH, UNKNOWN = 4, 15, 16, 18, 999

LOSSES: Scenarios = {
    "one batched field call for each GPU and poll": [
        poll("gpus 8"), poll(times=2), {"calls nvmlDeviceGetFieldValues": 3 * 8},
    ],
    "the call that blocks to measure PCIe is never made": [
        poll(times=2), {"calls nvmlDeviceGetPcieThroughput": 0},
    ],
    "Xids that alerts are about are counted from zero": [
        poll(), {f"gpu_xid_errors/{number}": 0 for number in COUNTED_XIDS},
        {"gpu_xid_errors/94": None},
    ],
    "a GPU that falls off is reported at once and the others go on": [
        poll("gpus 3"), poll(f"lose 1 {GPU_IS_LOST}"),
        {"gpu_up@0": 1, "gpu_up@1": 0, "gpu_up@2": 1, "problem@1": "gpu_lost",
         "fails gpu_lost": True, "gpu_memory_used_bytes@1": None, "gpu_memory_used_bytes@2": 0},
    ],
    "a GPU that is lost before its first read is a failure until it answers": [
        poll("gpus 2", f"lose 0 {GPU_IS_LOST}"), {"failures": ["gpu_lost"], "gpu_up@1": 1},
        poll("lose 0 0"), {"gpu_up@0": 1, "gpu_up@1": 1},
    ],
    "a GPU that is lost while it is opened is a failure until it answers": [
        poll("gpus 2", f"answer 0 nvmlGpmQueryDeviceSupport {GPU_IS_LOST}"),
        {"fails gpu_lost": True, "gpu_up@1": 1},
        poll("answer 0 nvmlGpmQueryDeviceSupport 0"), {"gpu_up@0": 1, "gpu_up@1": 1},
    ],
    "a lost GPU that gives an unknown error later is still lost": [
        poll("gpus 3"), poll(f"lose 1 {GPU_IS_LOST}"), poll(f"lose 1 {UNKNOWN}"), poll(times=10),
        {"problem@1": "gpu_lost", "fails nvml_unknown_error": False},
    ],
    "a GPU that cannot be opened beside others is lost": [
        poll("gpus 3"), poll(f"lose 1 {UNKNOWN}"), poll(times=11), {"problem@1": "gpu_unopened"},
    ],
    "a GPU that reported its loss is lost though none is left": [
        poll(), poll(f"lose 0 {GPU_IS_LOST}"), poll(f"lose 0 {UNKNOWN}"), {"problem": "gpu_lost"},
        poll("lose 0 0", after_s=LONGEST_WAIT_S), poll("driver 0"), {"problem": "no_driver"},
    ],
    "a GPU that asks for a reset is lost by that name": [
        poll(), poll(f"lose 0 {RESET_REQUIRED}"), {"problem": "gpu_reset_required"},
    ],
    "a GPU whose every call fails is lost": [
        poll("gpus 2"), poll(f"lose 1 {UNKNOWN}"), {"problem@1": "gpu_silent", "gpu_up@0": 1},
    ],
    "the loss of all GPUs is reported for each and ends when they return": [
        poll("gpus 2"), poll(f"lose -1 {GPU_IS_LOST}"), {"gpu_up@0": 0, "gpu_up@1": 0},
        poll(), {"gpu_up@0": 0, "gpu_up@1": 0, "fails no_gpu": True},
        poll("lose -1 0", after_s=2), {"gpu_up@0": 1, "gpu_up@1": 1},
    ],
    "a GPU that vanishes from the count is missing": [
        poll("gpus 2"), poll("driver 0"), poll("gpus 1"),
        {"problem@1": "gpu_missing", "failures": ["gpu_missing"]},
    ],
    "a driver that unloads takes every GPU and comes back": [
        poll("gpus 2"), poll("driver 0", times=5),
        {"gpu_up@0": 0, "gpu_up@1": 0, "problem@0": "no_driver", "problem@1": "no_driver",
         "failures": ["no_driver"]},
        poll("driver 1", after_s=LONGEST_WAIT_S),
        {"gpu_up@0": 1, "gpu_up@1": 1, "problem@0": None, "failures": []},
    ],
    "what was read before the driver went is kept": [
        poll("gpus 2"), poll("answer 1 nvmlDeviceGetFieldValues 9"),
        {"gpu_up@0": 1, "problem@1": "no_driver"},
    ],
}  # fmt: skip


@pytest.mark.parametrize("parts", LOSSES.values(), ids=LOSSES)
def test_what_is_read_and_lost(nvml: ScriptedNvml, parts: Sequence[Poll | Seen]) -> None:
    check(nvml, parts)


def test_a_library_that_was_shut_down_is_initialised_again(
    nvml: ScriptedNvml, caplog: pytest.LogCaptureFixture
) -> None:
    nvml.poll()
    sample = nvml.of()
    assert (sample.gpu, sample.index, sample.name) == (gpu_uuid(0), 0, "NVIDIA H200")
    assert (sample.at, sample.problem) == (nvml.now, None)
    nvml.driver.library.nvmlShutdown()
    nvml.poll()
    assert nvml.of(0).problem == "driver_lost"
    nvml.poll()
    assert nvml.fact("gpu_up") == 1
    # What lasts is logged once.
    caplog.clear()
    for _ in range(5):
        nvml.poll("driver 0")
    assert caplog.text.count("no GPU is read") == 1


def _up(nvml: ScriptedNvml) -> list[float | None]:
    return [nvml.fact("gpu_up", index=sample.index) for sample in nvml.samples]


def _waits(nvml: ScriptedNvml, seconds: int) -> list[int]:
    began = []
    for second in range(seconds):
        before = nvml.driver.calls("nvmlInitWithFlags")
        nvml.poll()
        if nvml.driver.calls("nvmlInitWithFlags") > before:
            began.append(second)
    return [later - earlier for earlier, later in pairwise(began)]


@pytest.mark.parametrize(
    ("gpus", "loss", "kept"),
    [
        (1, f"lose 0 {GPU_IS_LOST}", 0),
        (2, f"lose 1 {GPU_IS_LOST}", 1),
        (1, f"answer 0 nvmlDeviceRegisterEvents {UNKNOWN}", 1),
    ],
    ids=["no GPU is left", "others are read", "only Xid errors get lost"],
)
def test_a_new_initialisation_comes_after_waits_that_double(
    nvml: ScriptedNvml, gpus: int, loss: str, kept: int
) -> None:
    nvml.driver.do(f"gpus {gpus}")
    nvml.poll(loss)
    doubling = [2, 4, 8, 16, 32, 64, 128, 256]
    if kept:
        assert _waits(nvml, 140) == doubling[:6]
    else:
        assert _waits(nvml, 820) == [*doubling, LONGEST_WAIT_S]
    begun, ended = map(nvml.driver.calls, ("nvmlInitWithFlags", "nvmlShutdown"))
    assert begun == ended + kept


def _wait_for_lost_events(nvml: ScriptedNvml) -> None:
    def loses_events() -> bool:
        nvml.poll(after_s=0)
        return "events_lost" in nvml.failures

    eventually(loses_events, within_s=ARRIVES_WITHIN_S, what="lost events")


def _in_a_long_wait(nvml: ScriptedNvml, *script: str) -> None:
    """Three GPUs, of which the first has been lost for long, some polls after a new session."""
    nvml.driver.do("gpus 3", *script)
    nvml.poll()
    nvml.poll(f"lose 0 {GPU_IS_LOST}")
    _waits(nvml, 130)
    begun = nvml.driver.calls("nvmlInitWithFlags")
    while nvml.driver.calls("nvmlInitWithFlags") == begun:
        nvml.poll()
    for _ in range(5):
        nvml.poll()


def test_a_driver_that_goes_during_a_long_wait_is_tried_at_once(nvml: ScriptedNvml) -> None:
    _in_a_long_wait(nvml)
    for _ in range(5):
        nvml.poll("driver 0")
    for _ in range(8):
        nvml.poll("driver 1")
    assert [sample.problem for sample in nvml.samples if sample.problem] == ["gpu_lost"]


def test_a_second_loss_during_a_long_wait_loses_no_xids_for_long(nvml: ScriptedNvml) -> None:
    _in_a_long_wait(nvml)
    nvml.driver.do(f"lose 1 {GPU_IS_LOST}")
    _wait_for_lost_events(nvml)
    nvml.poll(after_s=2)
    nvml.driver.do("xid 2 79 -1 -1")
    assert nvml.next_xid().gpu == gpu_uuid(2)


def test_a_gpu_that_comes_back_is_read_again_and_the_next_loss_starts_with_a_short_wait(
    nvml: ScriptedNvml, caplog: pytest.LogCaptureFixture
) -> None:
    nvml.driver.do("gpus 2")
    nvml.poll()
    for _ in range(2):
        nvml.poll(f"lose 1 {GPU_IS_LOST}")
        with caplog.at_level(logging.INFO):
            nvml.poll("lose 1 0")
        assert _up(nvml) == [1, 1]
        assert nvml.of(1).problem is None
        assert not nvml.failures
    assert f"GPU {gpu_uuid(1)} (index 1) is read again" in caplog.text


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
def test_a_code_that_all_gpus_return_is_about_the_driver(
    nvml: ScriptedNvml, codes: tuple[int, int], reason: str
) -> None:
    nvml.driver.do("gpus 2")
    nvml.poll(
        *(f"answer {at} nvmlDeviceGetHandleByIndex_v2 {code}" for at, code in enumerate(codes))
    )
    assert reason in nvml.failures
    assert set(nvml.failures) <= {reason}


@pytest.mark.parametrize(
    ("call", "code", "reason"),
    [
        ("init", NO_PERMISSION, "no_permission"),
        ("init", 9, "no_driver"),
        ("init", MISMATCH, "driver_mismatch"),
        ("init", UNKNOWN, "nvml_unknown_error"),
        ("init", 14, "init_failed"),
        ("answer -1 nvmlDeviceGetCount_v2", UNKNOWN, "nvml_unknown_error"),
    ],
)
def test_an_initialisation_that_fails_is_reported_by_its_reason(
    nvml: ScriptedNvml, call: str, code: int, reason: str
) -> None:
    nvml.poll(f"{call} {code}")
    assert nvml.failures == [reason]
    assert not nvml.samples
    assert nvml.driver.calls("nvmlShutdown") == (call != "init")
    nvml.poll(f"{call} 0")
    assert nvml.fact("gpu_up") == 1


def test_a_gpu_of_another_container_is_left_alone(
    nvml: ScriptedNvml, caplog: pytest.LogCaptureFixture
) -> None:
    nvml.driver.do("gpus 2", f"answer 0 nvmlDeviceGetHandleByIndex_v2 {NO_PERMISSION}")
    for _ in range(5):
        nvml.poll()
        assert [sample.gpu for sample in nvml.samples] == [gpu_uuid(1)]
        assert not nvml.failures
    assert nvml.driver.calls("nvmlInitWithFlags") == 1
    (line,) = [line for line in caplog.messages if "nvmlDeviceGetHandleByIndex" in line]
    assert "access to the GPU's device files" in line


def test_counts_of_xids_outlive_the_gpu_and_its_session(nvml: ScriptedNvml) -> None:
    nvml.driver.do("gpus 2")
    nvml.poll()
    nvml.driver.do("xid 1 79 -1 -1")
    nvml.next_xid()
    nvml.poll(f"lose 1 {GPU_IS_LOST}")
    assert nvml.fact("gpu_xid_errors", "79", index=1) == 1
    assert nvml.fact("gpu_xid_last_seen_timestamp_seconds", "79", index=1) == 1001.0
    assert nvml.fact("gpu_xid_errors", "79", index=0) == 0
    nvml.poll("lose 1 0")
    assert nvml.fact("gpu_up", index=1) == 1
    assert nvml.fact("gpu_xid_errors", "79", index=1) == 1


@pytest.mark.parametrize("odd", [False, True], ids=["error", "odd answer"])
def test_lost_events_are_reported_until_the_next_initialisation(
    nvml: ScriptedNvml, monkeypatch: pytest.MonkeyPatch, odd: bool
) -> None:
    with monkeypatch.context() as broken:
        if odd:
            broken.setattr(pynvml, "nvmlEventSetWait_v2", _odd)
        else:
            nvml.poll()
            nvml.driver.do(f"answer -1 nvmlEventSetWait_v2 {UNKNOWN}")
        _wait_for_lost_events(nvml)
    assert nvml.fact("gpu_up") == 1
    nvml.poll("answer -1 nvmlEventSetWait_v2 0", after_s=2)
    nvml.driver.do("xid 0 31 -1 -1")
    assert nvml.next_xid().xid == 31
    nvml.poll()
    assert not nvml.failures


# An unexpected error costs one GPU at most, is counted as the agent's own, and ends by itself


def _odd(*_: object) -> Any:
    raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")


def _odd_for(index: int, function: Callable[..., Any]) -> Callable[..., Any]:
    uuid_of = pynvml.nvmlDeviceGetUUID

    def answer(asked: Any, *arguments: Any) -> Any:
        return _odd() if uuid_of(asked) == gpu_uuid(index) else function(asked, *arguments)

    return answer


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetName"])
def test_a_first_session_that_fails_oddly_is_counted_and_tried_again(
    nvml: ScriptedNvml, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(pynvml, function, _odd)
        for _ in range(10):
            nvml.poll()
            assert (nvml.samples, nvml.failures) == ([], ["internal"])
    nvml.poll(after_s=60)
    assert nvml.fact("gpu_up") == 1
    assert not nvml.failures


@pytest.mark.parametrize("function", ["nvmlDeviceGetName", "nvmlGpmQueryDeviceSupport"])
def test_a_gpu_that_cannot_be_opened_for_an_odd_answer_costs_no_other(
    nvml: ScriptedNvml, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    nvml.driver.do("gpus 3")
    with monkeypatch.context() as broken:
        broken.setattr(pynvml, function, _odd_for(1, getattr(pynvml, function)))
        nvml.poll()
    assert [sample.index for sample in nvml.samples] == [0, 2]
    assert nvml.failures == ["internal"]
    nvml.poll()
    assert [sample.index for sample in nvml.samples] == [0, 1, 2]


def test_an_odd_answer_while_it_is_read_makes_one_gpu_unknown_and_no_other(
    nvml: ScriptedNvml, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nvml.driver.do("gpus 8")
    nvml.poll()
    with monkeypatch.context() as broken:
        rates = pynvml.nvmlDeviceGetUtilizationRates
        broken.setattr(pynvml, "nvmlDeviceGetUtilizationRates", _odd_for(7, rates))
        for _ in range(5):
            nvml.poll()
            assert nvml.failures == ["internal"]
            assert [nvml.fact("gpu_up", index=index) for index in range(8)] == [1] * 7 + [0]
            assert nvml.of(7).problem == "internal"
            assert nvml.fact("gpu_utilization_ratio", index=7) is None
    nvml.poll()
    assert nvml.fact("gpu_up", index=7) == 1
    assert not nvml.failures
    assert "invalid start byte" in caplog.text


def test_each_time_that_a_gpu_becomes_odd_is_in_the_log_once(
    nvml: ScriptedNvml, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nvml.poll()
    for times in (1, 2):
        with monkeypatch.context() as broken:
            broken.setattr(pynvml, "nvmlDeviceGetUtilizationRates", _odd)
            for _ in range(3):
                nvml.poll(after_s=0.1)
        nvml.poll(after_s=0.1)
        assert nvml.fact("gpu_up") == 1
        assert caplog.text.count("inside the agent") == times


def test_a_gpu_whose_events_fail_oddly_costs_no_other(
    nvml: ScriptedNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.driver.do("gpus 2")
    with monkeypatch.context() as broken:
        register = _odd_for(1, pynvml.nvmlDeviceRegisterEvents)
        broken.setattr(pynvml, "nvmlDeviceRegisterEvents", register)
        nvml.poll()
    assert nvml.failures == ["events_lost"]
    assert [nvml.fact("gpu_up", index=index) for index in range(2)] == [1, 1]
    nvml.driver.do("xid 0 31 -1 -1")
    assert nvml.next_xid().gpu == gpu_uuid(0)


@pytest.mark.parametrize("owner", [Lifecycle, pynvml], ids=["poll", "new session"])
def test_gpus_are_unknown_and_not_missing_while_the_whole_poll_fails(
    nvml: ScriptedNvml, monkeypatch: pytest.MonkeyPatch, owner: Any
) -> None:
    nvml.driver.do("gpus 2")
    nvml.poll()
    if owner is pynvml:
        nvml.poll("driver 0")
    with monkeypatch.context() as broken:
        broken.setattr(owner, "read" if owner is Lifecycle else "nvmlInit", _odd)
        for _ in range(2):
            nvml.poll("driver 1")
            assert [sample.problem for sample in nvml.samples] == ["internal"] * 2
            assert [sample.at for sample in nvml.samples] == [nvml.now] * 2
            assert nvml.failures == ["internal"]
    nvml.poll(after_s=60)
    assert [sample.problem for sample in nvml.samples] == [None] * 2
