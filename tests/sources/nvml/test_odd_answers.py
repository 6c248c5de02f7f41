"""What nobody foresaw costs what it is about, is counted as the agent's own, and ends by itself."""

from collections.abc import Callable
from typing import Any

import pynvml  # type: ignore[import-untyped]
import pytest

from tests.real_parts.waiting import eventually
from tests.sources.nvml.fake_driver import gpu_uuid
from tests.sources.nvml.watched import ARRIVES_WITHIN_S, Watched


def _odd(*_: object) -> Any:
    raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")


def _odd_for(index: int, function: Callable[..., Any]) -> Callable[..., Any]:
    uuid_of = pynvml.nvmlDeviceGetUUID

    def answer(asked: Any, *arguments: Any) -> Any:
        return _odd() if uuid_of(asked) == gpu_uuid(index) else function(asked, *arguments)

    return answer


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetName"])
def test_a_first_session_that_fails_oddly_is_counted_and_tried_again(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(pynvml, function, _odd)
        for _ in range(10):
            watched.poll()
            assert (watched.samples, watched.failures) == ([], ["internal"])
    watched.poll(after_s=60)
    assert watched.fact("gpu_up") == 1
    assert not watched.failures


def test_gpus_whose_new_session_fails_oddly_are_unknown_and_not_missing(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched.poll()
    watched.poll("driver 0")
    monkeypatch.setattr(pynvml, "nvmlInit", _odd)
    for _ in range(2):
        watched.poll("driver 1")
        assert (watched.of(0).problem, watched.fact("gpu_up")) == ("internal", 0)


@pytest.mark.parametrize("function", ["nvmlDeviceGetName", "nvmlGpmQueryDeviceSupport"])
def test_a_gpu_that_cannot_be_opened_for_an_odd_answer_costs_no_other(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    watched.driver.do("gpus 3")
    with monkeypatch.context() as broken:
        broken.setattr(pynvml, function, _odd_for(1, getattr(pynvml, function)))
        watched.poll()
    assert [sample.index for sample in watched.samples] == [0, 2]
    assert watched.failures == ["internal"]
    watched.poll()
    assert [sample.index for sample in watched.samples] == [0, 1, 2]


def test_an_odd_answer_while_it_is_read_makes_one_gpu_unknown_and_no_other(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watched.driver.do("gpus 8")
    watched.poll()
    with monkeypatch.context() as broken:
        rates = pynvml.nvmlDeviceGetUtilizationRates
        broken.setattr(pynvml, "nvmlDeviceGetUtilizationRates", _odd_for(7, rates))
        for _ in range(5):
            watched.poll()
            assert watched.failures == ["internal"]
            assert [watched.fact("gpu_up", index=index) for index in range(8)] == [1] * 7 + [0]
            assert watched.of(7).problem == "internal"
            assert watched.fact("gpu_utilization_ratio", index=7) is None
    watched.poll()
    assert watched.fact("gpu_up", index=7) == 1
    assert not watched.failures
    assert "invalid start byte" in caplog.text


def test_each_time_that_a_gpu_becomes_odd_is_in_the_log_once(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watched.poll()
    for times in (1, 2):
        with monkeypatch.context() as broken:
            broken.setattr(pynvml, "nvmlDeviceGetUtilizationRates", _odd)
            for _ in range(3):
                watched.poll(after_s=0.1)
        watched.poll(after_s=0.1)
        assert watched.fact("gpu_up") == 1
        assert caplog.text.count("inside the agent") == times


def test_a_gpu_that_cannot_be_listened_to_for_an_odd_answer_costs_no_other(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched.driver.do("gpus 2")
    with monkeypatch.context() as broken:
        register = _odd_for(1, pynvml.nvmlDeviceRegisterEvents)
        broken.setattr(pynvml, "nvmlDeviceRegisterEvents", register)
        watched.poll()
    assert watched.failures == ["events_lost"]
    assert [watched.fact("gpu_up", index=index) for index in range(2)] == [1, 1]
    watched.driver.do("xid 0 31 -1 -1")
    assert watched.next_xid().gpu == gpu_uuid(0)


def test_a_wait_for_xids_that_ends_oddly_is_told_and_taken_up_again(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deaf() -> bool:
        watched.poll(after_s=0)
        return "events_lost" in watched.failures

    with monkeypatch.context() as broken:
        broken.setattr(pynvml, "nvmlEventSetWait_v2", _odd)
        eventually(deaf, within_s=ARRIVES_WITHIN_S, what="deafness is told")
    watched.poll(after_s=2)
    watched.driver.do("xid 0 31 -1 -1")
    assert watched.next_xid().xid == 31


def test_gpus_are_unknown_while_the_poll_itself_fails(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched.driver.do("gpus 2")
    watched.poll()
    with monkeypatch.context() as broken:
        broken.setattr(watched.watch._lifecycle, "read", _odd)
        watched.poll()
    assert [sample.problem for sample in watched.samples] == ["internal"] * 2
    assert [sample.at for sample in watched.samples] == [watched.now] * 2
    assert watched.failures == ["internal"]
    watched.poll()
    assert [sample.problem for sample in watched.samples] == [None] * 2
