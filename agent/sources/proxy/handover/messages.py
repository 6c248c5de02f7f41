"""What a worker of the proxy and the agent exchange: msgpack messages, each after its length."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from agent.records.request import EngineView, ProxyView, RequestRecord

# A batch of 512 records is a few hundred kilobytes.
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
_LENGTH_BYTES = 4

# Records are sent as arrays, so both sides must have the same fields.
RECORD_FIELDS = (*RequestRecord._fields, *ProxyView._fields, *EngineView._fields)


@dataclass(frozen=True, slots=True)
class HandoverAddress:
    """The agent's socket, in a folder that only this user may enter, and the supervisor's run."""

    socket: Path
    run: str


class WorkerHello(msgspec.Struct, tag=True):
    """The first message of a worker. `worker` is its number, `run` the run of its supervisor."""

    worker: int
    run: str
    fields: tuple[str, ...] = RECORD_FIELDS


class FinishedRequests(msgspec.Struct, tag=True):
    """Records in the order in which they ended; the agent answers with their `number`."""

    number: int
    records: list[RequestRecord]


class EncodedRequests(msgspec.Struct, tag="FinishedRequests"):
    """The same as a worker sends them, and as the agent takes them if the worker is of another
    version, whose fields are others."""

    number: int
    records: list[msgspec.Raw]


class ProxySpans(msgspec.Struct, tag=True):
    """Spans of the proxy: an OTLP protobuf body to forward."""

    body: bytes


class EjectedEngine(msgspec.Struct, frozen=True, array_like=True):
    """An engine that a worker sends no new requests since `since` (Unix time), but for probes.

    `for_s` is how long the current time-out is, `over` whether it is over: the next request probes.
    """

    reason: str
    detail: str | None
    since: float
    for_s: float
    over: bool


class Rotation(msgspec.Struct, frozen=True, array_like=True):
    """What a worker knows of its rotation: the engines that are out, and counts since its last
    status: ejections by engine and reason, requests that another engine got, by the first one,
    requests for which no engine was in, and responses to requests that are not measured, as
    engine, route, class of status and number."""

    out: dict[str, EjectedEngine] = {}
    ejections: dict[str, dict[str, int]] = {}
    retried: dict[str, int] = {}
    forced: int = 0
    responses: list[tuple[str, str, int, int]] = []


class WorkerStatus(msgspec.Struct, tag=True):
    """What a worker counts: failures and cut clients since its last status, by reason."""

    live: int
    waiting: int
    failures: dict[str, int]
    cut: dict[str, int]
    rotation: Rotation = Rotation()


class WorkerDied(msgspec.Struct, tag=True):
    """The worker before the sender of this died: requests that it had open, rows that are made of
    these, and ended requests whose record died with it."""

    worker: int
    open: int
    rows: int
    lost: int


class Stored(msgspec.Struct, tag=True):
    """All records up to this number are stored, or refused and counted."""

    number: int


class EngineState(msgspec.Struct, frozen=True, array_like=True):
    """What the agent knows of an engine; `models` is None while they are unknown.

    `event` is the kind of a recent event by which it failed or restarted, and its Unix time.
    `computed_at` is when the agent last saw that it computes.
    """

    healthy: bool
    models: frozenset[str] | None
    event: tuple[str, float] | None = None
    computed_at: float | None = None


class Engines(msgspec.Struct, tag=True):
    """The engines by name."""

    states: Mapping[str, EngineState]


class Retire(msgspec.Struct, tag=True):
    """The worker belongs to an earlier run: it takes no new request, and ends with its last one."""


FromWorker = WorkerHello | EncodedRequests | ProxySpans | WorkerStatus | WorkerDied
FromAgent = Stored | Engines | Retire

_ENCODER = msgspec.msgpack.Encoder()
Message = TypeVar("Message")


def encoded(record: RequestRecord) -> bytes:
    """A record as it is sent, which takes a fifth of its memory. Raises ValueError, OverflowError
    and TypeError for what no message can hold."""
    return _ENCODER.encode(record)


def framed(message: FromWorker | FromAgent) -> bytes:
    """A message as it is sent."""
    body = _ENCODER.encode(message)
    return len(body).to_bytes(_LENGTH_BYTES) + body


async def received(
    reader: asyncio.StreamReader, decoder: "msgspec.msgpack.Decoder[Message]"
) -> Message:
    """The next message. Raises EOFError at the end and ValueError for anything else."""
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES))
    if length > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {length} bytes; the limit is {MAX_MESSAGE_BYTES}")
    return decoder.decode(await reader.readexactly(length))
