"""Splits a protobuf export into small ones, and bounds their memory, without parsing them.

Each piece is an export of its own: some spans with their resource and scope. Two bytes can encode
an empty span, which takes 168 bytes in memory, so a few kilobytes of gzip could take gigabytes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from agent.errors import PayloadInvalid, PayloadTooLarge
from agent.sources.otlp.limits import MAX_PARTS, MAX_SPAN_BYTES, PIECE_BYTES, PIECE_SPANS

# Field 1 of the export, field 2 of a resource's spans and field 2 of a scope's spans.
_RESOURCE_SPANS = 0x0A
_SCOPE_SPANS = 0x12
_SPAN = 0x12

# Wire types of protobuf, and the bytes of those with a fixed length.
VARINT, DELIMITED = 0, 2
FIXED_BYTES = {1: 8, 5: 4}
_LEAST_TAG = 1 << 3

# Protobuf: a number has 64 bits at most, and 7 in a byte.
_MAX_VARINT_BYTES = 10

# (tag, start of the field, start of its content, end)
_Field = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Piece:
    """An export, and how many spans and resources of the body were too large for it.

    `continues`: its first resource is the last of the piece before.
    """

    content: bytes
    large_spans: int
    large_resources: int
    continues: bool


def split(body: bytes | bytearray) -> Iterator[Piece]:
    """The pieces of a body. Raises PayloadInvalid and PayloadTooLarge."""
    walk, building = _Walk(body), _Building()
    for tag, _, inner, end in walk.fields(0, len(body)):
        if tag == _RESOURCE_SPANS:
            yield from _split_resource(walk, building, inner, end)
    last = building.take()
    if last.content or last.large_spans or last.large_resources:
        yield last


def _split_resource(walk: "_Walk", building: "_Building", start: int, end: int) -> Iterator[Piece]:
    building.begin_resource(walk.header(start, end))
    for tag, _, inner, scope_end in walk.fields(start, end):
        if tag == _SCOPE_SPANS:
            for run, spans in _runs(walk, building, inner, scope_end):
                building.add(run, spans)
                if building.is_full:
                    yield building.take()


def _runs(
    walk: "_Walk", building: "_Building", start: int, end: int
) -> Iterator[tuple[bytes, int]]:
    """(bytes, spans) of the parts of a scope's spans; each begins with what is before the spans."""
    body = walk.body
    prefix: bytes | None = None
    run_start, spans = start, 0
    for tag, at, _, field_end in walk.fields(start, end):
        if tag == _SPAN:
            if prefix is None:
                prefix = bytes(body[start:at]) if at - start <= PIECE_BYTES else b""
                run_start = at
            spans += 1
        if field_end - at > MAX_SPAN_BYTES:
            building.large_spans += tag == _SPAN
            if at > run_start:
                yield (prefix or b"") + body[run_start:at], spans - (tag == _SPAN)
            run_start, spans = field_end, 0
        elif field_end - run_start >= PIECE_BYTES or spans >= PIECE_SPANS:
            yield (prefix or b"") + body[run_start:field_end], spans
            run_start, spans = field_end, 0
    if spans:
        yield (prefix or b"") + body[run_start:end], spans


class _Building:
    """The next piece."""

    def __init__(self) -> None:
        self.large_spans = 0
        self._large_resources = 0
        self._resources: list[bytes] = []
        self._header = b""
        self._scopes: list[bytes] = []
        self._again = False  # the resource was in the piece before
        self._continues = False
        self._size_bytes = 0
        self._parts = 0

    @property
    def is_full(self) -> bool:
        """Whether it has the size of a piece."""
        return self._size_bytes >= PIECE_BYTES or self._parts >= PIECE_SPANS

    def begin_resource(self, header: bytes | None) -> None:
        """Add spans of another resource from now on; None is a resource that is too large."""
        self._end_resource()
        if header is None:
            self._large_resources += 1
        self._header = header or b""
        self._again = False
        # A header that comes again in the next piece does not count, so pieces stay few.
        self._size_bytes += len(self._header)

    def add(self, scope_spans: bytes, spans: int) -> None:
        """Add spans of a scope."""
        self._scopes.append(_delimited(_SCOPE_SPANS, scope_spans))
        self._size_bytes += len(scope_spans)
        self._parts += max(spans, 1)

    def take(self) -> Piece:
        """The piece; the next one goes on with the same resource."""
        self._end_resource()
        piece = Piece(
            b"".join(self._resources), self.large_spans, self._large_resources, self._continues
        )
        self._resources.clear()
        self._continues = False
        self.large_spans = self._large_resources = self._size_bytes = self._parts = 0
        return piece

    def _end_resource(self) -> None:
        if self._scopes:
            if not self._resources:
                self._continues = self._again
            self._again = True
            content = b"".join((self._header, *self._scopes))
            self._resources.append(_delimited(_RESOURCE_SPANS, content))
            self._scopes.clear()


class _Walk:
    """Goes over the fields of a body, up to a number of them."""

    def __init__(self, body: bytes | bytearray) -> None:
        self.body = body
        self._left = MAX_PARTS

    def header(self, start: int, end: int) -> bytes | None:
        """The fields of a resource's spans beside the spans; None where they are too large."""
        fields = [
            (at, field_end)
            for tag, at, _, field_end in self.fields(start, end)
            if tag != _SCOPE_SPANS
        ]
        if sum(field_end - at for at, field_end in fields) > MAX_SPAN_BYTES:
            return None
        return b"".join(self.body[at:field_end] for at, field_end in fields)

    def fields(self, at: int, end: int) -> Iterator[_Field]:
        """The fields of one message."""
        body = self.body
        while at < end:
            self._left -= 1
            if self._left < 0:
                raise PayloadTooLarge(
                    f"the body holds over {MAX_PARTS} spans, scopes and resources; "
                    "send smaller batches"
                )
            start = at
            tag, at = varint(body, at)
            if tag < _LEAST_TAG:
                raise malformed("a field has the number 0")
            inner, at = self._content(tag & 7, at)
            if at > end:
                raise malformed("a field is longer than what holds it")
            yield tag, start, inner, at

    def _content(self, wire_type: int, at: int) -> tuple[int, int]:
        """Where the content of a field begins and ends."""
        if wire_type == DELIMITED:
            size_bytes, at = varint(self.body, at)
            return at, at + size_bytes
        if wire_type == VARINT:
            return at, varint(self.body, at)[1]
        if wire_type in FIXED_BYTES:
            return at, at + FIXED_BYTES[wire_type]
        raise malformed(f"a field has the wire type {wire_type}")


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


def _delimited(tag: int, content: bytes) -> bytes:
    length, left = bytearray((tag,)), len(content)
    while left > 0x7F:
        length.append(left & 0x7F | 0x80)
        left >>= 7
    length.append(left)
    return bytes(length) + content


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
