"""What an engine is judged by: its settings, and what the agent's last run saw of it."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, update

from agent.app.engines import EngineMonitors, limits_of
from agent.app.gpu_jobs import GpuJobs
from agent.outputs.prometheus.hosts import HostBoard
from agent.outputs.prometheus.meter import Meter
from agent.records.engine import EngineSample
from agent.settings import EngineSettings, Settings
from agent.sources.engines.directory import EngineDirectory
from agent.store.connection import open_engine
from agent.store.migrating import upgrade
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

RARE_S = 60.0


def looked_at_every(interval_s: float) -> PolledEngine:
    configured = {
        "name": "chat",
        "url": "http://127.0.0.1:8000",
        "scrape_interval": f"{interval_s}s",
    }
    return PolledEngine(limits_of(EngineSettings.model_validate(configured)))


def test_an_engine_that_is_polled_rarely_still_dies_of_what_its_log_said_before() -> None:
    engine = looked_at_every(RARE_S)
    for log in (CHATTER, CHATTER, logged(OOM_LINE)):
        assert engine.works(host=host(ALL, log=log), after_s=RARE_S) == ()
    died = [
        event
        for log in (logged(FATAL_LINE), SILENCE)
        for event in engine.fails(host=host((), log=log), after_s=RARE_S)
    ]
    assert kinds(died) == ["CUDA_OOM", "UNREACHABLE"]


def test_what_lasts_is_reported_once_however_rare_the_polls() -> None:
    engine = looked_at_every(RARE_S)
    lost = [
        event
        for _ in range(6)
        for event in engine.works(problems={GPU: "gpu_lost"}, after_s=RARE_S)
    ]
    assert kinds(lost) == ["GPU_FAULT"]


def test_the_usual_interval_leaves_the_usual_limits() -> None:
    limits = limits_of(EngineSettings(name="chat", url="http://127.0.0.1:8000"))
    assert (limits.clue_s, limits.quiet_s) == (30.0, 60.0)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Engine]:
    engine = open_engine(f"sqlite:///{tmp_path / 'goodput.db'}")
    upgrade(engine)
    yield engine
    engine.dispose()


def read(database: Engine, ago_s: float) -> None:
    """The engine's page was read by an earlier run of the agent."""
    sample = EngineSample(
        engine="chat", at=time.time() - ago_s, dialect="vllm", model="m", facts={("x", ()): 1.0}
    )
    ObservationStore(database, "agent").write_engine_sample(sample)


def told_in_a_run(database: Engine) -> list[str]:
    """All events after another run of the agent, whose engine is not there."""
    configured = {"name": "chat", "url": f"http://127.0.0.1:{free_port()}"}
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
def test_an_engine_that_was_read_just_before_and_is_not_there_yet_is_no_failure(
    database: Engine, ago_s: float
) -> None:
    """It may have been started with the agent, and loads for minutes."""
    read(database, ago_s)
    assert told_in_a_run(database) == []


@pytest.mark.parametrize("facts", ["{cut of", "[1]", '{"x": "y"}', '{"x": [1]}'])
def test_a_last_reading_that_is_damaged_is_said_and_keeps_no_agent_from_starting(
    database: Engine, facts: str, caplog: pytest.LogCaptureFixture
) -> None:
    read(database, ago_s=300.0)
    damage(database, facts)
    assert told_in_a_run(database) == []
    assert "its last sample cannot be parsed" in caplog.text


def damage(database: Engine, facts: str) -> None:
    with database.begin() as connection:
        connection.execute(update(engine_samples).values(facts=facts))


def test_a_reading_of_a_clock_that_was_ahead_is_not_the_last_one(
    database: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    read(database, ago_s=-3600.0)
    damage(database, "{cut of")
    assert told_in_a_run(database) == []
    assert "its last reading there" not in caplog.text
