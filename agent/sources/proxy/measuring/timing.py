"""When the tokens of one answer came."""

from agent.analysis.latency import tpot_s
from agent.analysis.quantiles import bin_of

_NO_GAP = bin_of(0.0)
# Moments that are kept as they are until there are so many, or somebody asks.
MANY = 64


class TokenTiming:
    """Moments and gaps of one stream, on the clock that the moments are from.

    A gap is the time between two events with generated text; those that arrived in one piece are
    no time apart. `chunk_tokens` is the most tokens that such an event held after the first one,
    None where that is not known of all of them.

    `moments` are those of events as for `another` that are not counted yet. They are sorted into
    bins many at a time, which takes half as long as one by one between other work; who adds to them
    has `sort` called when there are MANY.
    """

    __slots__ = (
        "_counted",
        "_gaps",
        "_last_s",
        "_max_gap_s",
        "chunk_tokens",
        "finished_s",
        "first_s",
        "first_tokens",
        "moments",
        "visible_s",
    )

    def __init__(self) -> None:
        self.first_s: float | None = None
        self.visible_s: float | None = None
        self.finished_s: float | None = None
        self._last_s = 0.0
        self._gaps: dict[int, int] = {}
        self._max_gap_s: float | None = None
        self.moments: list[float] = []
        self.first_tokens: int | None = None
        self.chunk_tokens: int | None = None
        self._counted: int | None = None

    def token(self, at_s: float, *, visible: bool, counted: int | None = None) -> None:
        """Generated text came; `counted` are all tokens so far, where the engine counts them."""
        if visible and self.visible_s is None:
            self.visible_s = at_s
        if self.first_s is None:
            self.first_s = self._last_s = at_s
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
        self.moments.append(at_s)
        if len(self.moments) >= MANY:
            self.sort()

    def together(self, events: int, at_s: float) -> None:
        """As many events as these came in one piece, of which each is as for `another`."""
        self.another(at_s)
        if events > 1:
            self._gaps[_NO_GAP] = self._gaps.get(_NO_GAP, 0) + events - 1

    @property
    def gaps(self) -> dict[int, int]:
        """How many gaps there were by their bin of `analysis.quantiles`."""
        self.sort()
        return self._gaps

    @property
    def max_gap_s(self) -> float | None:
        """The largest gap, None where there is none."""
        self.sort()
        return self._max_gap_s

    def sort(self) -> None:
        """Count the gaps before the moments that are kept."""
        last_s, gaps, largest_s = self._last_s, self._gaps, self._max_gap_s
        for at_s in self.moments:
            gap_s = at_s - last_s
            last_s = at_s
            if largest_s is None or gap_s > largest_s:
                largest_s = gap_s
            place = bin_of(gap_s)
            gaps[place] = gaps.get(place, 0) + 1
        self.moments.clear()
        self._last_s, self._max_gap_s = last_s, largest_s

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
        self.sort()
        end_s = self._last_s if self.finished_s is None else max(self._last_s, self.finished_s)
        later = output_tokens - (self.first_tokens or 1)
        return tpot_s(end_s - self.first_s, later + 1)
