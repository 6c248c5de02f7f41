"""Limits of detection from an engine's settings, and its last sample of an earlier run."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, update

from agent.app.engine_setup import VersionReader
from agent.app.engines import EngineMonitors, GpuJobs, limits_of
from agent.outputs.prometheus.agent_exposition import HostBoard
from agent.outputs.prometheus.meter import Meter
from agent.records.engine import EngineSample
from agent.records.gpu import GpuSamples
from agent.settings import EngineSettings, Settings
from agent.sources.engines.directory import EngineDirectory
from agent.store.minutes import MinuteStore
from agent.store.observations import ObservationStore
from agent.store.store_queries import StoreQueries
from agent.store.tables import engine_samples
from tests.analysis.failures.polled_engine import (
    ALL,
    CHATTER,
    FATAL_LINE,
    GPU,
    OOM_LINE,
    SILENCE,
    PolledEngine,
    host,
    kinds,
    logged,
)
from tests.real_parts.ports import free_port
from tests.sources.engines.fixture_pages import body
from tests.sources.engines.wire import EngineServer
from tests.store.making import NOON, gpu_sample
from tests.store.migrated import migrated_in

RARE_S = 60.0


def polled_every(interval_s: float) -> PolledEngine:
    configured = {
        "name": "chat",
        "url": "http://127.0.0.1:8000",
        "scrape_interval": f"{interval_s}s",
    }
    return PolledEngine(limits_of(EngineSettings.model_validate(configured)))


def test_the_cause_of_a_death_is_found_in_the_log_also_with_rare_polls() -> None:
    engine = polled_every(RARE_S)
    for log in (CHATTER, CHATTER, logged(OOM_LINE)):
        assert engine.works(host=host(ALL, log=log), after_s=RARE_S) == ()
    died = [
        event
        for log in (logged(FATAL_LINE), SILENCE)
        for event in engine.fails(host=host((), log=log), after_s=RARE_S)
    ]
    assert kinds(died) == ["CUDA_OOM", "UNREACHABLE"]


def test_a_lasting_failure_is_reported_once_also_with_rare_polls() -> None:
    engine = polled_every(RARE_S)
    lost = [
        event
        for _ in range(6)
        for event in engine.works(problems={GPU: "gpu_lost"}, after_s=RARE_S)
    ]
    assert kinds(lost) == ["GPU_FAULT"]


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Engine]:
    with migrated_in(tmp_path) as engine:
        yield engine


def read(database: Engine, ago_s: float) -> None:
    """Store a sample of the engine by an earlier run of the agent."""
    sample = EngineSample(
        engine="chat", at=time.time() - ago_s, dialect="vllm", model="m", facts={("x", ()): 1.0}
    )
    ObservationStore(database, "agent").write_engine_sample(sample)


def events_of_a_run(database: Engine, url: str = "") -> list[str]:
    """All events after another run of the agent; without a URL its engine is not running."""
    configured = {"name": "chat", "url": url or f"http://127.0.0.1:{free_port()}"}
    settings = Settings.model_validate({"engines": [configured], "nvml": {"enabled": False}})
    [engine] = settings.engines
    observations, meter = ObservationStore(database, "agent"), Meter((), ["chat"])
    windows, gpus = MinuteStore(database, "agent"), GpuJobs(settings, observations, meter)
    monitors = EngineMonitors(observations, windows, meter, gpus, HostBoard())
    monitor = monitors.of_engine(engine, EngineDirectory([("chat", engine.url)]))
    for _ in range(3):
        monitor.poll(time.time())
    monitor.close()
    return [event["kind"] for event in StoreQueries(database).events(None, 100).items]


@pytest.mark.parametrize("ago_s", [5.0, 300.0])
def test_an_engine_that_is_not_up_yet_has_not_failed(database: Engine, ago_s: float) -> None:
    """It may have been started with the agent, and may load for minutes."""
    read(database, ago_s)
    assert events_of_a_run(database) == []


@pytest.mark.parametrize("facts", ["{cut of", "[1]", '{"x": "y"}', '{"x": [1]}'])
@pytest.mark.parametrize(("ago_s", "logged"), [(300.0, True), (-3600.0, False)])
def test_a_damaged_last_sample_is_logged_if_it_is_not_from_the_future_and_the_agent_starts(
    database: Engine, facts: str, ago_s: float, logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    read(database, ago_s)
    with database.begin() as connection:
        connection.execute(update(engine_samples).values(facts=facts))
    assert events_of_a_run(database) == []
    assert ("its last sample cannot be parsed" in caplog.text) is logged


def test_a_restart_of_the_engine_while_the_agent_was_stopped_is_reported(
    database: Engine,
) -> None:
    page = body("vllm-0.32.0")
    with EngineServer() as engine:
        engine.answers("/metrics", page)
        assert events_of_a_run(database, engine.url) == []
        started = re.compile(rb"^process_start_time_seconds \S+", re.MULTILINE)
        engine.answers("/metrics", started.sub(b"process_start_time_seconds 1.9e9", page))
        assert events_of_a_run(database, engine.url) == ["RESTART"]


def test_a_version_that_could_not_be_read_is_read_at_the_next_look_and_then_kept() -> None:
    versions = VersionReader(None)
    with EngineServer() as server:
        engine = EngineSettings(name="chat-0", url=server.url)
        versions.read(engine, 1.0)
        assert versions.of("chat-0") is None
        server.answers("/version", b'{"version": "0.32.0"}')
        for _ in range(2):
            versions.read(engine, 1.0)
            assert versions.of("chat-0") == "0.32.0"
        assert len(server.asked) == 2


class _FixedGpus:
    """A source of GPUs that reads the same each time."""

    def __init__(self, read: GpuSamples) -> None:
        self.samples = read

    def read(self, _now: float) -> GpuSamples:
        return self.samples

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("read", "status"),
    [
        (GpuSamples((gpu_sample(NOON, "GPU-1"),)), "ok"),
        (GpuSamples(failures=("no_library",)), "no GPU is read: no_library"),
        (
            GpuSamples(
                (gpu_sample(NOON, "GPU-1"), gpu_sample(NOON, "GPU-2").unread(NOON, "gpu_lost"))
            ),
            "1 of 2 cannot be read: gpu_lost",
        ),
        (GpuSamples(problem="dcgm.url cannot be reached"), "dcgm.url cannot be reached"),
    ],
)
def test_readyz_has_the_status_of_the_gpus(database: Engine, read: GpuSamples, status: str) -> None:
    settings, meter = Settings.model_validate({"nvml": {"enabled": False}}), Meter((), [])
    observations = ObservationStore(database, "agent")
    assert GpuJobs(settings, observations, meter).status_text() == "not configured"
    gpus = GpuJobs(settings, observations, meter, _FixedGpus(read))
    gpus.poll(NOON)
    assert gpus.status_text() == status
