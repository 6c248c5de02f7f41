"""Fields of a request body, and the usage options that the proxy adds to it."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

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
    body: bytes | None = None
    final_usage_added: bool = False
    chunk_usage_added: bool = False


UNKNOWN = RequestFields()

# vLLM's own limit of `n` is 16,384 (`envs.py`, VLLM_MAX_N_SEQUENCES), and a list of prompts is
# shorter than its body.
MAX_CHOICES = 2**31 - 1

# vLLM ignores it without include_usage, so a client that sets it alone gets no counts.
_CHUNK_USAGE = "continuous_usage_stats"
_OPTIONS = "stream_options"
_ONLY_USAGE = b'"stream_options":{"include_usage":true},'

# Objects become tuples of their pairs, so that a repeated key is noticed.
_PAIRS = json.JSONDecoder(object_pairs_hook=tuple)


def read_request_fields(
    body: bytes, protocol: ApiProtocol, *, count_tokens: bool, continuous_usage: bool
) -> RequestFields:
    """Return the fields of a body; `UNKNOWN` unless it is one JSON object without repeated keys.

    `count_tokens` adds usage to a stream, `continuous_usage` adds it to each event.
    """
    try:
        text = body.decode()
        values = _values(text)
    except (ValueError, RecursionError):
        return UNKNOWN
    model, streamed = short_text(values.get("model")), values.get("stream") is True
    choices = _choices(values)
    fields = RequestFields(model, streamed, choices)
    # With usage of several choices, vLLM omits the fingerprint from each of their last events.
    if not (count_tokens and streamed and protocol.usage_on_request and choices == 1):
        return fields
    if _OPTIONS in values or continuous_usage:
        return _with_usage(fields, text, continuous_usage=continuous_usage)
    begin = body.index(b"{") + 1
    return fields._replace(body=body[:begin] + _ONLY_USAGE + body[begin:], final_usage_added=True)


def _values(text: str) -> Values:
    """Return the values of a JSON object by key. Raises ValueError as `json_keys` does."""
    pairs = _PAIRS.decode(text)
    if type(pairs) is not tuple:
        raise ValueError("no object")
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key is repeated")
    return values


def _choices(values: Values) -> int | None:
    """Return how many choices are asked for; None for a number that no engine takes."""
    value = values.get("n")
    repetitions = value if type(value) is int and value > 0 else 1
    choices = repetitions * _prompts(values)
    return choices if choices <= MAX_CHOICES else None


def _prompts(values: Values) -> int:
    """Return the number of prompts: a list is one prompt of token ids, or several prompts."""
    value = values.get("prompt")
    if isinstance(value, list) and value and isinstance(value[0], list | str):
        return len(value)
    return 1


def _with_usage(fields: RequestFields, text: str, *, continuous_usage: bool) -> RequestFields:
    keys = json_keys(text)
    options = keys.get(_OPTIONS)
    options_text = (
        "{}" if options is None or options.value is None else text[options.begin : options.end]
    )
    try:
        present = json_keys(options_text)
    except ValueError:
        return fields
    values = {name: key.value for name, key in present.items()}
    wanted = ["include_usage"] + [_CHUNK_USAGE] * continuous_usage
    # Leave any other value to the engine, which may reject it.
    if any(values.get(name) not in (True, False, None) for name in wanted):
        return fields
    missing = [name for name in wanted if not values.get(name)]
    for name in missing:
        options_text = set_key(options_text, json_keys(options_text), name, "true")
    final = "include_usage" in missing
    return fields._replace(
        body=set_key(text, keys, _OPTIONS, options_text).encode() if missing else None,
        final_usage_added=final,
        chunk_usage_added=_CHUNK_USAGE in missing or (final and values.get(_CHUNK_USAGE) is True),
    )
