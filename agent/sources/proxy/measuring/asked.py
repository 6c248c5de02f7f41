"""What a request asks for, and what of it the engine is asked in addition."""

from dataclasses import dataclass, replace

from agent.sources.proxy.measuring.members import Member, members, with_member
from agent.sources.proxy.measuring.protocols import Protocol
from agent.sources.proxy.measuring.words import word

Members = dict[str, Member]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
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
_ONLY_USAGE = '{"include_usage":true}'


def read_asked(body: bytes, protocol: Protocol, *, counted: bool, continuous: bool) -> Asked:
    """What the body says; nothing where it is not one JSON object whose names differ.

    With `counted` a stream is asked to count its tokens, with `continuous` in each event.
    """
    try:
        text = body.decode()
        found = members(text)
    except (ValueError, RecursionError):
        return UNKNOWN
    streamed = "stream" in found and found["stream"].value is True
    model = word(found["model"].value) if "model" in found else None
    choices = _times(found) * _prompts(found)
    asked = Asked(model=model, streamed=streamed, choices=choices)
    # Where it counts several choices, vLLM takes the fingerprint out of each of their last events.
    if not (counted and streamed and protocol.usage_asked and choices == 1):
        return asked
    return _with_counts(asked, text, found, continuous=continuous)


def _times(found: Members) -> int:
    value = found["n"].value if "n" in found else None
    return value if type(value) is int and value > 0 else 1


def _prompts(found: Members) -> int:
    """How many prompts there are: a list may be one prompt as tokens, or several of any form."""
    value = found["prompt"].value if "prompt" in found else None
    if isinstance(value, list) and value and isinstance(value[0], list | str):
        return len(value)
    return 1


def _with_counts(asked: Asked, text: str, found: Members, *, continuous: bool) -> Asked:
    options = found.get("stream_options")
    if (options is None or options.value is None) and not continuous:
        return replace(asked, body=_written(text, found, _ONLY_USAGE), final=True)
    written = (
        "{}" if options is None or options.value is None else text[options.begin : options.end]
    )
    try:
        present = members(written)
    except ValueError:
        return asked
    wanted = ["include_usage"] + [_EACH] * continuous
    # Whatever else stands there is for the engine to judge.
    if any(name in present and present[name].value not in (True, False, None) for name in wanted):
        return asked
    missing = [name for name in wanted if name not in present or not present[name].value]
    for name in missing:
        written = with_member(written, members(written), name, "true")
    final = "include_usage" in missing
    return replace(
        asked,
        body=_written(text, found, written) if missing else None,
        final=final,
        each=_EACH in missing or (final and _is_true(present, _EACH)),
    )


def _written(text: str, found: Members, options: str) -> bytes:
    return with_member(text, found, "stream_options", options).encode()


def _is_true(found: Members, name: str) -> bool:
    return name in found and found[name].value is True
