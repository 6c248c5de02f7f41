"""Stores what polls observe: samples of engines and GPUs, and events."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from sqlalchemy import Connection, Engine, Table, insert, select

from agent.catalog.engine_facts import FIRST_TOKENS, KEPT, TIME_TO_FIRST_TOKEN
from agent.records.engine import EngineSample
from agent.records.engine_counts import EngineCounts
from agent.records.event import Event
from agent.records.gpu import Facts, GpuSample, MigInstance, ProcessMemory
from agent.store.connection import for_polling, in_transaction, reading
from agent.store.engine_counts import add_counts
from agent.store.facts import facts_json, json_value
from agent.store.tables import engine_samples, events, gpu_samples


def gpus_read_since(engine: Engine, agent: str, since: float) -> list[GpuSample]:
    """The last good sample of each GPU that an agent read since a Unix time, without its facts.

    Raises StoreUnavailable.
    """
    # Each step finds one GPU in the index, and then its last good row: GROUP BY would read all.
    found: list[GpuSample] = []
    rows = gpu_samples.c
    good = (rows.agent == agent, rows.at >= since, rows.problem.is_(None))
    following = select(rows.gpu).order_by(rows.gpu).limit(1)
    newest = select(rows.gpu_index, rows.name, rows.at).where(*good)
    newest = newest.order_by(rows.at.desc()).limit(1)
    with reading(engine) as connection:
        gpu = connection.scalar(following)
        while gpu is not None:
            row = connection.execute(newest.where(rows.gpu == gpu)).first()
            if row is not None:
                index, name, at = row
                found.append(GpuSample(gpu=gpu, index=index, name=name, at=at, facts={}))
            gpu = connection.scalar(following.where(rows.gpu > gpu))
    return found


Values = Mapping[str, Any]


def _has_room() -> None:
    """Take every sample."""


class ObservationStore:
    """Stores the observations of one agent. Raises StoreUnavailable.

    Polls write here, so a write does not wait for another's lock for long.
    """

    def __init__(
        self, engine: Engine, agent: str, require_room: Callable[[], None] = _has_room
    ) -> None:
        """`require_room` raises StoreUnavailable while there is no room for samples."""
        self._require_room = require_room
        self._engine = for_polling(engine)
        self._reading = engine
        self._agent = agent

    def write_engine_sample(self, sample: EngineSample, counts: EngineCounts | None = None) -> None:
        """Store one sample of an engine, and what the engine counted since the one before."""
        self._require_room()
        values = {
            "at": sample.at,
            "agent": self._agent,
            "engine": sample.engine,
            "model": sample.model,
            "dialect": sample.dialect,
            "facts": json.dumps(facts_json({**sample.facts, **_apart(sample)})),
        }

        def write(connection: Connection) -> None:
            connection.execute(insert(engine_samples), [values])
            if counts is not None:
                add_counts(connection, self._agent, sample, counts)

        in_transaction(self._engine, write)

    def write_gpu_samples(self, samples: Sequence[GpuSample]) -> None:
        """Store these samples of GPUs together: all or, where the database refuses, none.

        Callers pass one sample a minute of each GPU: eight GPUs polled each second would be 28,800
        rows an hour.
        """
        if samples:
            self._require_room()
            self._insert(gpu_samples, [gpu_row(self._agent, sample) for sample in samples])

    def gpus_read_since(self, since: float) -> list[GpuSample]:
        """The last good sample of each GPU that this agent read since a Unix time."""
        return gpus_read_since(self._reading, self._agent, since)

    def write_event(self, event: Event) -> None:
        """Store one event."""
        evidence = {name: json_value(value) for name, value in event.evidence.items()}
        values = {
            "at": event.at,
            "agent": self._agent,
            "engine": event.engine,
            "gpu": event.gpu,
            "kind": str(event.kind),
            "confidence": str(event.confidence),
            "evidence": json.dumps(evidence),
        }
        self._insert(events, [values])

    def _insert(self, table: Table, rows: Sequence[Values]) -> None:
        in_transaction(self._engine, partial(_inserted, table=table, rows=rows))


def _apart(sample: EngineSample) -> Facts:
    """What a stored sample has in place of its histograms, and what is kept in its counters."""
    histogram = sample.histograms.get(TIME_TO_FIRST_TOKEN.name)
    first: Facts = {} if histogram is None else {(FIRST_TOKENS, ()): histogram.counts[-1]}
    kept = {(KEPT, (name, *labels)): value for (name, labels), value in sample.kept.items()}
    return {**first, **kept}


def _inserted(connection: Connection, table: Table, rows: Sequence[Values]) -> None:
    connection.execute(insert(table), rows)


def gpu_row(agent: str, sample: GpuSample) -> dict[str, Any]:
    """The columns of a sample."""
    processes = _processes(sample.processes)
    return {
        "at": sample.at,
        "agent": agent,
        "gpu": sample.gpu,
        "gpu_index": sample.index,
        "name": sample.name,
        "problem": sample.problem,
        "facts": json.dumps(facts_json(sample.facts)),
        "processes": None if processes is None else json.dumps(processes),
        "mig_instances": json.dumps([_mig_instance(each) for each in sample.mig_instances]),
    }


def _mig_instance(instance: MigInstance) -> dict[str, Any]:
    return {
        "uuid": instance.uuid,
        "name": instance.name,
        "gpu_instance": instance.gpu_instance,
        "compute_instance": instance.compute_instance,
        "gpu_slices": instance.gpu_slices,
        "facts": facts_json(instance.facts),
        "processes": _processes(instance.processes),
    }


def _processes(memory: ProcessMemory | None) -> list[dict[str, int | None]] | None:
    if memory is None:
        return None
    return [{"pid": pid, "memory_bytes": held_bytes} for pid, held_bytes in memory.items()]
