"""Stores the objectives of an agent, with the time for which each is in force."""

import json
from collections.abc import Sequence
from dataclasses import asdict

import msgspec
from sqlalchemy import ColumnElement, Connection, Engine, insert, select, update

from agent.records.held_rate import HeldRates, RateEvidence
from agent.records.objective import Objective
from agent.store.connection import for_writing, in_transaction, read_all
from agent.store.tables import objectives
from agent.store.unreadable import DAMAGED, UNREADABLE

_BY_ENGINE = msgspec.json.Decoder(dict[str, tuple[RateEvidence, ...]])


class ObjectiveStore:
    """Stores the objectives of one agent. Raises StoreUnavailable."""

    def __init__(self, engine: Engine, agent: str) -> None:
        self._reading = engine
        self._engine = for_writing(engine)
        self._agent = agent

    def write_in_force(self, configured: Sequence[Objective], now: float) -> None:
        """Record the objectives that this agent judges by from now on; unchanged ones stay."""
        wanted = {objective.name: objective_json(objective) for objective in configured}

        def write(connection: Connection) -> None:
            stored = self._in_force(connection)
            for name in stored.keys() | wanted.keys():
                if stored.get(name) != wanted.get(name):
                    self._replace(connection, name, wanted.get(name), now)

        in_transaction(self._engine, write)

    def held_rates(self) -> HeldRates:
        """What was written of the rates that engines hold, of objectives in force."""
        query = select(objectives.c.name, objectives.c.held_rates).where(
            *self._are_in_force(), objectives.c.held_rates.is_not(None)
        )
        found = {}
        for name, written in read_all(self._reading, query):
            try:
                found[name] = _BY_ENGINE.decode(written)
            except DAMAGED as error:
                UNREADABLE.add(objectives.name, {"agent": self._agent, "name": name}, error)
        return found

    def write_held_rates(self, held_rates: HeldRates) -> None:
        """Replace what is known of these objectives, if they are in force."""

        def write(connection: Connection) -> None:
            for name, by_engine in held_rates.items():
                written = msgspec.json.encode(by_engine).decode()
                rows = update(objectives).where(*self._are_in_force(), objectives.c.name == name)
                connection.execute(rows.values(held_rates=written))

        in_transaction(self._engine, write)

    def _are_in_force(self) -> tuple[ColumnElement[bool], ...]:
        return objectives.c.agent == self._agent, objectives.c.in_force_until.is_(None)

    def _in_force(self, connection: Connection) -> dict[str, str]:
        query = select(objectives.c.name, objectives.c.definition).where(*self._are_in_force())
        return {name: definition for name, definition in connection.execute(query)}

    def _replace(
        self, connection: Connection, name: str, definition: str | None, now: float
    ) -> None:
        connection.execute(
            update(objectives)
            .where(*self._are_in_force(), objectives.c.name == name)
            .values(in_force_until=now)
        )
        if definition is not None:
            connection.execute(
                insert(objectives).values(
                    agent=self._agent, name=name, definition=definition, in_force_from=now
                )
            )


def objective_json(objective: Objective) -> str:
    """An objective as JSON; the same words of the settings give the same text.

    A preset and an equal objective of the settings differ: no alert is on the preset. What the
    settings have is written without `is_preset`, as rows of earlier versions are.
    """
    values = asdict(objective)
    if not objective.is_preset:
        del values["is_preset"]
    return json.dumps(values, sort_keys=True)
