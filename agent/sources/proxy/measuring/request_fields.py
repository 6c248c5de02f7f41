"""Fields of a request: of its body, its headers, and the media in its messages."""

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from math import isfinite
from typing import Any, NamedTuple

import msgspec

from agent.catalog.reasons import ProxyFailure
from agent.sources.proxy.exchange import OnFailure, RawHeaders
from agent.sources.proxy.measuring.api_protocols import ApiProtocol
from agent.sources.proxy.measuring.json_values import json_keys, set_key, short_text

Values = Mapping[str, Any]


class RequestFields(NamedTuple):
    """What the body of a request contains; unknown is None.

    `body` replaces the client's body on the way to the engine, None leaves it. The `added` flags
    mark usage that the proxy asks for and the client did not: in a last event of the stream, or in
    each event. `session` is what the body says of it: see `_session`.
    """

    model: str | None = None
    streamed: bool | None = None
    choices: int | None = None
    priority: int | None = None
    body: bytes | None = None
    final_usage_added: bool = False
    chunk_usage_added: bool = False
    session: str | None = None


UNKNOWN = RequestFields()

# vLLM's own limit of `n` is 16,384 (`envs.py`, VLLM_MAX_N_SEQUENCES), and a list of prompts is
# shorter than its body.
MAX_CHOICES = 2**31 - 1
_N_DIGITS = 12

# vLLM ignores it without include_usage, so a client that sets it alone gets no counts.
_CHUNK_USAGE = "continuous_usage_stats"
_OPTIONS = "stream_options"
_FINAL_USAGE = b'"stream_options":{"include_usage":true},'
_BOTH_USAGES = b'"stream_options":{"include_usage":true,"continuous_usage_stats":true},'

# A prefix makes the digest differ from a digest of the same secret in another system.
_KEY_DOMAIN = b"goodput-agent tenant of API key\0"
_SALT_DOMAIN = b"goodput-agent session of cache salt\0"
_KEY_DIGITS = 12

# Python objects take up to thirty times the bytes of their JSON, so only this much is built of a
# body. The rest is scanned without building anything.
MAX_BUILT_BYTES = 1024 * 1024
# Stands for a value that is longer.
_TOO_LONG = object()


class _TopFields(msgspec.Struct, gc=False):
    """The fields at the top of a body that are read, as their JSON; other fields are skipped."""

    model: msgspec.Raw = msgspec.Raw()
    stream: msgspec.Raw = msgspec.Raw()
    n: msgspec.Raw = msgspec.Raw()
    priority: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    stream_options: msgspec.Raw = msgspec.Raw()
    prompt_cache_key: msgspec.Raw = msgspec.Raw()
    cache_salt: msgspec.Raw = msgspec.Raw()


_TOP_FIELDS = msgspec.json.Decoder(_TopFields)
_NAMES = _TopFields.__struct_fields__


def read_request_fields(
    body: bytes, protocol: ApiProtocol, *, count_tokens: bool, continuous_usage: bool
) -> RequestFields:
    """Return the fields of a body; `UNKNOWN` unless it is one JSON object.

    Of a repeated key the last value counts, as in the engines' own parsers. `count_tokens` adds
    usage to a stream, `continuous_usage` adds it to each event.
    """
    try:
        values = _values(body)
    except (ValueError, RecursionError):
        return UNKNOWN
    model, streamed = short_text(values.get("model")), values.get("stream") is True
    choices = _choices(values)
    priority = priority_of(values.get("priority"))
    fields = RequestFields(model, streamed, choices, priority, session=_session(values))
    # With usage of several choices, vLLM omits the fingerprint from each of their last events.
    if not (count_tokens and streamed and protocol.usage_on_request and choices == 1):
        return fields
    if _OPTIONS in values:
        wanted = ["include_usage"] + [_CHUNK_USAGE] * continuous_usage
        return _with_usage(fields, body, values[_OPTIONS], wanted)
    begin = body.index(b"{") + 1
    added = _BOTH_USAGES if continuous_usage else _FINAL_USAGE
    edited = body[:begin] + added + body[begin:]
    return fields._replace(body=edited, final_usage_added=True, chunk_usage_added=continuous_usage)


def priority_of(value: object) -> int | None:
    """Return a priority that the store can hold, None for anything else."""
    if type(value) is int and -MAX_CHOICES <= value <= MAX_CHOICES:
        return value
    return None


def _session(values: Values) -> str | None:
    """Return the key by which requests share a prefix in the cache, as that of their session.

    `prompt_cache_key` is OpenAI's. vLLM's `cache_salt` is a secret: only a digest leaves this
    function.
    """
    key = short_text(values.get("prompt_cache_key"))
    if key is not None:
        return key
    salt = values.get("cache_salt")
    if not isinstance(salt, str) or not salt:
        return None
    digest = sha256(_SALT_DOMAIN + salt.encode("utf-8", "surrogatepass")).hexdigest()
    return f"salt-{digest[:_KEY_DIGITS]}"


