"""The format of the datagrams: a header and records of fixed sizes, little-endian, without text
but the request id and the finish reason. The agent's reader has the same sizes
(`agent/sources/engine_plugin.py`).
"""

import struct
from typing import NamedTuple

MAGIC = b"GPAV"
FORMAT = 1

# Magic, format, 0, records in the datagram, a random number of this run of the engine's front, the
# sequence number of the first record, and the records that this run has dropped so far.
HEADER = struct.Struct("<4sBBHQQQ")

HELLO, STEP, REQUEST = 1, 2, 3

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


def hello_record() -> bytes:
    """The record of an idle engine."""
    return HELLO_RECORD.pack(HELLO, 0, 0)
