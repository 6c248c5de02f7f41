"""Reads the datagrams of an engine's plugin, and refuses datagrams of other programs.

`plugins/vllm/goodput_agent_vllm/datagrams.py` describes the format.
"""

import math
import re
import struct
from collections import Counter
from dataclasses import dataclass, field

from agent.analysis.latency import MAX_TOKENS, ReportedPhases, screen
from agent.catalog.reasons import PluginDropped
from agent.records.engine import EndedRequest, EngineStep

_MAGIC = b"GPAV"
_FORMAT = 1
_HEADER = struct.Struct("<4sBBHQQQ")
_HELLO, _STEP, _REQUEST = 1, 2, 3
_STEP_RECORD = struct.Struct("<BBHdd6IfI")
_REQUEST_RECORD = struct.Struct("<BBHdIIiI5d16s320s")
_SIZES = {_HELLO: struct.calcsize("<BBH"), _STEP: _STEP_RECORD.size, _REQUEST: _REQUEST_RECORD.size}
_TOKENS_OF_STEP = 1

# A plugin keeps its newest records while the agent is away, so they may come late.
_OLDEST_S = 86_400.0
_MAX_LEAD_S = 60.0
_LONGEST_STEP_S = 86_400.0
# The length of the column `request_id`.
_ID_CHARACTERS = 256
_REASON = re.compile(rb"[a-z_]{1,16}")


@dataclass(slots=True)
class PluginRecords:
    """The records of one datagram, and how many of them were refused by reason.

    The header's fields: `run` is a random number of one run of the engine's front, `first` the
    sequence number of the first record, `records` how many records the datagram has, `dropped` how
    many records this run of the front has dropped so far.
    """

    run: int = 0
    first: int = 0
    records: int = 0
    dropped: int = 0
    steps: list[EngineStep] = field(default_factory=list)
    ended: list[EndedRequest] = field(default_factory=list)
    refused: Counter[PluginDropped] = field(default_factory=Counter)


def read_datagram(datagram: bytes, engine: str, received_at: float) -> PluginRecords | None:
    """The records of a datagram that arrived at a Unix time; None if no plugin wrote it."""
    if len(datagram) < _HEADER.size:
        return None
    magic, version, _, count, run, first, dropped = _HEADER.unpack_from(datagram)
    if magic != _MAGIC:
        return None
    content = PluginRecords(run, first, count, dropped)
    if version != _FORMAT:
        content.refused[PluginDropped.OTHER_FORMAT] += count
        return content
    at = _HEADER.size
    for read in range(count):
        size = _SIZES.get(datagram[at], 0) if at < len(datagram) else 0
        if not size or at + size > len(datagram):
            content.refused[PluginDropped.MALFORMED] += count - read
            break
        _add_record(datagram, at, engine, received_at, content)
        at += size
    return content


def _add_record(
    datagram: bytes, at: int, engine: str, received_at: float, content: PluginRecords
) -> None:
    """Add the record at byte `at` to the content, or its reason to the refused ones."""
    kind = datagram[at]
    if kind == _HELLO:
        return
    found: EngineStep | EndedRequest | PluginDropped
    if kind == _STEP:
        found = _step(datagram, at, engine, received_at)
    else:
        found = _request(datagram, at, engine, received_at)
    if isinstance(found, EngineStep):
        content.steps.append(found)
    elif isinstance(found, EndedRequest):
        content.ended.append(found)
    else:
        content.refused[found] += 1


def _step(datagram: bytes, at: int, engine: str, received_at: float) -> EngineStep | PluginDropped:
    _, flags, rank, ended_at, duration_s, *counts, kv_usage, preempted = _STEP_RECORD.unpack_from(
        datagram, at
    )
    if not _is_recent(ended_at, received_at):
        return PluginDropped.TIME
    if not 0.0 <= kv_usage <= 1.0 or max(*counts, preempted) > MAX_TOKENS:
        return PluginDropped.VALUE
    prefill, decode, running, capacity, deferred, kv_transfer = counts
    return EngineStep(
        engine=engine,
        ended_at=ended_at,
        duration_s=duration_s if 0.0 <= duration_s <= _LONGEST_STEP_S else None,
        prefill_tokens=prefill,
        decode_tokens=decode,
        running=running,
        waiting_capacity=capacity,
        waiting_deferred=deferred,
        kv_usage=kv_usage,
        preempted=preempted,
        waiting_kv_transfer=kv_transfer,
        rank=rank,
        tokens_of_step=bool(flags & _TOKENS_OF_STEP),
    )


def _request(
    datagram: bytes, at: int, engine: str, received_at: float
) -> EndedRequest | PluginDropped:
    values = _REQUEST_RECORD.unpack_from(datagram, at)
    _, _, id_bytes, ended_at, input_tokens, output_tokens, cached, preemptions = values[:8]
    queue_s, prefill_s, decode_s, e2e_s, ttft_s = map(_known, values[8:13])
    finish_reason, request_id = values[13].rstrip(b"\0"), _id(values[14], id_bytes)
    if not _is_recent(ended_at, received_at):
        return PluginDropped.TIME
    if request_id is None:
        return PluginDropped.REQUEST_ID
    counts = (input_tokens, output_tokens, cached, preemptions)
    if max(counts) > MAX_TOKENS or not _REASON.fullmatch(finish_reason):
        return PluginDropped.VALUE
    reported = (e2e_s, ttft_s, queue_s, prefill_s, decode_s, input_tokens, output_tokens)
    phases = screen(ReportedPhases(*reported)).phases
    return EndedRequest(
        engine=engine,
        request_id=request_id,
        ended_at=ended_at,
        finish_reason=finish_reason.decode(),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=cached if 0 <= cached <= input_tokens else None,
        preemptions=preemptions,
        queue_s=phases.queue_s,
        prefill_s=phases.prefill_s,
        decode_s=phases.decode_s,
        e2e_s=phases.e2e_s,
        ttft_s=phases.ttft_s,
    )


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _is_recent(ended_at: float, received_at: float) -> bool:
    """Whether a record may have ended at this time; false also for NaN."""
    return received_at - _OLDEST_S <= ended_at <= received_at + _MAX_LEAD_S


def _id(field_bytes: bytes, id_bytes: int) -> str | None:
    """The request id; None if it was cut, is not UTF-8, or is too long or unprintable."""
    if not 0 < id_bytes <= len(field_bytes):
        return None
    try:
        text = field_bytes[:id_bytes].decode()
    except UnicodeDecodeError:
        return None
    return text if len(text) <= _ID_CHARACTERS and text.isprintable() else None