def _values(body: bytes) -> Values:
    """Return the fields at the top of a JSON object. Raises ValueError and RecursionError."""
    try:
        found = _TOP_FIELDS.decode(body)
    except ValueError:
        if len(body) > MAX_BUILT_BYTES:
            raise
        return _written_by_python(body)
    return {name: _value(text) for name in _NAMES if (text := getattr(found, name))}


def _written_by_python(body: bytes) -> Values:
    """Read JSON with NaN, Infinity or half a surrogate pair, which Python's `json` writes."""
    values = json.loads(body.decode())
    if not isinstance(values, dict):
        raise ValueError("no object")
    return values


def _value(text: msgspec.Raw) -> Any:
    return msgspec.json.decode(text) if len(text) <= MAX_BUILT_BYTES else _TOO_LONG


def _choices(values: Values) -> int | None:
    """Return how many choices are asked for; None for a number that no engine takes."""
    prompts = _prompts(values)
    choices = None if prompts is None else _repetitions(values.get("n")) * prompts
    return choices if choices is None or choices <= MAX_CHOICES else None


def _repetitions(value: Any) -> int:
    """Return `n`; vLLM and SGLang also take 2.0 and "2" for it."""
    if isinstance(value, str) and value.isdecimal() and len(value) <= _N_DIGITS:
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and value > 0 else 1


def _prompts(values: Values) -> int | None:
    """Return the number of prompts: a list is one prompt of token ids, or several prompts.

    None if the prompts are too long to be counted.
    """
    value = values.get("prompt")
    if value is _TOO_LONG:
        return None
    if isinstance(value, list) and value and isinstance(value[0], list | str):
        return len(value)
    return 1


def _with_usage(
    fields: RequestFields, body: bytes, options: Any, wanted: Sequence[str]
) -> RequestFields:
    """Add the wanted usage to the client's own options."""
    values = {} if options is None else options
    # Leave any other value to the engine, which may reject it.
    if not isinstance(values, dict) or any(
        values.get(name) not in (True, False, None) for name in wanted
    ):
        return fields
    missing = [name for name in wanted if not values.get(name)]
    if not missing or len(body) > MAX_BUILT_BYTES:
        return fields
    try:
        edited = _with_options(body.decode(), missing)
    except (ValueError, RecursionError):
        return fields
    final = "include_usage" in missing
    return fields._replace(
        body=edited.encode(),
        final_usage_added=final,
        chunk_usage_added=_CHUNK_USAGE in missing or (final and values.get(_CHUNK_USAGE) is True),
    )


def _with_options(text: str, names: Sequence[str]) -> str:
    """Return the body with these options set. Raises ValueError if a key is repeated."""
    keys = json_keys(text)
    options = keys[_OPTIONS]
    options_text = "{}" if options.value is None else text[options.begin : options.end]
    for name in names:
        options_text = set_key(options_text, json_keys(options_text), name, "true")
    return set_key(text, keys, _OPTIONS, options_text)


# The first value of each header.
Headers = Mapping[bytes, bytes]

REQUEST_ID = b"x-request-id"
_PRIORITY = b"x-vllm-priority"


def by_name(headers: RawHeaders) -> Headers:
    """Return the headers by name, with the first value of a repeated header."""
    return dict(reversed(headers))


def request_id_of(headers: Headers) -> str | None:
    """Return the client's request id; None if it sent none, or none that is a printable text of at
    most 256 characters."""
    return _header_text(headers, REQUEST_ID)


def tenant_of(headers: Headers, tenant_header: bytes | None) -> str | None:
    """Return the tenant from the configured header, else a digest of the API key, else None."""
    named = _header_text(headers, tenant_header) if tenant_header else None
    if named:
        return named
    key = _api_key(headers)
    return f"key-{sha256(_KEY_DOMAIN + key).hexdigest()[:_KEY_DIGITS]}" if key else None


def client_name(headers: Headers, header: bytes | None) -> str | None:
    """Return the value of a configured header; None without one of at most 256 characters."""
    return _header_text(headers, header) if header else None


def priority_header(headers: Headers) -> int | None:
    """Return the priority of vLLM's own header, which wins over the one in the body."""
    value = headers.get(_PRIORITY)
    if value is None:
        return None
    try:
        return priority_of(int(value))
    except ValueError:
        return None


def limit_s(headers: Headers, name: bytes, on_failure: OnFailure) -> float | None:
    """Return the limit in seconds of a header in milliseconds; None without the header.

    A value that is not a positive finite number is ignored and counted as a failure.
    """
    value = headers.get(name)
    if value is None:
        return None
    try:
        limit_ms = float(value)
    except ValueError:
        limit_ms = 0.0
    if isfinite(limit_ms) and limit_ms > 0:
        return limit_ms / 1000
    on_failure(ProxyFailure.SLO_HEADER)
    return None


