import queue

import pytest

from agent.catalog.xids import COUNTED_XIDS
from agent.records.gpu import XidSeen
from agent.sources.nvml.watch import NvmlSinks, NvmlWatch
from tests.real_parts.waiting import eventually
from tests.sources.nvml.fake_driver import FakeDriver, gpu_uuid
from tests.sources.nvml.watched import ARRIVES_WITHIN_S, Watched

INVALID_ARGUMENT, NOT_SUPPORTED, UNKNOWN = 2, 3, 999


def test_an_xid_is_told_without_a_poll(watched: Watched) -> None:
    watched.driver.do("gpus 2")
    watched.poll()
    watched.driver.do("xid 1 48 -1 -1")
    seen = watched.next_xid()
    assert (seen.gpu, seen.xid, seen.count, seen.at) == (gpu_uuid(1), 48, 1, watched.now)
    assert (seen.gpu_instance, seen.compute_instance) == (None, None)


def test_each_xid_is_counted_for_its_gpu_with_the_time_of_the_last(watched: Watched) -> None:
    watched.driver.do("gpus 2")
    watched.poll()
    for count in (1, 2):
        watched.driver.do("xid 0 94 -1 -1")
        assert watched.next_xid().count == count
        watched.poll()
    assert watched.fact("gpu_xid_errors", "94", index=0) == 2
    assert watched.fact("gpu_xid_last_seen_timestamp_seconds", "94", index=0) == watched.now - 1
    assert watched.fact("gpu_xid_errors", "94", index=1) is None


def test_an_xid_of_a_slice_names_the_slice(watched: Watched) -> None:
    watched.poll("mig 0 2")
    watched.driver.do("xid 0 13 8 0")
    seen = watched.next_xid()
    assert (seen.gpu_instance, seen.compute_instance) == (8, 0)


def test_an_xid_is_known_by_its_gpu_even_when_that_is_lost(watched: Watched) -> None:
    watched.driver.do("gpus 2")
    watched.poll()
    watched.driver.do("xid 1 79 -1 -1", "lose 1 15")
    assert (seen := watched.next_xid()).gpu == gpu_uuid(1)
    assert seen.xid == 79


def test_xids_are_heard_again_after_a_new_initialisation(watched: Watched) -> None:
    watched.poll()
    watched.poll("driver 0")
    watched.poll("driver 1")
    watched.driver.do("xid 0 62 -1 -1")
    assert watched.next_xid().xid == 62


def test_the_other_gpus_are_heard_while_one_is_lost(watched: Watched) -> None:
    watched.driver.do("gpus 2")
    watched.poll()
    watched.poll("lose 1 15")
    watched.poll()
    watched.driver.do("xid 0 31 -1 -1")
    assert watched.next_xid().gpu == gpu_uuid(0)


@pytest.mark.parametrize(
    "script",
    [
        ("set 0 events 0",),
        (f"answer -1 nvmlEventSetCreate {NOT_SUPPORTED}",),
        (f"answer 0 nvmlDeviceRegisterEvents {NOT_SUPPORTED}",),
        (f"answer 0 nvmlDeviceGetSupportedEventTypes {NOT_SUPPORTED}",),
    ],
    ids=lambda script: script[0],
)
def test_where_no_xid_can_be_heard_its_count_is_unknown_and_the_rest_is_read(
    watched: Watched, script: tuple[str, ...]
) -> None:
    watched.poll(*script)
    watched.poll()
    assert all(watched.fact("gpu_xid_errors", str(xid)) is None for xid in COUNTED_XIDS)
    assert watched.fact("gpu_memory_used_bytes") == 0
    assert not watched.failures


@pytest.mark.parametrize(
    "function",
    ["nvmlDeviceRegisterEvents", "nvmlEventSetCreate", "nvmlDeviceGetSupportedEventTypes"],
)
def test_a_gpu_that_could_not_be_listened_to_is_told_and_heard_soon(
    watched: Watched, function: str
) -> None:
    watched.poll(f"answer -1 {function} {UNKNOWN}")
    assert "events_lost" in watched.failures
    assert watched.fact("gpu_up") == 1
    watched.poll(f"answer -1 {function} 0")
    assert not watched.failures
    watched.driver.do("xid 0 79 -1 -1")
    assert watched.next_xid().xid == 79


@pytest.mark.parametrize(
    "function",
    ["nvmlDeviceRegisterEvents", "nvmlEventSetCreate", "nvmlDeviceGetSupportedEventTypes"],
)
def test_a_driver_that_does_not_know_the_event_is_not_initialised_again_for_it(
    watched: Watched, function: str
) -> None:
    watched.driver.do(f"answer -1 {function} {INVALID_ARGUMENT}")
    for _ in range(10):
        watched.poll()
    assert not watched.failures
    assert watched.driver.calls("nvmlInitWithFlags") == 1


def test_an_xid_that_cannot_be_handed_on_does_not_end_the_listening(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watched.poll()
    moments = iter([5.0])
    monkeypatch.setattr(watched.watch, "_clock", lambda: next(moments))
    watched.driver.do("xid 0 13 -1 -1", "xid 0 31 -1 -1")
    assert watched.next_xid().xid == 13
    eventually(lambda: "Xid 31" in caplog.text, within_s=ARRIVES_WITHIN_S, what="the error")
    monkeypatch.setattr(watched.watch, "_clock", lambda: 6.0)
    watched.driver.do("xid 0 45 -1 -1")
    assert watched.next_xid().xid == 45


def test_a_sink_that_fails_does_not_end_the_listening(
    driver: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    told: queue.SimpleQueue[int] = queue.SimpleQueue()

    def fail_for_the_first(seen: XidSeen) -> None:
        if seen.xid == 13:
            raise OSError("disk full")
        told.put(seen.xid)

    sinks = NvmlSinks(lambda _: None, fail_for_the_first, lambda _: None)
    watch = NvmlWatch(sinks=sinks, event_wait_ms=20)
    watch.poll(1000.0)
    driver.do("xid 0 13 -1 -1", "xid 0 31 -1 -1")
    assert told.get(timeout=ARRIVES_WITHIN_S) == 31
    watch.close()
    assert "disk full" in caplog.text
