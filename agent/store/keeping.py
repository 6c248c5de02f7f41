"""Storing samples, events and objectives, and letting go of what is old."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from math import inf, isfinite
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, Table, and_, delete, insert, select, update
from sqlalchemy.exc import SQLAlchemyError

from agent.errors import StoreUnavailable
from agent.records.engine import EngineSample
from agent.records.event import Event
from agent.records.gpu import GpuSample, MigInstance, ProcessMemory
from agent.records.objective import Objective
from agent.store.connection import cause, for_polling, for_writing
from agent.store.folding import (
    CHANGES_PER_SLICE,
    agents_to_fold,
    agents_with_series,
    fold_slice,
    let_go_of_series,
    rebuild_rollups,
)
from agent.store.gpu_rows import gpus_read_since
from agent.store.rollups import DAY_S, KEEP_S, WIDTHS_S, take_turns
from agent.store.tables import (
    engine_samples,
    events,
    gpu_samples,
    objectives,
    requests,
    rollup_series,
    rollups,
)

# Deleting takes the database from its writer, so it is done in slices.
ROWS_PER_SLICE = 5000

Answer = TypeVar("Answer")


class Keeper:
    """Keeps what is not a request. Raises StoreUnavailable where the database does not answer."""

    def __init__(self, engine: Engine, agent: str) -> None:
        self._engine = for_writing(engine)
        self._polling = for_polling(engine)
        self._reading = engine
        self._agent = agent

    def keep_sample(self, sample: EngineSample) -> None:
        """Store one reading of an engine's page."""
        self._keep(
            insert(engine_samples).values(
                at=sample.at,
                agent=self._agent,
                engine=sample.engine,
                model=sample.model,
                dialect=sample.dialect,
                facts=json.dumps(_facts(sample.facts)),
            )
        )

    def keep_gpu_samples(self, samples: Sequence[GpuSample]) -> None:
        """Store these readings of GPUs together: all or, where the database refuses, none.

        One reading of each GPU a minute is meant: eight GPUs polled each second would be 28,800
        rows an hour, and who calls this leaves out the others.
        """
        if samples:
            rows = [_gpu_row(self._agent, sample) for sample in samples]
            self._keep(insert(gpu_samples), rows)

    def gpus_read_since(self, since: float) -> list[GpuSample]:
        """The last good reading of each GPU that this agent read since a Unix time."""
        return gpus_read_since(self._reading, self._agent, since)

    def keep_event(self, event: Event) -> None:
        """Store one event."""
        self._keep(
            insert(events).values(
                at=event.at,
                agent=self._agent,
                engine=event.engine,
                gpu=event.gpu,
                kind=str(event.kind),
                confidence=str(event.confidence),
                evidence=json.dumps({name: _told(told) for name, told in event.evidence.items()}),
            )
        )

    def put_in_force(self, promised: Sequence[Objective], now: float) -> None:
        """Record what this agent judges by from now on; what has not changed stays as it is."""
        wanted = {objective.name: objective_text(objective) for objective in promised}
        try:
            with self._engine.begin() as connection:
                take_turns(connection, self._agent)
                standing = self._standing(connection)
                for name in standing.keys() | wanted.keys():
                    if standing.get(name) != wanted.get(name):
                        self._replace(connection, name, wanted.get(name), now)
        except SQLAlchemyError as error:
            raise StoreUnavailable(f"the objectives could not be stored: {cause(error)}") from error

    def _standing(self, connection: Connection) -> dict[str, str]:
        query = select(objectives.c.name, objectives.c.definition).where(
            objectives.c.agent == self._agent, objectives.c.in_force_until.is_(None)
        )
        return {name: definition for name, definition in connection.execute(query)}

    def _replace(
        self, connection: Connection, name: str, definition: str | None, now: float
    ) -> None:
        connection.execute(
            update(objectives)
            .where(
                objectives.c.agent == self._agent,
                objectives.c.name == name,
                objectives.c.in_force_until.is_(None),
            )
            .values(in_force_until=now)
        )
        if definition is not None:
            connection.execute(
                insert(objectives).values(
                    agent=self._agent, name=name, definition=definition, in_force_from=now
                )
            )

    def expire(self, requests_before: float, rollups_before: float, now: float) -> int:
        """Delete what is older, slice by slice; the answer is how many rows went."""
        return (
            self._expire_rows(requests, requests.c.started_at < requests_before)
            + self._expire_rows(engine_samples, engine_samples.c.at < requests_before)
            + self._expire_rows(gpu_samples, gpu_samples.c.at < requests_before)
            + self._expire_rows(events, events.c.at < rollups_before)
            + sum(
                self._expire_rollups(width_s, max(rollups_before, now - KEEP_S.get(width_s, inf)))
                for width_s in WIDTHS_S
            )
            + self._expire_series()
        )

    def _expire_rollups(self, width_s: int, before: float) -> int:
        """Delete what lies wholly before, found by series: that is how rollups are sorted."""
        return self._delete(
            delete(rollups).where(
                rollups.c.width_s == width_s,
                rollups.c.series.in_(select(rollup_series.c.id)),
                rollups.c.starts_at <= before - width_s,
            )
        )

    def _expire_series(self) -> int:
        return sum(
            self._transaction(partial(let_go_of_series, agent=agent))
            for agent in self._transaction(agents_with_series)
        )

    def fold_rollups(self, now: float) -> int:
        """Fold what requests changed into the rollups; the answer is how many changes.

        Slice by slice, so that the writer gets its turns. What was not folded because no agent ran,
        or because one was cut off, is folded by the next call.
        """
        folded = 0
        for agent in self._transaction(partial(agents_to_fold, agent=self._agent, now=now)):
            slice_of = CHANGES_PER_SLICE
            while slice_of == CHANGES_PER_SLICE:
                slice_of = self._transaction(partial(fold_slice, agent=agent))
                folded += slice_of
        return folded

    def rebuild_rollups(self, from_s: int, until_s: int) -> None:
        """Make this agent's rollups of whole UTC days anew from its rows, a day at a time.

        Only for days whose rows are all kept: what was let go is no longer counted.
        """
        for day in range(from_s, until_s, DAY_S):
            self._transaction(
                partial(rebuild_rollups, agent=self._agent, from_s=day, until_s=day + DAY_S)
            )

    def _expire_rows(self, table: Table, old: Any) -> int:
        gone = 0
        while True:
            slice_of = select(table.c.id).where(old).limit(ROWS_PER_SLICE)
            went = self._delete(delete(table).where(and_(table.c.id.in_(slice_of))))
            gone += went
            if went < ROWS_PER_SLICE:
                return gone

    def _delete(self, statement: Any) -> int:
        return self._transaction(lambda connection: int(connection.execute(statement).rowcount))

    def _keep(self, statement: Any, rows: Sequence[Mapping[str, Any]] | None = None) -> None:
        self._transaction(lambda connection: connection.execute(statement, rows), self._polling)

    def _transaction(
        self, work: Callable[[Connection], Answer], engine: Engine | None = None
    ) -> Answer:
        try:
            with (engine or self._engine).begin() as connection:
                return work(connection)
        except SQLAlchemyError as error:
            raise StoreUnavailable(
                f"the database did not take the write: {cause(error)}"
            ) from error


