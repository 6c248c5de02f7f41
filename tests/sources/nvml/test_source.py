import logging
import threading

import pytest

from agent.catalog import gpu_facts as f
from agent.catalog.gpu_facts import GPU_FACTS
from agent.catalog.gpu_problems import COUNTED_XIDS
from tests.real_parts.waiting import eventually
from tests.sources.nvml.fake_driver import ARRIVES_WITHIN_S, MIB, ScriptedNvml, gpu_uuid


def test_a_sample_has_the_names_of_its_gpu_and_its_time(nvml: ScriptedNvml) -> None:
    nvml.poll()
    sample = nvml.of(0)
    assert (sample.gpu, sample.index, sample.name) == (gpu_uuid(0), 0, "NVIDIA H200")
    assert sample.at == nvml.now
    assert sample.problem is None
    assert sample.fact("gpu_up") == 1
    assert not nvml.failures


def test_every_fact_of_the_catalogue_can_be_read(nvml: ScriptedNvml) -> None:
    nvml.driver.do("field 0 29 1", "field 0 30 2", "field 0 31 1")
    nvml.poll()
    nvml.poll()
    nvml.driver.do("xid 0 31 -1 -1")
    nvml.next_xid()
    nvml.poll()
    labels = {fact.name: len(fact.labels) for fact in GPU_FACTS}
    assert {name: len(values) for name, values in nvml.of(0).facts} == labels


def test_eight_gpus_have_samples_by_uuid(nvml: ScriptedNvml) -> None:
    nvml.driver.do("gpus 8")
    nvml.poll(*(f"set {index} memory_used {(index + 1) * MIB}" for index in range(8)))
    assert [sample.gpu for sample in nvml.samples] == [gpu_uuid(index) for index in range(8)]
    for index in range(8):
        assert nvml.fact("gpu_memory_used_bytes", index=index) == (index + 1) * MIB


def test_one_batched_field_call_per_gpu_and_poll(nvml: ScriptedNvml) -> None:
    nvml.driver.do("gpus 8")
    for _ in range(3):
        nvml.poll()
    assert nvml.driver.calls("nvmlDeviceGetFieldValues") == 3 * 8


def test_the_call_that_blocks_to_measure_pcie_is_never_made(nvml: ScriptedNvml) -> None:
    nvml.poll()
    nvml.poll()
    assert nvml.driver.calls("nvmlDeviceGetPcieThroughput") == 0


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


def test_only_the_first_read_waits_for_a_driver_that_does_not_answer(
    impatient: ScriptedNvml,
) -> None:
    _poll_until_read(impatient)
    impatient.poll("hold nvmlDeviceGetUtilizationRates")
    impatient.source._timeout_s = 1e6
    impatient.poll()
    assert impatient.failures == ["not_answering"]
    impatient.source._timeout_s = impatient.timeout_s


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


def test_xids_that_alerts_are_about_are_counted_from_zero(nvml: ScriptedNvml) -> None:
    nvml.poll()
    for number in COUNTED_XIDS:
        assert nvml.fact(f.XID_ERRORS.name, str(number)) == 0
    assert nvml.fact(f.XID_ERRORS.name, "94") is None
