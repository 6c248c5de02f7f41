"""Samples of GPUs from NVIDIA's exporter."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from agent.catalog import gpu_facts as f
from agent.catalog.dcgm_fields import DcgmField
from agent.sources.dcgm.exporter_gpus import MOST_GPUS, XidCounts
from agent.sources.dcgm.source import DcgmSource
from tests.sources.dcgm.exporter_pages import (
    MIB,
    PLENTY_S,
    ScriptedExporter,
    body,
    page_of,
    row,
    uuid_of,
)
from tests.sources.engines.wire import EngineServer

TEMPERATURE = ("gpu_temperature_celsius", "gpu")


def temperature(index: int = 0, value: object = 30) -> str:
    return row("DCGM_FI_DEV_GPU_TEMP", value, index)


def test_a_poll_gives_a_sample_of_each_gpu(dcgm: ScriptedExporter) -> None:
    dcgm.poll(page=body("dcgm-4.5-default"))
    assert [sample.gpu for sample in dcgm.samples] == [uuid_of(0), uuid_of(1)]
    sample = dcgm.of(0)
    assert (sample.index, sample.name, sample.at) == (0, "NVIDIA H200", 1010.0)
    assert (sample.problem, sample.processes) == (None, None)
    assert dcgm.fact("gpu_up") == 1
    assert dcgm.fact("gpu_memory_used_bytes") == 131157 * MIB
    assert dcgm.fact("gpu_xid_errors", "79") == 0
    assert (dcgm.xids, dcgm.failures) == ([], [])


def test_a_sample_has_the_pods_of_its_gpu_and_none_while_it_cannot_be_read(
    dcgm: ScriptedExporter,
) -> None:
    dcgm.poll(row("DCGM_FI_DEV_GPU_TEMP", 30, namespace="llm", pod="chat-0"), temperature(1))
    assert dcgm.of(0).pods == frozenset({"llm/chat-0"})
    assert dcgm.of(1).pods == frozenset()
    dcgm.poll(temperature(1))
    assert (dcgm.of(0).problem, dcgm.of(0).pods) == ("gpu_missing", None)


def test_of_a_node_only_the_gpus_of_the_pod_are_read(exporter: EngineServer) -> None:
    xid = "DCGM_FI_DEV_XID_ERRORS"
    dcgm = ScriptedExporter(exporter, pod="llm/chat-0")
    dcgm.poll(temperature(1))
    assert (dcgm.samples, dcgm.failures) == ([], ["no_gpu"])
    assert dcgm.last.problem == "the GPU exporter lists no GPU of the pod llm/chat-0"
    ours = row("DCGM_FI_DEV_GPU_TEMP", 30, 0, namespace="llm", pod="chat-0")
    theirs = row("DCGM_FI_DEV_GPU_TEMP", 30, 1, namespace="llm", pod="code-0")
    dcgm.poll(ours, theirs)
    assert [sample.gpu for sample in dcgm.samples] == [uuid_of(0)]
    # An error of another's GPU is not ours; of ours it is, also as the pod ends.
    dcgm.poll(temperature(0), row(xid, 79, 0), theirs, row(xid, 79, 1))
    assert [(error.gpu, error.xid) for error in dcgm.xids] == [(uuid_of(0), 79)]
    assert [sample.gpu for sample in dcgm.samples] == [uuid_of(0)]
    dcgm.source.close()


def test_an_operators_field_is_read_before_those_built_in(exporter: EngineServer) -> None:
    mine = DcgmField(series="MY_CLOCK", fact="gpu_clock_hertz", labels=("sm",), scale=1e6)
    dcgm = ScriptedExporter(exporter, extra_fields=(mine,))
    dcgm.poll(row("DCGM_FI_DEV_SM_CLOCK", 345), row("MY_CLOCK", 1980))
    dcgm.source.close()
    assert dcgm.fact("gpu_clock_hertz", "sm") == 1.98e9


@pytest.mark.parametrize(
    ("path", "asked"),
    [("", "/metrics"), ("/", "/metrics"), ("/metrics", "/metrics"), ("/gpus/page", "/gpus/page")],
)
def test_the_path_may_be_left_out(exporter: EngineServer, path: str, asked: str) -> None:
    exporter.answers(asked, page_of(temperature()))
    source = DcgmSource(url=exporter.url + path, timeout_s=PLENTY_S)
    read = source.read(1.0)
    source.close()
    assert len(read.samples) == 1


# GPUs that go


def test_a_gpu_that_disappears_is_missing_while_the_others_are_read(dcgm: ScriptedExporter) -> None:
    dcgm.poll(temperature(0), temperature(1))
    for _ in range(2):
        dcgm.poll(temperature(1))
        gone = dcgm.of(0)
        assert (gone.problem, gone.at, gone.name) == ("gpu_missing", dcgm.now, "NVIDIA H200")
        assert gone.facts == {("gpu_up", ()): 0}
        assert dcgm.fact("gpu_up", index=1) == 1
        assert dcgm.failures == ["gpu_missing"]
    dcgm.poll(temperature(0), temperature(1))
    assert (dcgm.of(0).problem, dcgm.fact("gpu_up")) == (None, 1)
    assert dcgm.failures == []


def test_a_gpu_whose_values_are_all_blank_is_lost(dcgm: ScriptedExporter) -> None:
    dcgm.poll(page=body("mig"))
    assert [instance.gpu_instance for instance in dcgm.of().mig_instances] == [1, 9]
    dcgm.poll(temperature(value=9223372036854775794))
    assert (dcgm.of(0).problem, dcgm.failures) == ("gpu_silent", ["gpu_silent"])
    assert dcgm.of(0).mig_instances == ()
    # One that was never read is no sample.
    dcgm.poll(temperature(0), temperature(1, 9223372036854775794))
    assert [sample.gpu for sample in dcgm.samples] == [uuid_of(0)]
    assert dcgm.failures == ["gpu_silent"]


def test_a_lost_gpu_keeps_its_counts_of_xids_and_reports_the_last(dcgm: ScriptedExporter) -> None:
    dcgm.poll(temperature(), row("DCGM_FI_DEV_XID_ERRORS", 0))
    dcgm.poll(temperature(value=9223372036854775794), row("DCGM_FI_DEV_XID_ERRORS", 79))
    (seen,) = dcgm.xids
    assert (seen.gpu, seen.xid, seen.at, seen.count) == (uuid_of(0), 79, 1020.0, 1)
    assert (seen.gpu_instance, seen.compute_instance) == (None, None)
    assert dcgm.of().problem == "gpu_silent"
    assert dcgm.fact("gpu_xid_errors", "79") == 1
    dcgm.poll(temperature(1))
    assert dcgm.xids == []
    assert dcgm.fact("gpu_xid_errors", "79") == 1
    assert dcgm.fact(f.XID_LAST_SEEN.name, "79") == 1020.0
    # An exporter that restarts makes none new.
    dcgm.poll(page=b"", status=503)
    dcgm.poll(temperature(), row("DCGM_FI_DEV_XID_ERRORS", 79))
    assert dcgm.xids == []


# Exporters that go


def test_an_exporter_that_goes_takes_every_gpu_with_it(dcgm: ScriptedExporter) -> None:
    dcgm.poll(temperature(0), temperature(1))
    dcgm.exporter.stop()
    dcgm.poll()
    assert [sample.problem for sample in dcgm.samples] == ["exporter_connection"] * 2
    assert [sample.facts for sample in dcgm.samples] == [{("gpu_up", ()): 0}] * 2
    assert dcgm.failures == ["exporter_connection"]


@pytest.mark.parametrize(
    ("page", "status", "reason"),
    [
        (page_of(temperature()), 503, "exporter_http_status"),
        (b"<html></html>\n", 200, "exporter_html"),
        (b"go_goroutines 9\n", 200, "exporter_no_known_series"),
    ],
)
def test_a_failure_of_the_exporter_is_named_until_it_is_read_again(
    dcgm: ScriptedExporter, page: bytes, status: int, reason: str
) -> None:
    dcgm.poll(temperature())
    dcgm.poll(page=page, status=status)
    assert (dcgm.of().problem, dcgm.failures) == (reason, [reason])
    # What was dropped is counted once a poll.
    unread = (row("DCGM_FI_DEV_POWER_USAGE", "NaN", number) for number in range(3))
    dcgm.poll(temperature(value=31), *unread)
    assert (dcgm.of().problem, dcgm.fact(*TEMPERATURE)) == (None, 31)
    assert dcgm.failures == ["value_not_finite"]


def test_a_page_of_rows_about_no_gpu_is_a_failure(dcgm: ScriptedExporter) -> None:
    dcgm.poll(temperature())
    dcgm.poll(row("DCGM_FI_DEV_GPU_TEMP", 30, UUID=""))
    assert dcgm.of().problem == "gpu_missing"
    assert dcgm.failures == ["gpu_missing", "no_gpu", "uuid_missing"]


def energy(joules: int, index: int = 0) -> str:
    return row("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", 1000 * joules, index)


def test_an_exporter_that_repeats_its_values_for_minutes_is_stale(dcgm: ScriptedExporter) -> None:
    """The energy counter of a GPU that works moves, also while the GPU is idle."""
    for minute in range(12):
        for _ in range(6):
            # The third has no such counter.
            moving = (energy(minute, 1), temperature(1), temperature(2))
            dcgm.poll(energy(7, 0), temperature(0), *moving)
        assert dcgm.of(0).problem == (None if minute < 10 else "exporter_stale")
        assert dcgm.of(1).problem is dcgm.of(2).problem is None
    assert dcgm.failures == ["exporter_stale"]
    dcgm.poll(energy(8, 0), temperature(0), energy(11, 1), temperature(2))
    assert (dcgm.of(0).problem, dcgm.failures) == (None, [])


def test_a_page_of_too_many_gpus_does_not_push_out_those_that_are_read(
    dcgm: ScriptedExporter,
) -> None:
    dcgm.poll(temperature(MOST_GPUS))
    dcgm.poll(*(temperature(index) for index in range(MOST_GPUS + 1)))
    assert dcgm.of(MOST_GPUS).problem is None
    assert dcgm.failures == ["too_many_gpus"]


# Xids


# The source itself


def test_an_error_inside_the_agent_is_counted_and_does_not_leave_the_poll(
    dcgm: ScriptedExporter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> Iterator[None]:
        raise ZeroDivisionError

    dcgm.poll(temperature())
    with monkeypatch.context() as patched:
        patched.setattr("agent.sources.dcgm.source.read_gpus", broken)
        dcgm.poll(temperature())
    assert dcgm.failures == ["internal"]
    assert any(record.exc_info for record in caplog.records)
    # The values of before are not returned as if they were new.
    assert (dcgm.of().problem, dcgm.fact("gpu_up")) == ("internal", 0)
    dcgm.poll(temperature())
    assert dcgm.fact("gpu_up") == 1


def test_an_error_at_one_gpu_leaves_the_samples_before_it(
    dcgm: ScriptedExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    dcgm.poll(temperature(0), temperature(1))
    read = XidCounts.read

    def broken(counts: XidCounts, gpu: str, *arguments: Any) -> Any:
        if gpu == uuid_of(1):
            raise ZeroDivisionError
        return read(counts, gpu, *arguments)

    monkeypatch.setattr(XidCounts, "read", broken)
    dcgm.poll(temperature(0), temperature(1))
    assert [(sample.index, sample.problem) for sample in dcgm.samples] == [
        (0, None),
        (1, "internal"),
    ]


def test_a_state_that_lasts_is_logged_once(
    dcgm: ScriptedExporter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for page in (b"", b"", page_of(temperature()), b"<html>\n", b"<html>\n"):
        dcgm.poll(page=page)
    dcgm.poll(temperature())
    dcgm.poll(temperature())
    levels = [record.levelname for record in caplog.records if record.name.startswith("agent")]
    assert levels == ["WARNING", "INFO", "WARNING", "WARNING", "INFO", "INFO"]


def test_after_close_nothing_is_scraped_or_returned(dcgm: ScriptedExporter) -> None:
    dcgm.poll(temperature())
    dcgm.source.close()
    dcgm.source.close()
    dcgm.poll()
    assert (dcgm.samples, dcgm.failures) == ([], [])
    assert dcgm.exporter.asked == ["/metrics"]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            ("FB_USED", "FB_FREE"),
            "exports no total and no reserved memory: the total is used + free",
        ),
        (("FB_USED", "FB_FREE", "FB_RESERVED"), "no total memory: it is used + free + reserved"),
        (("FB_USED_BYTES", "FB_FREE_BYTES"), "exports no total and no reserved memory"),
        (("FB_USED", "FB_FREE", "FB_TOTAL"), None),
        (("FB_FREE",), None),
    ],
)
def test_how_the_total_memory_is_known_is_logged_once(
    dcgm: ScriptedExporter,
    caplog: pytest.LogCaptureFixture,
    rows: tuple[str, ...],
    said: str | None,
) -> None:
    caplog.set_level(logging.INFO, "agent.sources.dcgm")
    for _ in range(3):
        dcgm.poll(*(row(f"DCGM_FI_DEV_{series}", 100) for series in rows))
    assert len(caplog.messages) == (said is not None)
    assert all(said in line for line in caplog.messages if said)
