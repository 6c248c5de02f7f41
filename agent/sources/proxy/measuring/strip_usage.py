"""Strips from a stream the usage that is there only because the proxy asked for it.

vLLM 0.32 (`vllm/entrypoints/openai/{chat_completion,completion}/serving.py`) does the following.
With `include_usage`, one event without choices follows the last one, and has the
`system_fingerprint` that otherwise is in the event of the finish reason. With
`continuous_usage_stats`, each event has a key `usage`. No event gets `"usage":null`: engines that
write it do so without being asked.
"""

import json
import re

from agent.sources.proxy.measuring.json_keys import json_keys, remove_key
from agent.sources.proxy.measuring.parsed_event import ParsedEvent
from agent.sources.proxy.measuring.sse_events import data_of, only_data

_DECODER = json.JSONDecoder()
_USAGE_NAME = b'"usage"'
_USAGE = re.compile(rb',[ \t]*"usage"[ \t]*:[ \t]*')
_FINGERPRINT = re.compile(rb'"system_fingerprint"\s*:\s*"(?:[^"\\]|\\.)*"')


class UsageStripper:
    """Rewrites the events of a stream of one choice to what the client asked for.

    The event with the finish reason is held until the next event: an engine that counts sends that
    one right after it, and the held event gets the next event's fingerprint.
    """

    __slots__ = ("_final", "each", "held")

    def __init__(self, *, final: bool, each: bool) -> None:
        self.each = each
        self.held = b""
        self._final = final

    def stripped(self, event: bytes, parsed: ParsedEvent) -> bytes:
        """Return the bytes for the client after this event: none, one, or several events."""
        if self._final and parsed.usage is not None:
            if parsed.usage_only:
                return self._finish(event)
            # An engine that counts in each event without being asked does so for any client.
            self._final = self.each
        strip = self.each and parsed.usage and not parsed.usage_only
        kept = _without_usage(event) if strip else event
        if self._final and parsed.finish_reasons:
            held, self.held = self.held, kept
            return held
        return self.take_held() + kept

    def take_held(self) -> bytes:
        """Return the held event and forget it."""
        held, self.held = self.held, b""
        return held

    def _finish(self, event: bytes) -> bytes:
        fingerprint = _FINGERPRINT.search(event)
        return _with_fingerprint(self.take_held(), fingerprint[0] if fingerprint else None)


def _with_fingerprint(event: bytes, fingerprint: bytes | None) -> bytes:
    if not event or fingerprint is None or b'"system_fingerprint"' in event:
        return event
    end = event.rindex(b"}")
    return event[:end] + b"," + fingerprint + event[end:]


def _without_usage(event: bytes) -> bytes:
    match = _USAGE.search(event)
    # Its name occurs once, so it is the key that was read.
    if match and event.count(_USAGE_NAME) == 1 and only_data(event) is not None:
        rest = event[match.end() :].decode()
        _, end = _DECODER.raw_decode(rest)
        return event[: match.start()] + rest[end:].encode()
    return _with_key_removed(event)


def _with_key_removed(event: bytes) -> bytes:
    data = data_of(event)
    if data is None or data not in event:
        # The data spans several lines. No known engine writes that.
        return event
    text = data.decode()
    return event.replace(data, remove_key(text, json_keys(text), "usage").encode())