def _gpu_row(agent: str, sample: GpuSample) -> dict[str, Any]:
    processes = _processes(sample.processes)
    return {
        "at": sample.at,
        "agent": agent,
        "gpu": sample.gpu,
        "gpu_index": sample.index,
        "name": sample.name,
        "problem": sample.problem,
        "facts": json.dumps(_facts(sample.facts)),
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
        "facts": _facts(instance.facts),
        "processes": _processes(instance.processes),
    }


def _processes(memory: ProcessMemory | None) -> list[dict[str, int | None]] | None:
    if memory is None:
        return None
    return [{"pid": pid, "memory_bytes": held_bytes} for pid, held_bytes in memory.items()]


def _facts(facts: Mapping[tuple[str, tuple[str, ...]], float]) -> dict[str, str | float | None]:
    return {_fact_text(*fact): _told(value) for fact, value in facts.items()}


def _fact_text(name: str, labels: Sequence[str]) -> str:
    return f"{name}{{{','.join(labels)}}}" if labels else name


def _told(value: str | float | None) -> str | float | None:
    """The value, or None where JSON has no word for it: engines' pages hold NaN."""
    return None if isinstance(value, float) and not isfinite(value) else value


def objective_text(objective: Objective) -> str:
    """An objective as JSON: equal promises give equal text."""
    return json.dumps(asdict(objective), sort_keys=True)
