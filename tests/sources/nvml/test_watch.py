import logging
import threading

import pytest

from agent.catalog import gpu_facts as f
from agent.catalog.gpu_facts import GPU_FACTS
from agent.catalog.xids import COUNTED_XIDS
from agent.records.gpu import GpuSample
from agent.sources.nvml.watch import NvmlSinks, NvmlWatch
from tests.real_parts.waiting import eventually
from tests.sources.nvml.fake_driver import MIB, FakeDriver, gpu_uuid
from tests.sources.nvml.watched import ARRIVES_WITHIN_S, Watched


def test_a_poll_tells_who_a_gpu_is_and_when_it_was_read(watched: Watched) -> None:
    watched.poll()
    sample = watched.of(0)
    assert (sample.gpu, sample.index, sample.name) == (gpu_uuid(0), 0, "NVIDIA H200")
    assert sample.at == watched.now
    assert sample.problem is None
    assert sample.fact("gpu_up") == 1
    assert not watched.failures


def test_every_fact_of_the_catalogue_can_be_read(watched: Watched) -> None:
    watched.driver.do("field 0 29 1", "field 0 30 2", "field 0 31 1")
    watched.poll()
    watched.poll()
    watched.driver.do("xid 0 31 -1 -1")
    watched.next_xid()
    watched.poll()
    assert {name for name, _ in watched.of(0).facts} == {fact.name for fact in GPU_FACTS}


def test_labels_of_facts_are_as_many_as_the_catalogue_says(watched: Watched) -> None:
    watched.poll()
    watched.poll()
    declared = {fact.name: len(fact.labels) for fact in GPU_FACTS}
    for name, labels in watched.of(0).facts:
        assert len(labels) == declared[name], name


def test_eight_gpus_are_told_apart_by_uuid(watched: Watched) -> None:
    watched.driver.do("gpus 8")
    watched.poll(*(f"set {index} memory_used {(index + 1) * MIB}" for index in range(8)))
    assert [sample.gpu for sample in watched.samples] == [gpu_uuid(index) for index in range(8)]
    for index in range(8):
        assert watched.fact("gpu_memory_used_bytes", index=index) == (index + 1) * MIB


def test_values_move_with_the_gpu(watched: Watched) -> None:
    watched.poll()
    assert watched.fact("gpu_memory_used_bytes") == 0
    watched.poll(f"set 0 memory_used {100 * MIB}", "set 0 utilization 73", "field 0 83 6000000000")
    assert watched.fact("gpu_memory_used_bytes") == 100 * MIB
    assert watched.fact("gpu_memory_free_bytes") == (143771 - 614 - 100) * MIB
    assert watched.fact("gpu_utilization_ratio") == 0.73
    assert watched.fact("gpu_energy_joules") == 6e6


def test_one_batched_field_call_per_gpu_and_poll(watched: Watched) -> None:
    watched.driver.do("gpus 8")
    for _ in range(3):
        watched.poll()
    assert watched.driver.calls("nvmlDeviceGetFieldValues") == 3 * 8


def test_the_call_that_blocks_to_measure_pcie_is_never_made(watched: Watched) -> None:
    watched.poll()
    watched.poll()
    assert watched.driver.calls("nvmlDeviceGetPcieThroughput") == 0


def test_no_visible_gpu_is_a_failure_and_no_sample(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            watched.poll("gpus 0")
            assert watched.failures == ["no_gpu"]
            assert not watched.samples
    (line,) = caplog.messages
    assert "no GPU is visible" in line


def test_a_sink_that_fails_costs_nothing_else(
    driver: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    driver.do("gpus 2")
    told: list[str] = []

    def fail_for_the_first(sample: GpuSample) -> None:
        if sample.index == 0:
            raise OSError("disk full")
        told.append(sample.gpu)

    watch = NvmlWatch(sinks=NvmlSinks(fail_for_the_first, print, told.append), event_wait_ms=20)
    watch.poll(1000.0)
    watch.close()
    assert told == [gpu_uuid(1)]
    assert "disk full" in caplog.text


def test_an_error_inside_the_agent_is_counted_and_does_not_leave_the_poll(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched.poll()
    with monkeypatch.context() as broken:
        broken.setattr("pynvml.nvmlDeviceGetUtilizationRates", lambda _: object())
        watched.poll()
    assert watched.failures == ["internal"]
    watched.poll()
    assert watched.fact("gpu_up") == 1


def _poll_until_read(watched: Watched) -> None:
    def read() -> bool:
        watched.poll(after_s=0)
        return any(sample.problem is None for sample in watched.samples)

    eventually(read, within_s=ARRIVES_WITHIN_S, what="NVML answers")


def test_a_driver_that_does_not_answer_holds_up_no_poll_and_is_told(impatient: Watched) -> None:
    watched = impatient
    _poll_until_read(watched)
    watched.poll("hold nvmlDeviceGetUtilizationRates")
    for _ in range(3):
        watched.poll()
        assert watched.failures == ["not_answering"]
        assert (watched.of(0).problem, watched.of(0).at) == ("not_answering", watched.now)
        assert watched.fact("gpu_up") == 0
        assert watched.fact("gpu_memory_used_bytes") is None
    asked_at = watched.now
    watched.poll("release", "set 0 utilization 50", after_s=100)
    _poll_until_read(watched)
    assert watched.of(0).at <= asked_at + 100


def test_an_xid_is_told_while_the_driver_does_not_answer_polls(impatient: Watched) -> None:
    watched = impatient
    _poll_until_read(watched)
    watched.poll("hold nvmlDeviceGetFieldValues")
    watched.driver.do("xid 0 79 -1 -1")
    assert watched.next_xid().xid == 79
    watched.poll()
    assert watched.fact("gpu_xid_errors", "79") == 1


def test_a_driver_that_does_not_answer_holds_up_no_close(
    impatient: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    _poll_until_read(impatient)
    impatient.poll("hold nvmlDeviceGetUtilizationRates")
    impatient.watch.close()
    assert "NVML does not answer and is left as it is" in caplog.text
    impatient.driver.do("release")
    eventually(
        lambda: impatient.driver.calls("nvmlShutdown"), within_s=ARRIVES_WITHIN_S, what="shutdown"
    )


def test_an_initialisation_that_hangs_is_told_too(impatient: Watched) -> None:
    impatient.poll("hold nvmlInitWithFlags")
    assert impatient.failures == ["not_answering"]
    impatient.driver.do("release")
    _poll_until_read(impatient)


def test_close_gives_everything_back_and_ends_the_threads(watched: Watched) -> None:
    watched.driver.do("gpus 2")
    watched.poll()
    watched.poll()
    watched.watch.close()
    assert watched.driver.calls("nvmlGpmSampleFree") == 4
    assert watched.driver.calls("nvmlEventSetFree") == 1
    assert watched.driver.calls("nvmlShutdown") == 1
    assert "nvml events" not in {thread.name for thread in threading.enumerate()}


def test_after_close_nothing_is_told_and_closing_again_is_harmless(watched: Watched) -> None:
    watched.poll()
    watched.watch.close()
    watched.watch.close()
    watched.poll()
    assert not watched.samples
    assert not watched.failures


def test_xids_that_alerts_are_about_are_counted_from_zero(watched: Watched) -> None:
    watched.poll()
    for number in COUNTED_XIDS:
        assert watched.fact(f.XID_ERRORS.name, str(number)) == 0
    assert watched.fact(f.XID_ERRORS.name, "94") is None
