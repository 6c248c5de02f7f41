import logging
from collections.abc import Iterator

import pytest

from agent.catalog import gpu_facts as f
from agent.catalog.dcgm_fields import DcgmField
from agent.records.gpu import GpuSample
from agent.sources.dcgm.readings import MOST_GPUS, GpuReading
from agent.sources.dcgm.watch import DcgmSinks, DcgmWatch
from agent.sources.engines.fetch import MAX_BODY_BYTES
from tests.sources.dcgm.exporter_pages import MIB, body, page_of, row, uuid_of
from tests.sources.dcgm.watched import PLENTY_S, Watched
from tests.sources.engines.wire import EngineServer

TEMPERATURE = ("gpu_temperature_celsius", "gpu")


def temperature(index: int = 0, value: object = 30) -> str:
    return row("DCGM_FI_DEV_GPU_TEMP", value, index)


def xid_total(count: int, index: int = 0) -> str:
    return row("DCGM_EXP_XID_ERRORS_TOTAL", count, index, xid="79")


def test_a_poll_gives_a_sample_of_each_gpu(watched: Watched) -> None:
    watched.poll(page=body("dcgm-4.5-default"))
    assert [sample.gpu for sample in watched.samples] == [uuid_of(0), uuid_of(1)]
    sample = watched.of(0)
    assert (sample.index, sample.name, sample.at) == (0, "NVIDIA H200", 1010.0)
    assert (sample.problem, sample.processes) == (None, None)
    assert watched.fact("gpu_up") == 1
    assert watched.fact("gpu_memory_used_bytes") == 131157 * MIB
    assert watched.fact("gpu_xid_errors", "79") == 0
    assert (watched.xids, watched.failures) == ([], [])


def test_values_move_with_the_page(watched: Watched) -> None:
    for value in (30, 40):
        watched.poll(temperature(value=value))
        assert watched.fact(*TEMPERATURE) == value


def test_mig_instances_are_in_the_sample(watched: Watched) -> None:
    watched.poll(page=body("mig"))
    assert [instance.gpu_instance for instance in watched.of().mig_instances] == [1, 9]


def test_an_operators_field_is_read_before_those_built_in(exporter: EngineServer) -> None:
    mine = DcgmField(series="MY_CLOCK", fact="gpu_clock_hertz", labels=("sm",), scale=1e6)
    watched = Watched(exporter, extra_fields=(mine,))
    watched.poll(row("DCGM_FI_DEV_SM_CLOCK", 345), row("MY_CLOCK", 1980))
    watched.watch.close()
    assert watched.fact("gpu_clock_hertz", "sm") == 1.98e9


@pytest.mark.parametrize(
    ("path", "asked"),
    [("", "/metrics"), ("/", "/metrics"), ("/metrics", "/metrics"), ("/gpus/page", "/gpus/page")],
)
def test_the_path_may_be_left_out(exporter: EngineServer, path: str, asked: str) -> None:
    samples: list[GpuSample] = []
    exporter.answers(asked, page_of(temperature()))
    sinks = DcgmSinks(samples.append, print, print)
    watch = DcgmWatch(url=exporter.url + path, sinks=sinks, timeout_s=PLENTY_S)
    watch.poll(1.0)
    watch.close()
    assert len(samples) == 1


# GPUs that go


def test_a_gpu_that_leaves_the_page_is_told_while_the_others_are_read(watched: Watched) -> None:
    watched.poll(temperature(0), temperature(1))
    for _ in range(2):
        watched.poll(temperature(1))
        gone = watched.of(0)
        assert (gone.problem, gone.at, gone.name) == ("gpu_missing", watched.now, "NVIDIA H200")
        assert gone.facts == {("gpu_up", ()): 0}
        assert watched.fact("gpu_up", index=1) == 1
        assert watched.failures == ["gpu_missing"]
    watched.poll(temperature(0), temperature(1))
    assert (watched.of(0).problem, watched.fact("gpu_up")) == (None, 1)
    assert watched.failures == []


def test_a_gpu_whose_values_are_all_blank_is_lost(watched: Watched) -> None:
    watched.poll(page=body("mig"))
    watched.poll(temperature(value=9223372036854775794))
    assert (watched.of(0).problem, watched.failures) == ("gpu_silent", ["gpu_silent"])
    assert watched.of(0).mig_instances == ()


def test_a_lost_gpu_keeps_its_counts_of_xids_and_tells_the_one_that_took_it(
    watched: Watched,
) -> None:
    watched.poll(temperature(), row("DCGM_FI_DEV_XID_ERRORS", 0))
    watched.poll(temperature(value=9223372036854775794), row("DCGM_FI_DEV_XID_ERRORS", 79))
    assert [(seen.gpu, seen.xid, seen.at) for seen in watched.xids] == [(uuid_of(0), 79, 1020.0)]
    assert watched.of().problem == "gpu_silent"
    assert watched.fact("gpu_xid_errors", "79") == 1
    watched.poll(temperature(1))
    assert watched.fact("gpu_xid_errors", "79") == 1
    assert watched.fact(f.XID_LAST_SEEN.name, "79") == 1020.0


