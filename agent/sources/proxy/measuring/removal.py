"""Takes out of a stream what stands there only because the agent asked the engine to count tokens.

What vLLM 0.32 does when it is asked (`vllm/entrypoints/openai/{chat_completion,completion}/
serving.py`): with `include_usage` one event without choices follows the last one, and the
`system_fingerprint` stands in it instead of in the event in which the choice finishes; with
`continuous_usage_stats` each event has a member `usage`. No event gets `"usage":null`; engines that
write it do so unasked.
"""

import re

from agent.sources.proxy.measuring.events import data_of
from agent.sources.proxy.measuring.members import members, without_member
from agent.sources.proxy.measuring.protocols import Told

_FINGERPRINT = re.compile(rb'"system_fingerprint":"(?:[^"\\]|\\.)*"')


class UsageRemoval:
    """The events of a stream of one choice as they would be if nobody had asked for more.

    The event in which the choice finishes is held back until the next one, which a counting engine
    sends right after it and which has what was taken out of the held one.
    """

    __slots__ = ("_final", "each", "held")

    def __init__(self, *, final: bool, each: bool) -> None:
        self.each = each
        self.held = b""
        self._final = final

    def kept(self, event: bytes, told: Told) -> bytes:
        """What the client is to get when this event came, which may be none or several events."""
        if self._final and told.usage is not None:
            if told.final:
                return self._finish(event)
            # An engine that counts in each event without being asked to does so for any client.
            self._final = self.each
        kept = _without_usage(event) if self.each and told.usage and not told.final else event
        if self._final and told.finishes:
            held, self.held = self.held, kept
            return held
        return self.take_held() + kept

    def take_held(self) -> bytes:
        """The event that is held back, which is not held any more."""
        held, self.held = self.held, b""
        return held

    def _finish(self, event: bytes) -> bytes:
        found = _FINGERPRINT.search(event)
        return _stamped(self.take_held(), found[0] if found else None)


def _stamped(event: bytes, fingerprint: bytes | None) -> bytes:
    if not event or fingerprint is None or b'"system_fingerprint"' in event:
        return event
    end = event.rindex(b"}")
    return event[:end] + b"," + fingerprint + event[end:]


def _without_usage(event: bytes) -> bytes:
    carried = data_of(event)
    if carried is None or carried not in event:
        # Its data stands in several lines, which no engine in sight writes.
        return event
    text = carried.decode()
    return event.replace(carried, without_member(text, members(text), "usage").encode())
