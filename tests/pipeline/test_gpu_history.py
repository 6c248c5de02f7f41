"""Readings of GPUs that are held and stored."""

from pathlib import Path

from agent.pipeline.gpu_history import GpuHistory, each_once
from agent.records.gpu import GpuSample
from agent.store.connection import open_engine
from agent.store.migrating import upgrade
from agent.store.minutes import MinuteStore
from agent.store.observations import ObservationStore
from tests.store.making import NOON


def gpu(at: float) -> GpuSample:
    return GpuSample(gpu="GPU-1", index=0, name="NVIDIA H200", at=NOON + at, facts={})


def test_a_reading_that_is_held_and_stored_counts_once(tmp_path: Path) -> None:
    """The database rounds its moment, and readings of a quarter of a second stay apart."""
    database = open_engine(f"sqlite:///{tmp_path / 'goodput.db'}")
    upgrade(database)
    history, observations = GpuHistory(), ObservationStore(database, "agent-0")
    for at in (0.1234567, 0.3734567, 60.0000004):
        history.sample(gpu(at))
        observations.write_gpu_samples([gpu(at)])
    observations.write_gpu_samples([gpu(-60.0000004)])
    recent = history.of(["GPU-1"])
    stored = MinuteStore(database, "agent-0").gpu_readings(["GPU-1"], NOON - 120, NOON + 120)
    database.dispose()
    assert len(stored) == 4
    told = sorted(sample.at - NOON for sample in each_once(recent, stored))
    assert [round(at, 2) for at in told] == [-60.0, 0.12, 0.37, 60.0]


def test_no_more_is_held_than_of_the_last_minutes_though_the_clock_was_set_back() -> None:
    history = GpuHistory()
    for at in (0.0, 1.0, 1e6, *(float(second) for second in range(2, 2000))):
        history.sample(gpu(at))
    held = [sample.at - NOON for sample in history.of(["GPU-1"])]
    assert held == [float(second) for second in range(1699, 2000)]