def test_a_gpu_that_was_never_read_is_no_sample(watched: Watched) -> None:
    watched.poll(temperature(0), temperature(1, 9223372036854775794))
    assert [sample.gpu for sample in watched.samples] == [uuid_of(0)]
    assert watched.failures == ["gpu_silent"]


# Exporters that go


def test_an_exporter_that_goes_takes_every_gpu_with_it(watched: Watched) -> None:
    watched.poll(temperature(0), temperature(1))
    watched.exporter.stop()
    watched.poll()
    assert [sample.problem for sample in watched.samples] == ["exporter_connection"] * 2
    assert [sample.facts for sample in watched.samples] == [{("gpu_up", ()): 0}] * 2
    assert watched.failures == ["exporter_connection"]


def test_an_exporter_that_was_never_there_is_counted(watched: Watched) -> None:
    watched.exporter.stop()
    watched.poll()
    assert (watched.samples, watched.failures) == ([], ["exporter_connection"])


def test_an_exporter_that_comes_back_is_read_again(watched: Watched) -> None:
    watched.poll(temperature())
    watched.poll(temperature(), status=503)
    assert (watched.of().problem, watched.failures) == (
        "exporter_http_status",
        ["exporter_http_status"],
    )
    watched.poll(temperature(value=31))
    assert (watched.of().problem, watched.fact(*TEMPERATURE)) == (None, 31)


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        (b"", "exporter_empty"),
        (b"<html></html>\n", "exporter_html"),
        (b"{}\n", "exporter_json"),
        (b"\xff\n", "exporter_not_text"),
        (page_of(temperature())[:-5], "exporter_cut_off"),
        (b"go_goroutines 9\n", "exporter_no_known_series"),
    ],
)
def test_what_is_no_page_of_an_exporter_is_counted_by_reason(
    watched: Watched, page: bytes, reason: str
) -> None:
    watched.poll(temperature())
    watched.poll(page=page)
    assert (watched.of().problem, watched.failures) == (reason, [reason])
    watched.poll(temperature())
    assert watched.of().problem is None


def test_a_page_as_large_as_may_be_is_read(watched: Watched) -> None:
    last = page_of(temperature())
    filler = b'container_cpu_usage{pod="p"} 1\n'
    room = (MAX_BODY_BYTES - len(last)) // len(filler)
    watched.poll(page=filler * room + last)
    assert watched.fact(*TEMPERATURE) == 30


def test_a_page_that_is_too_large_is_refused(watched: Watched) -> None:
    watched.poll(page=b"#" * MAX_BODY_BYTES + b"\n" + page_of(temperature()))
    assert (watched.samples, watched.failures) == ([], ["exporter_too_large"])


