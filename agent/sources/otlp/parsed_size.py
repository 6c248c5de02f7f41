"""Bounds the memory that a protobuf body takes when it is parsed, without parsing it.

Two bytes can encode an empty span, which takes 168 bytes in memory, so a few kilobytes of gzip
could take gigabytes.
"""

from collections.abc import Iterator, Mapping

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from agent.errors import PayloadInvalid

# Wire types of protobuf, and the bytes of those with a fixed length.
VARINT, DELIMITED = 0, 2
FIXED_BYTES = {1: 8, 5: 4}

# Protobuf: a number has 64 bits at most, and 7 in a byte.
_MAX_VARINT_BYTES = 10

# Measured with upb of protobuf 7.36 on 64 bits, in empty parts; links are the largest after spans.
_SPAN_BYTES = 168
_PART_BYTES = 82
_SHORTEST_PART_BYTES = 2

# Parsing goes no deeper, so deeper parts take no memory.
_MAX_DEPTH = 100

_TEXT = ""
_TEXT_TYPES = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)

# The kind of a message -> the number of each field that memory is taken for -> the kind in it.
Kinds = Mapping[str, Mapping[int, str]]


def _kinds(root: Descriptor) -> Kinds:
    kinds: dict[str, Mapping[int, str]] = {_TEXT: {}}
    waiting = [root]
    while waiting:
        kind = waiting.pop()
        if kind.full_name not in kinds:
            messages = {f.number: f.message_type for f in kind.fields if f.message_type}
            texts = [f.number for f in kind.fields if f.is_repeated and f.type in _TEXT_TYPES]
            waiting += messages.values()
            kinds[kind.full_name] = dict.fromkeys(texts, _TEXT) | {
                number: inner.full_name for number, inner in messages.items()
            }
    return kinds


_ROOT = ExportTraceServiceRequest.DESCRIPTOR.full_name
_KINDS = _kinds(ExportTraceServiceRequest.DESCRIPTOR)
_WEIGHTS = {kind: _PART_BYTES for kind in _KINDS} | {Span.DESCRIPTOR.full_name: _SPAN_BYTES}

# The bytes that can begin a part: its tag, also where a sender writes it longer than needed.
_TAGS = {number << 3 | DELIMITED for fields in _KINDS.values() for number in fields}
_OTHER_BYTES = bytes(set(range(256)) - _TAGS - {tag | 0x80 for tag in _TAGS})


def fits(body: bytes, limit_bytes: int) -> bool:
    """Whether the messages in a body take no more than the limit, without their texts.

    A body of a usual size is not read, and most large ones are not walked: a body has no more
    parts than bytes that can begin one.
    """
    if len(body) // _SHORTEST_PART_BYTES * _SPAN_BYTES <= limit_bytes:
        return True
    if len(body.translate(None, _OTHER_BYTES)) * _SPAN_BYTES <= limit_bytes:
        return True
    return _walk(body, limit_bytes) <= limit_bytes


def _walk(body: bytes, limit_bytes: int) -> int:
    """The memory of the parts of a body in bytes, counted until it is over the limit."""
    taken_bytes = 0
    open_parts = [_parts(body, _ROOT, 0, len(body))]
    while open_parts and taken_bytes <= limit_bytes:
        part = next(open_parts[-1], None)
        if part is None:
            open_parts.pop()
            continue
        kind, start, end = part
        taken_bytes += _WEIGHTS[kind]
        if start < end and len(open_parts) < _MAX_DEPTH:
            open_parts.append(_parts(body, kind, start, end))
    return taken_bytes


def _parts(body: bytes, kind: str, at: int, end: int) -> Iterator[tuple[str, int, int]]:
    """(kind, start, end) of each part of a message, up to the first malformed one."""
    inner = _KINDS[kind]
    end = min(end, len(body))
    while at < end:
        try:
            tag, at = varint(body, at)
            wire_type = tag & 7
            if wire_type == DELIMITED:
                size, at = varint(body, at)
                if tag >> 3 in inner:
                    yield inner[tag >> 3], at, at + size
                at += size
            elif wire_type == VARINT:
                _, at = varint(body, at)
            else:
                at += FIXED_BYTES.get(wire_type, 0)
        except PayloadInvalid:
            return


def varint(body: bytes | bytearray, at: int) -> tuple[int, int]:
    """A number of variable length and where it ends. Raises PayloadInvalid over ten bytes."""
    value = 0
    for place, byte in enumerate(body[at : at + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise malformed("a number has no end")


def malformed(reason: str) -> PayloadInvalid:
    """The error of a body that is no protobuf."""
    return PayloadInvalid(f"the body is no ExportTraceServiceRequest: {reason}")
