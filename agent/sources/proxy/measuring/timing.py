"""When the tokens of one answer came."""

from agent.analysis.latency import tpot_s
from agent.analysis.quantiles import bin_of

_NO_GAP = bin_of(0.0)


class TokenTiming:
    """Moments and gaps of one stream, on the clock that the moments are from.

    A gap is the time between two events with generated text; those that arrived in one piece are
    no time apart. `chunk_tokens` is the most tokens that such an event held after the first one,
    None where that is not known of all of them.
    """

    __slots__ = (
        "_counted",
        "chunk_tokens",
        "finished_s",
        "first_s",
        "first_tokens",
        "gaps",
        "last_s",
        "max_gap_s",
        "visible_s",
    )

    def __init__(self) -> None:
        self.first_s: float | None = None
        self.visible_s: float | None = None
        self.finished_s: float | None = None
        self.last_s = 0.0
        self.gaps: dict[int, int] = {}
        self.max_gap_s: float | None = None
        self.first_tokens: int | None = None
        self.chunk_tokens: int | None = None
        self._counted: int | None = None

    def token(self, at_s: float, *, visible: bool, counted: int | None = None) -> None:
        """Generated text came; `counted` are all tokens so far, where the engine counts them."""
        if visible and self.visible_s is None:
            self.visible_s = at_s
        if self.first_s is None:
            self.first_s = self.last_s = at_s
            self.first_tokens = self._counted = counted
            return
        self.another(at_s)
        if counted is None or self._counted is None:
            self._counted = self.chunk_tokens = None
            return
        self.chunk_tokens = max(self.chunk_tokens or 0, counted - self._counted)
        self._counted = counted

    def another(self, at_s: float) -> None:
        """Generated text came that was neither the first nor is counted."""
        gap_s = at_s - self.last_s
        self.last_s = at_s
        if self.max_gap_s is None or gap_s > self.max_gap_s:
            self.max_gap_s = gap_s
        place = bin_of(gap_s)
        self.gaps[place] = self.gaps.get(place, 0) + 1

    def together(self, events: int, at_s: float) -> None:
        """As many events as these came in one piece, of which each is as for `another`."""
        self.another(at_s)
        if events > 1:
            self.gaps[_NO_GAP] = self.gaps.get(_NO_GAP, 0) + events - 1

    def finished(self, at_s: float) -> None:
        """The engine said why it stopped: no token came later.

        The last one may have no text, as the one that means the end.
        """
        self.finished_s = at_s

    def tpot_s(self, output_tokens: int | None) -> float | None:
        """Seconds per output token after the first event with text; None without a later one.

        That event is taken to hold one token where the engine did not count it.
        """
        if self.first_s is None or output_tokens is None:
            return None
        end_s = self.last_s if self.finished_s is None else max(self.last_s, self.finished_s)
        later = output_tokens - (self.first_tokens or 1)
        return tpot_s(end_s - self.first_s, later + 1)
