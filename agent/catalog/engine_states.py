"""The states of an engine that its probes report, and what follows from each.

A state is alive unless a restart is the cure, and ready unless new requests should go elsewhere.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from agent.catalog.definitions import DEEP_QUEUE


class ProbedState(StrEnum):
    """The state of an engine at its last poll. Each value is a label of `llm_engine_state`."""

    OK = "ok"
    IDLE = "idle"
    SATURATED = "saturated"
    LOADING = "loading"
    PAUSED = "paused"
    UNREACHABLE = "unreachable"
    STALLED = "stalled"
    DEAD = "dead"


class StateMeaning(NamedTuple):
    """What a state is, and the answers of the two probes."""

    alive: bool
    ready: bool
    meaning: str


ENGINE_STATES: Mapping[ProbedState, StateMeaning] = {
    ProbedState.OK: StateMeaning(True, True, "it takes requests"),
    ProbedState.IDLE: StateMeaning(True, True, "it has no request"),
    ProbedState.SATURATED: StateMeaning(
        True, True, f"it computes, and more than {DEEP_QUEUE} requests wait or it rejects requests"
    ),
    ProbedState.LOADING: StateMeaning(True, False, "it is there, and sent no metrics yet"),
    ProbedState.PAUSED: StateMeaning(True, False, "it was paused or sent to sleep"),
    ProbedState.UNREACHABLE: StateMeaning(
        True, False, "it has not answered for a moment, or nothing was ever seen at its address"
    ),
    ProbedState.STALLED: StateMeaning(False, False, "it has work and computes nothing"),
    ProbedState.DEAD: StateMeaning(False, False, "it died, or has not answered for minutes"),
}