def _header_text(headers: Headers, name: bytes) -> str | None:
    value = headers.get(name)
    if value is None:
        return None
    try:
        return short_text(value.decode().strip())
    except UnicodeDecodeError:
        return None


def _api_key(headers: Headers) -> bytes | None:
    scheme, _, token = headers.get(b"authorization", b"").strip().partition(b" ")
    if scheme.lower() == b"bearer" and token.strip():
        return token.strip()
    return headers.get(b"x-api-key", b"").strip() or None


# Each object of the messages is built once, in about 100 bytes.
MAX_OBJECTS = 50_000
_LONGEST_TYPE = 200


class MediaParts(NamedTuple):
    """The media of a request. `bytes_` are those that the request itself holds, decoded."""

    parts: int
    bytes_: int


NO_MEDIA = MediaParts(0, 0)


class _MediaFields(msgspec.Struct, gc=False):
    """The fields that hold the messages of a request."""

    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


class _MessageContent(msgspec.Struct, gc=False):
    content: msgspec.Raw = msgspec.Raw()


class _ContentPart(msgspec.Struct, gc=False):
    """A part of a message's content, in the words of OpenAI, vLLM and Anthropic."""

    type: Any = None
    image_url: msgspec.Raw = msgspec.Raw()
    video_url: msgspec.Raw = msgspec.Raw()
    audio_url: msgspec.Raw = msgspec.Raw()
    input_audio: msgspec.Raw = msgspec.Raw()
    source: msgspec.Raw = msgspec.Raw()


class _MediaSource(msgspec.Struct, gc=False):
    url: msgspec.Raw = msgspec.Raw()
    data: msgspec.Raw = msgspec.Raw()


# The type of a part, and the key of its media.
_MEDIA = {
    "image_url": "image_url",
    "input_image": "image_url",
    "video_url": "video_url",
    "audio_url": "audio_url",
    "input_audio": "input_audio",
    "image": "source",
}
_TYPE = b'"type"'
_BODY = msgspec.json.Decoder(_MediaFields)
_MESSAGES = msgspec.json.Decoder(list[_MessageContent])
_PARTS = msgspec.json.Decoder(list[_ContentPart])
_SOURCE = msgspec.json.Decoder(_MediaSource)


class DeferredMedia:
    """The media of a request, read once: after it was sent, because it must not wait for that."""

    __slots__ = ("_found", "_unread")

    def __init__(self, body: bytes | None) -> None:
        self._unread = body
        self._found: MediaParts | None = None

    def read(self) -> MediaParts | None:
        """Return the media, and keep the body no longer; None if they cannot be read."""
        body, self._unread = self._unread, None
        if body is not None:
            self._found = media_in(body)
        return self._found


def media_in(body: bytes) -> MediaParts | None:
    """Return the media in the messages of a body; None if they cannot be read.

    Nothing is built of texts and media, which may be long.
    """
    # Each part names its type, and plain chats have no parts.
    if _TYPE not in body:
        return NO_MEDIA
    if body.count(b"{") > MAX_OBJECTS:
        return None
    try:
        found = _BODY.decode(body)
        messages = found.messages or found.input
        # `/v1/responses` takes a plain text, too.
        parts = _parts_of(messages) if _begins(messages, b"[") else []
        return MediaParts(len(parts), sum(map(_bytes_of, parts)))
    except (ValueError, RecursionError):
        return None


def _parts_of(messages: msgspec.Raw) -> list[msgspec.Raw]:
    """The media of each part that is one."""
    return [
        getattr(part, _MEDIA[part.type])
        for message in _MESSAGES.decode(messages)
        if _begins(message.content, b"[")
        for part in _PARTS.decode(message.content)
        if isinstance(part.type, str) and part.type in _MEDIA
    ]


def _begins(text: msgspec.Raw, with_: bytes) -> bool:
    return bytes(memoryview(text)[: len(with_)]) == with_


def _bytes_of(media: msgspec.Raw) -> int:
    """The bytes of a `data:` URL or of base64 data; 0 of any other URL."""
    text = memoryview(media)
    if _begins(media, b"{"):
        source = _SOURCE.decode(media)
        if source.data:
            return _decoded_length(memoryview(source.data)[1:-1])
        text = memoryview(source.url)
    if bytes(text[:6]) != b'"data:':
        return 0
    head, comma, _ = bytes(text[:_LONGEST_TYPE]).partition(b",")
    if not comma:
        return 0
    data = text[len(head) + 1 : -1]
    return _decoded_length(data) if head.endswith(b";base64") else len(data)


def _decoded_length(base64: memoryview) -> int:
    """The bytes behind base64, padded or not, in a JSON text that may write `/` as `\\/`."""
    escapes = bytes(base64).count(b"\\")
    return (len(base64) - escapes - bytes(base64[-2:]).count(b"=")) * 3 // 4