def test_an_exporter_that_does_not_answer_holds_up_no_poll(
    exporter: EngineServer, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(exporter, timeout_s=0.3)
    exporter.drips("/metrics", b"")
    watched.poll()
    watched.watch.close()
    assert watched.failures == ["exporter_timeout"]
    assert "did not answer within 0.3 s" in caplog.text


def test_a_page_of_rows_about_no_gpu_is_a_failure(watched: Watched) -> None:
    watched.poll(temperature())
    watched.poll(row("DCGM_FI_DEV_GPU_TEMP", 30, UUID=""))
    assert watched.of().problem == "gpu_missing"
    assert watched.failures == ["gpu_missing", "no_gpu", "uuid_missing"]


def energy(joules: int, index: int = 0) -> str:
    return row("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", 1000 * joules, index)


def test_an_exporter_that_tells_the_same_for_minutes_tells_nothing(watched: Watched) -> None:
    """The energy counter of a GPU that works moves, also while the GPU is idle."""
    for minute in range(20):
        for _ in range(6):
            watched.poll(energy(7, 0), temperature(0), energy(minute, 1), temperature(1))
        assert watched.of(0).problem == (None if minute < 10 else "exporter_stale")
        assert watched.of(1).problem is None
    assert watched.failures == ["exporter_stale"]
    watched.poll(energy(8, 0), temperature(0), energy(19, 1))
    assert (watched.of(0).problem, watched.failures) == (None, [])


def test_a_gpu_without_an_energy_counter_may_stand_still(watched: Watched) -> None:
    for _ in range(200):
        watched.poll(temperature(0), energy(0, 1), temperature(1))
    assert [sample.problem for sample in watched.samples] == [None, None]


def test_what_was_dropped_is_counted_once_a_poll_beside_the_sample(watched: Watched) -> None:
    watched.poll(temperature(), *(row("DCGM_FI_DEV_POWER_USAGE", "NaN", n) for n in range(3)))
    assert watched.failures == ["value_not_finite"]
    assert watched.fact(*TEMPERATURE) == 30


def test_a_page_of_too_many_gpus_does_not_push_out_those_that_are_read(watched: Watched) -> None:
    watched.poll(temperature(MOST_GPUS))
    watched.poll(*(temperature(index) for index in range(MOST_GPUS + 1)))
    assert watched.of(MOST_GPUS).problem is None
    assert watched.failures == ["too_many_gpus"]


# Xids


def test_an_old_xid_on_the_first_page_is_no_event(watched: Watched) -> None:
    watched.poll(page=body("dcgm-4.5-default"))
    watched.poll()
    assert watched.xids == []
    assert watched.fact("gpu_xid_errors", "31", index=1) == 0


def test_an_xid_that_changes_is_told_once(watched: Watched) -> None:
    watched.poll(temperature(), row("DCGM_FI_DEV_XID_ERRORS", 0))
    watched.poll(temperature(), row("DCGM_FI_DEV_XID_ERRORS", 79))
    (seen,) = watched.xids
    assert (seen.gpu, seen.xid, seen.at, seen.count) == (uuid_of(0), 79, 1020.0, 1)
    assert (seen.gpu_instance, seen.compute_instance) == (None, None)
    assert watched.fact("gpu_xid_errors", "79") == 1
    watched.poll()
    assert watched.xids == []
    assert watched.fact("gpu_xid_errors", "79") == 1


def test_a_count_by_xid_tells_how_many(watched: Watched) -> None:
    watched.poll(temperature(), row("DCGM_EXP_XID_ERRORS_COUNT", 0))
    watched.poll(temperature(), row("DCGM_EXP_XID_ERRORS_COUNT", 4, xid="31"))
    assert [(seen.xid, seen.count) for seen in watched.xids] == [(31, 4)]


def test_an_exporter_that_starts_anew_makes_no_xids_new(watched: Watched) -> None:
    last = row("DCGM_FI_DEV_XID_ERRORS", 79)
    watched.poll(temperature(), last, xid_total(3))
    watched.poll(page=b"", status=503)
    watched.poll(temperature(), last)
    assert watched.xids == []
    watched.poll(temperature(), last, xid_total(1))
    assert [seen.count for seen in watched.xids] == [1]


# The watch itself


def test_a_sink_that_fails_costs_nothing_else(
    exporter: EngineServer, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []

    def fail_for_the_first(sample: GpuSample) -> None:
        if sample.index == 0:
            raise OSError("disk full")
        told.append(sample.gpu)

    exporter.answers("/metrics", page_of(temperature(0), temperature(1)))
    sinks = DcgmSinks(fail_for_the_first, print, told.append)
    watch = DcgmWatch(url=exporter.url, sinks=sinks, timeout_s=PLENTY_S)
    watch.poll(1.0)
    watch.close()
    assert told == [uuid_of(1)]
    assert "disk full" in caplog.text


def test_an_error_inside_the_agent_is_counted_and_does_not_leave_the_poll(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> Iterator[None]:
        raise ZeroDivisionError

    watched.poll(temperature())
    with monkeypatch.context() as patched:
        patched.setattr("agent.sources.dcgm.watch.read_gpus", broken)
        watched.poll(temperature())
    assert watched.failures == ["internal"]
    assert any(record.exc_info for record in caplog.records)
    # What it told before is not shown as if it were told now.
    assert (watched.of().problem, watched.fact("gpu_up")) == ("internal", 0)
    watched.poll(temperature())
    assert watched.fact("gpu_up") == 1


def test_an_error_at_one_gpu_leaves_those_that_were_told(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched.poll(temperature(0), temperature(1))
    told = watched.watch._tell_xids

    def broken(gpu: GpuReading, now: float) -> None:
        if gpu.index == 1:
            raise ZeroDivisionError
        told(gpu, now)

    monkeypatch.setattr(watched.watch, "_tell_xids", broken)
    watched.poll(temperature(0), temperature(1))
    assert [(sample.index, sample.problem) for sample in watched.samples] == [
        (0, None),
        (1, "internal"),
    ]


def test_a_state_that_lasts_is_logged_once(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for page in (b"", b"", page_of(temperature()), b"<html>\n", b"<html>\n"):
        watched.poll(page=page)
    watched.poll(temperature())
    watched.poll(temperature())
    levels = [record.levelname for record in caplog.records if record.name.startswith("agent")]
    assert levels == ["WARNING", "INFO", "WARNING", "WARNING", "INFO", "INFO"]


def test_after_close_nothing_is_asked_or_told(watched: Watched) -> None:
    watched.poll(temperature())
    watched.watch.close()
    watched.watch.close()
    watched.poll()
    assert (watched.samples, watched.failures) == ([], [])
    assert watched.exporter.asked == ["/metrics"]
