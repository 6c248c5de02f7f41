"""Joins the engine's figures of a request with its HTTP request, in the process that has both."""

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from goodput_agent_vllm.datagrams import REQUEST_RECORD

# An HTTP request that ended waits this long for figures of the engine; mostly they come first.
WAIT_S = 1.0
# Figures without an HTTP request, as those of other routes, are sent by themselves after this.
HELD_S = 2.0
MAX_HELD = 16_384

# The engine begins a request after its arrival. Both times are of one clock, but that may be set.
_SLACK_S = 0.1

# The engine's id of a request, and what joins it with the number of a part.
Key = tuple[str, str]

# vLLM numbers the prompts of a completion, `cmpl-x-0`, and the turns of a response, `resp_x_0`: it
# asks the engine again after each call of a tool of its own.
_TURNS = "_"
_JOINTS = {"/v1/completions": "-", "/v1/responses": _TURNS}

Figures = list[bytes]


def key_of(engine_id: str, route: str | None) -> Key:
    """The key of an HTTP request that vLLM gave this id."""
    return engine_id, _JOINTS.get(route or "", "")


@dataclass(eq=False, slots=True)
class Waiting:
    """An ended HTTP request that waits for the figures of its choices.

    `began_at` and `ended_at` are Unix times. `served` gets the figures, once.
    """

    key: Key
    choices: int
    began_at: float
    ended_at: float
    served: Callable[[Figures], None]
    until_s: float = 0.0
    figures: Figures = field(default_factory=list)

    @property
    def wanted(self) -> int | None:
        """How many figures are missing; None of a response, of which any turn may be one."""
        return None if self.key[1] == _TURNS else self.choices - len(self.figures)

    @property
    def is_complete(self) -> bool:
        """Whether the figures of all choices have come."""
        return len(self.figures) >= self.choices

    def fits(self, began_at: float) -> bool:
        """Whether the engine may have begun this request then: clients repeat ids."""
        # An unknown time, NaN, is neither before nor after.
        return not (began_at < self.began_at - _SLACK_S or began_at > self.ended_at + _SLACK_S)

    def unlikeness(self, began_at: float) -> tuple[bool, float]:
        """How unlikely it is that the engine began this request then, to choose among several."""
        return began_at < self.began_at, abs(began_at - self.began_at)


class _Held:
    """The figures of a choice that ended, and the keys of the HTTP requests that they may be of."""

    __slots__ = ("began_at", "keys", "record", "taken", "until_s")

    def __init__(self, engine_id: str, record: bytes, until_s: float) -> None:
        self.keys = _keys_of_part(engine_id)
        self.record = record
        self.until_s = until_s
        self.taken = False
        values = REQUEST_RECORD.unpack_from(record)
        ended_at, e2e_s = values[3], values[11]
        self.began_at: float = ended_at - e2e_s


def _keys_of_part(engine_id: str) -> list[Key]:
    keys = [(engine_id, "")]
    for joint in _JOINTS.values():
        owner, _, number = engine_id.rpartition(joint)
        if owner and number.isdecimal():
            keys.append((owner, joint))
    return keys


class HeldFigures:
    """Figures of ended requests until their HTTP request ends, and the other way round.

    Clients repeat ids, so a key may have several: those that the engine began next after the
    arrival of the HTTP request are its own.
    """

    def __init__(self) -> None:
        self._held: dict[Key, list[_Held]] = {}
        self._waiting: dict[Key, list[Waiting]] = {}
        # In the order of arrival, with those that were taken since.
        self._held_since: deque[_Held] = deque()
        self._waiting_since: deque[Waiting] = deque()

    @property
    def waits(self) -> bool:
        """Whether anything waits for a time."""
        return bool(self._held_since or self._waiting_since)

    @property
    def is_full(self) -> bool:
        """Whether figures must be sent by themselves before their time."""
        return len(self._held_since) > MAX_HELD

    def hold(self, engine_id: str, record: bytes, now_s: float) -> Waiting | None:
        """Keep the figures of a choice that ended; returns the HTTP request that they complete."""
        held = _Held(engine_id, record, now_s + HELD_S)
        found = [
            waiting
            for key in held.keys
            for waiting in self._waiting.get(key, ())
            if waiting.fits(held.began_at)
        ]
        if not found:
            self._held_since.append(held)
            for key in held.keys:
                self._held.setdefault(key, []).append(held)
            return None
        nearest = min(found, key=lambda waiting: waiting.unlikeness(held.began_at))
        nearest.figures.append(record)
        if not nearest.is_complete:
            return None
        self._forget_waiting(nearest)
        return nearest

    def take(self, waiting: Waiting) -> None:
        """Give an HTTP request the figures of its choices, as far as they have come."""
        fitting = [each for each in self._held.get(waiting.key, ()) if waiting.fits(each.began_at)]
        fitting.sort(key=lambda held: waiting.unlikeness(held.began_at))
        taken = fitting[: waiting.wanted]
        waiting.figures += [held.record for held in taken]
        self._drop(taken)

    def wait(self, waiting: Waiting, now_s: float) -> None:
        """Let an ended HTTP request wait for figures that did not come yet."""
        waiting.until_s = now_s + WAIT_S
        self._waiting.setdefault(waiting.key, []).append(waiting)
        self._waiting_since.append(waiting)

    def due(self, now_s: float) -> list[Waiting]:
        """HTTP requests that have waited for long enough."""
        found: list[Waiting] = []
        while self._waiting_since:
            oldest = self._waiting_since[0]
            if not oldest.is_complete:
                if now_s < oldest.until_s:
                    break
                self._forget_waiting(oldest)
                found.append(oldest)
            self._waiting_since.popleft()
        return found

    def overdue(self, now_s: float, open_keys: Callable[[], Collection[Key]]) -> Figures:
        """Figures to be sent by themselves, unless an HTTP request with their key is open."""
        found: list[_Held] = []
        kept: Collection[Key] | None = None
        for _ in range(len(self._held_since)):
            oldest = self._held_since[0]
            if not oldest.taken and now_s < oldest.until_s and not self.is_full:
                break
            self._held_since.popleft()
            if oldest.taken:
                continue
            if kept is None:
                kept = open_keys()
            if len(self._held_since) < MAX_HELD and any(key in kept for key in oldest.keys):
                oldest.until_s = now_s + HELD_S
                self._held_since.append(oldest)
            else:
                found.append(oldest)
        self._drop(found)
        return [held.record for held in found]

    def _drop(self, taken: Iterable[_Held]) -> None:
        keys: set[Key] = set()
        for held in taken:
            held.taken = True
            keys.update(held.keys)
        for key in keys:
            left = [held for held in self._held[key] if not held.taken]
            if left:
                self._held[key] = left
            else:
                del self._held[key]

    def _forget_waiting(self, waiting: Waiting) -> None:
        left = self._waiting[waiting.key]
        left.remove(waiting)
        if not left:
            del self._waiting[waiting.key]
