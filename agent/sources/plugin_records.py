"""Reads the datagrams of `goodput-agent-vllm`, a plugin of vLLM: its steps, requests and counts.

`plugins/vllm/goodput_agent_vllm/datagrams.py` describes the format.
"""

import math
import re
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from agent.analysis.latency import MAX_TOKENS, ReportedPhases, screen
from agent.catalog.reasons import PluginDropped
from agent.records.engine import EndedRequest, EngineStep, ServedRequest
from agent.records.request import RequestRecord, Vantage
from agent.sources.proxy.measuring.served_request import record_from

_MAGIC = b"GPAV"
_FORMAT = 1
_HEADER = struct.Struct("<4sBBHQQQ")
_HELLO, _STEP, _REQUEST, _SERVED, _COUNT = 1, 2, 3, 4, 5
_HELLO_RECORD = struct.Struct("<BBH")
_STEP_RECORD = struct.Struct("<BBHdd6IfI")
_REQUEST_RECORD = struct.Struct("<BBHdIIiI5d16s320s")
_SERVED_RECORD = struct.Struct("<BBHH")
_COUNT_RECORD = struct.Struct("<BBHQ96s")
_SIZES = {
    _HELLO: _HELLO_RECORD.size,
    _STEP: _STEP_RECORD.size,
    _REQUEST: _REQUEST_RECORD.size,
    _COUNT: _COUNT_RECORD.size,
}
_TOKENS_OF_STEP = 1
_PROXIED = 1

# Larger counts are forged.
MAX_COUNT = 1 << 32

# A plugin keeps its newest records while the agent is away, so they may come late.
_OLDEST_S = 86_400.0
_MAX_LEAD_S = 60.0
_LONGEST_STEP_S = 86_400.0
# The length of the column `request_id`.
_ID_CHARACTERS = 256
_REASON = re.compile(rb"[a-z_]{1,16}")
_TRACE_ID, _SPAN_ID = re.compile("[0-9a-f]{32}"), re.compile("[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class PluginCount:
    """How often something happened in a front since its last record of it.

    It is responses of a route, whose status has this class (2 of 200), or failures of the
    measuring, which have the class 0.
    """

    name: str
    status_class: int
    count: int


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
    served: list[ServedRequest] = field(default_factory=list)
    counts: list[PluginCount] = field(default_factory=list)
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
        size = _size(datagram, at)
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
    read, into = _READERS[datagram[at]]
    found = read(datagram, at, engine, received_at)
    if isinstance(found, PluginDropped):
        content.refused[found] += 1
    elif found is not None:
        getattr(content, into).append(found)
    if isinstance(found, ServedRequest):
        # A choice may be refused, and its request stays.
        figures = int(_SERVED_RECORD.unpack_from(datagram, at)[2])
        if figures > len(found.choices):
            content.refused[PluginDropped.VALUE] += figures - len(found.choices)


def _size(datagram: bytes, at: int) -> int:
    """The bytes of the record at byte `at`; 0 of an unknown kind, or without a head."""
    if at >= len(datagram):
        return 0
    if datagram[at] != _SERVED:
        return _SIZES.get(datagram[at], 0)
    if at + _SERVED_RECORD.size > len(datagram):
        return 0
    figures, record_bytes = map(int, _SERVED_RECORD.unpack_from(datagram, at)[2:])
    return _SERVED_RECORD.size + figures * _REQUEST_RECORD.size + record_bytes


def _hello(datagram: bytes, at: int, engine: str, received_at: float) -> None:
    """Return nothing: the datagram itself says that the plugin is there."""


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
        ended_at=min(ended_at, received_at),
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


def _served(
    datagram: bytes, at: int, engine: str, received_at: float
) -> ServedRequest | PluginDropped:
    _, flags, figures, record_bytes = _SERVED_RECORD.unpack_from(datagram, at)
    first = at + _SERVED_RECORD.size
    record_at = first + figures * _REQUEST_RECORD.size
    record = served_record(datagram[record_at : record_at + record_bytes])
    if isinstance(record, PluginDropped):
        return record
    if not _is_recent(record.ended_at, received_at):
        return PluginDropped.TIME
    places = range(first, record_at, _REQUEST_RECORD.size)
    found = [_request(datagram, place, engine, received_at) for place in places]
    choices = tuple([each for each in found if isinstance(each, EndedRequest)])
    record = _ended_by(received_at, record._replace(engine=engine, received_at=received_at))
    return ServedRequest(record, choices, bool(flags & _PROXIED))


def open_request(
    sent: bytes, engine: str, ended_at: float, received_at: float
) -> ServedRequest | PluginDropped:
    """The request that was open when a front ended, of which it was heard last at `ended_at`."""
    record = served_record(sent[1:])
    if isinstance(record, PluginDropped):
        return record
    if not _is_recent(ended_at, received_at):
        return PluginDropped.TIME
    heard_at = min(ended_at, received_at)
    record = record._replace(engine=engine, ended_at=heard_at, received_at=received_at)
    return ServedRequest(record, proxied=bool(sent[0] & _PROXIED))


def served_record(sent: bytes) -> RequestRecord | PluginDropped:
    """The record of a request in these bytes, or why it is none."""
    try:
        record = record_from(sent)
    except msgspec.ValidationError:
        return PluginDropped.VALUE
    except ValueError:
        return PluginDropped.MALFORMED
    if not _TRACE_ID.fullmatch(record.trace_id) or not _SPAN_ID.fullmatch(record.span_id):
        return PluginDropped.VALUE
    if record.proxied is None or record.vantage is not Vantage.PROXY:
        return PluginDropped.VALUE
    return record


def _count(
    datagram: bytes, at: int, engine: str, received_at: float
) -> PluginCount | PluginDropped:
    _, status_class, name_bytes, count, name = _COUNT_RECORD.unpack_from(datagram, at)
    text = _id(name, min(name_bytes, len(name)))
    if text is None or status_class > 5 or count >= MAX_COUNT:
        return PluginDropped.VALUE
    return PluginCount(text, status_class, count)


# By kind: how to read a record, and the field of PluginRecords that gets it.
_READERS: Mapping[int, tuple[Callable[[bytes, int, str, float], object], str]] = {
    _HELLO: (_hello, ""),
    _STEP: (_step, "steps"),
    _REQUEST: (_request, "ended"),
    _SERVED: (_served, "served"),
    _COUNT: (_count, "counts"),
}


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _is_recent(ended_at: float, received_at: float) -> bool:
    """Whether a record may have ended at this time; false also for NaN."""
    return received_at - _OLDEST_S <= ended_at <= received_at + _MAX_LEAD_S


def _ended_by(received_at: float, record: RequestRecord) -> RequestRecord:
    """The record, moved to its receipt if it would end later: a clock was set back meanwhile."""
    lead_s = record.ended_at - received_at
    if lead_s <= 0.0:
        return record
    return record._replace(started_at=record.started_at - lead_s, ended_at=received_at)


def _id(field_bytes: bytes, id_bytes: int) -> str | None:
    """The request id; None if it was cut, is not UTF-8, or is too long or unprintable."""
    if not 0 < id_bytes <= len(field_bytes):
        return None
    try:
        text = field_bytes[:id_bytes].decode()
    except UnicodeDecodeError:
        return None
    return text if len(text) <= _ID_CHARACTERS and text.isprintable() else None
