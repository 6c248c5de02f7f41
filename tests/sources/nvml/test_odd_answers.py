"""An unexpected error costs one GPU at most, is counted as the agent's own, and ends by itself."""

from collections.abc import Callable
from typing import Any

import pynvml  # type: ignore[import-untyped]
import pytest

from agent.sources.nvml.source import Lifecycle
from tests.real_parts.waiting import eventually
from tests.sources.nvml.fake_driver import ARRIVES_WITHIN_S, ScriptedNvml, gpu_uuid


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


def test_gpus_whose_new_session_fails_oddly_are_unknown_and_not_missing(
    nvml: ScriptedNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.poll()
    nvml.poll("driver 0")
    monkeypatch.setattr(pynvml, "nvmlInit", _odd)
    for _ in range(2):
        nvml.poll("driver 1")
        assert (nvml.of(0).problem, nvml.fact("gpu_up")) == ("internal", 0)


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


def test_a_wait_for_xids_that_ends_oddly_is_reported_and_starts_again(
    nvml: ScriptedNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loses_events() -> bool:
        nvml.poll(after_s=0)
        return "events_lost" in nvml.failures

    with monkeypatch.context() as broken:
        broken.setattr(pynvml, "nvmlEventSetWait_v2", _odd)
        eventually(loses_events, within_s=ARRIVES_WITHIN_S, what="lost events")
    nvml.poll(after_s=2)
    nvml.driver.do("xid 0 31 -1 -1")
    assert nvml.next_xid().xid == 31


def test_gpus_are_unknown_while_the_poll_itself_fails(
    nvml: ScriptedNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.driver.do("gpus 2")
    nvml.poll()
    with monkeypatch.context() as broken:
        broken.setattr(Lifecycle, "read", _odd)
        nvml.poll()
    assert [sample.problem for sample in nvml.samples] == ["internal"] * 2
    assert [sample.at for sample in nvml.samples] == [nvml.now] * 2
    assert nvml.failures == ["internal"]
    nvml.poll()
    assert [sample.problem for sample in nvml.samples] == [None] * 2
