"""What a request asks for, and what of it the engine is asked in addition."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from agent.sources.proxy.measuring.members import members, with_member
from agent.sources.proxy.measuring.protocols import Protocol
from agent.sources.proxy.measuring.words import word

Values = Mapping[str, Any]


class Asked(NamedTuple):
    """What the body of a request says; unknown None.

    `body` is what the engine is to get in its place, None where that is the body itself. `final`
    and `each` say that this asks for token counts that the client did not ask for: at the end of
    the stream, and with each of its events.
    """

    model: str | None = None
    streamed: bool | None = None
    choices: int | None = None
    body: bytes | None = None
    final: bool = False
    each: bool = False


UNKNOWN = Asked()

# Without include_usage it does nothing in vLLM, so a client that sets it alone gets no counts.
_EACH = "continuous_usage_stats"
_OPTIONS = "stream_options"
_ONLY_USAGE = b'"stream_options":{"include_usage":true},'

# Objects become tuples of their members, so that a name that stands twice is seen.
_MEMBERS = json.JSONDecoder(object_pairs_hook=tuple)


def read_asked(body: bytes, protocol: Protocol, *, counted: bool, continuous: bool) -> Asked:
    """What the body says; nothing where it is not one JSON object whose names differ.

    With `counted` a stream is asked to count its tokens, with `continuous` in each event.
    """
    try:
        text = body.decode()
        found = _values(text)
    except (ValueError, RecursionError):
        return UNKNOWN
    model, streamed = word(found.get("model")), found.get("stream") is True
    choices = _times(found) * _prompts(found)
    # Where it counts several choices, vLLM takes the fingerprint out of each of their last events.
    if not (counted and streamed and protocol.usage_asked and choices == 1):
        return Asked(model, streamed, choices)
    if _OPTIONS in found or continuous:
        return _with_counts(Asked(model, streamed, choices), text, continuous=continuous)
    begin = body.index(b"{") + 1
    return Asked(model, streamed, choices, body[:begin] + _ONLY_USAGE + body[begin:], final=True)


def _values(text: str) -> Values:
    """The values of the object that the text is, by name; ValueError as of `members`."""
    pairs = _MEMBERS.decode(text)
    if type(pairs) is not tuple:
        raise ValueError("no object")
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name stands twice")
    return values


def _times(found: Values) -> int:
    value = found.get("n")
    return value if type(value) is int and value > 0 else 1


def _prompts(found: Values) -> int:
    """How many prompts there are: a list may be one prompt as tokens, or several of any form."""
    value = found.get("prompt")
    if isinstance(value, list) and value and isinstance(value[0], list | str):
        return len(value)
    return 1


def _with_counts(asked: Asked, text: str, *, continuous: bool) -> Asked:
    found = members(text)
    options = found.get(_OPTIONS)
    written = (
        "{}" if options is None or options.value is None else text[options.begin : options.end]
    )
    try:
        present = members(written)
    except ValueError:
        return asked
    values = {name: member.value for name, member in present.items()}
    wanted = ["include_usage"] + [_EACH] * continuous
    # Whatever else stands there is for the engine to judge.
    if any(values.get(name) not in (True, False, None) for name in wanted):
        return asked
    missing = [name for name in wanted if not values.get(name)]
    for name in missing:
        written = with_member(written, members(written), name, "true")
    final = "include_usage" in missing
    return asked._replace(
        body=with_member(text, found, _OPTIONS, written).encode() if missing else None,
        final=final,
        each=_EACH in missing or (final and values.get(_EACH) is True),
    )
