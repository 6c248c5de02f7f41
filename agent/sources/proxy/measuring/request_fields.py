"""Fields of a request body, and the usage options that the proxy adds to it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from agent.sources.proxy.measuring.api_protocols import ApiProtocol
from agent.sources.proxy.measuring.json_keys import json_keys, set_key
from agent.sources.proxy.measuring.json_values import short_text

Values = Mapping[str, Any]


class RequestFields(NamedTuple):
    """What the body of a request contains; unknown is None.

    `body` replaces the client's body on the way to the engine, None leaves it. The `added` flags
    mark usage that the proxy asks for and the client did not: in a last event of the stream, or in
    each event.
    """

    model: str | None = None
    streamed: bool | None = None
    choices: int | None = None
    priority: int | None = None
    body: bytes | None = None
    final_usage_added: bool = False
    chunk_usage_added: bool = False


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
    fields = RequestFields(model, streamed, choices, priority)
    # With usage of several choices, vLLM omits the fingerprint from each of their last events.
    if not (count_tokens and streamed and protocol.usage_on_request and choices == 1):
        return fields
    if _OPTIONS in values:
        wanted = ["include_usage"] + [_CHUNK_USAGE] * continuous_usage
        return _with_usage(fields, body, values[_OPTIONS], wanted)
    begin = body.index(b"{") + 1
    added = _BOTH_USAGES if continuous_usage else _FINAL_USAGE
    edited = body[:begin] + added + body[begin:]
    return RequestFields(model, streamed, choices, priority, edited, True, continuous_usage)


def priority_of(value: object) -> int | None:
    """Return a priority that the store can hold, None for anything else."""
    if type(value) is int and -MAX_CHOICES <= value <= MAX_CHOICES:
        return value
    return None


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
