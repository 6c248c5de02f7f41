"""The format of the datagrams: a header and records of fixed sizes, little-endian, without text
but the request id and the finish reason. The agent's reader has the same sizes
(`agent/sources/plugin_records.py`).
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

MAGIC = b"GPAV"
FORMAT = 1

# Magic, format, 0, records in the datagram, a random number of this run of the engine's front, the
# sequence number of the first record, and the records that this run has dropped so far.
HEADER = struct.Struct("<4sBBHQQQ")

HELLO, STEP, REQUEST, SERVED, COUNT = 1, 2, 3, 4, 5

# Kind, 0, 0: the plugin is there, though the engine is idle.
HELLO_RECORD = struct.Struct("<BBH")

# Kind, flags, rank; end (Unix time) and duration in seconds; tokens of prefill and decode; numbers
# of requests: running, waiting for room, deferred, deferred because their KV comes from another
# engine; KV usage from 0 to 1; preemptions.
STEP_RECORD = struct.Struct("<BBHdd6IfI")

# Kind, 0, bytes of the id; end (Unix time); tokens of input, output and cache (-1: unknown),
# preemptions; seconds of queue, prefill, decode, the whole request, and to the first token; finish
# reason and request id.
REQUEST_RECORD = struct.Struct("<BBHdIIiI5d16s320s")

# Kind, flags, number of figures, bytes of the record. Then the figures, each a REQUEST_RECORD, and
# the record in msgpack: see agent/sources/proxy/measuring/served_request.py.
SERVED_RECORD = struct.Struct("<BBHH")
# A flag: the request came through the agent's proxy, which measured it, too.
PROXIED = 1
# What must fit into a datagram.
MAX_FIGURES = 32

# Kind, class of the status (2 of 200), bytes of the name, how many there were since the last such
# record, and the route. Without a class it counts failures of the measuring by their reason.
COUNT_RECORD = struct.Struct("<BBHQ96s")

# A flag of a step: its tokens are those of this step alone. Otherwise the tokens of a prefill are
# counted in the step that ended it.
TOKENS_OF_STEP = 1

UNKNOWN = float("nan")
UNKNOWN_COUNT = -1


class StepFigures(NamedTuple):
    """One step, in the order of STEP_RECORD."""

    rank: int
    ended_at: float
    duration_s: float
    prefill_tokens: int
    decode_tokens: int
    running: int
    waiting_capacity: int
    waiting_deferred: int
    waiting_kv_transfer: int
    kv_usage: float
    preempted: int
    tokens_of_step: bool


class RequestFigures(NamedTuple):
    """One request that ended; times in seconds, UNKNOWN where the engine does not know them."""

    ended_at: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    preemptions: int
    queue_s: float
    prefill_s: float
    decode_s: float
    e2e_s: float
    ttft_s: float
    finish_reason: str
    request_id: str


def write_header(datagram: bytearray, run: int, records: int, first: int, dropped: int) -> None:
    """Write the header over the first bytes of a datagram."""
    HEADER.pack_into(datagram, 0, MAGIC, FORMAT, 0, records, run, first, dropped)


def step_record(step: StepFigures) -> bytes:
    """The record of a step."""
    rank, *figures, tokens_of_step = step
    return STEP_RECORD.pack(STEP, TOKENS_OF_STEP if tokens_of_step else 0, rank, *figures)


def request_record(request: RequestFigures) -> bytes:
    """The record of a request. A long id is cut; the agent sees that by the number of bytes."""
    *figures, reason, request_id = request
    encoded = request_id.encode("utf-8", "replace")
    id_bytes = min(len(encoded), 0xFFFF)
    # The format `s` cuts what is longer.
    return REQUEST_RECORD.pack(REQUEST, 0, id_bytes, *figures, reason.encode(), encoded)


def served_record(record: bytes, figures: Sequence[bytes], *, proxied: bool) -> bytes:
    """The record of an HTTP request, with the figures of its choices."""
    sent = figures[:MAX_FIGURES]
    head = SERVED_RECORD.pack(SERVED, PROXIED if proxied else 0, len(sent), len(record))
    return b"".join((head, *sent, record))


def open_record(record: bytes, *, proxied: bool) -> bytes:
    """What is kept of an open request: a byte with the flags, and the record if it never ends."""
    return bytes((PROXIED if proxied else 0,)) + record


def count_record(name: str, status_class: int, count: int) -> bytes:
    """The record of how many more responses of this route, or failures, there were."""
    encoded = name.encode("utf-8", "replace")
    return COUNT_RECORD.pack(COUNT, status_class, min(len(encoded), 0xFFFF), count, encoded)


def hello_record() -> bytes:
    """The record of an idle engine."""
    return HELLO_RECORD.pack(HELLO, 0, 0)
