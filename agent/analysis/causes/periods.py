"""The values that rules read of an engine: a period, changes, lost hits and others' prompts."""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from agent.analysis.causes.activity import Activity


class Prompts(msgspec.Struct, frozen=True):
    """Prompts of other requests that were prefilled in a period.

    `missing_share` is the share of their computed tokens that the prefix cache usually has; None
    unless all of their rows have cached tokens. `sizes` has the computed tokens of each prompt.
    Where `own` is not 0, `sizes` also has the request's own prompt, of so many tokens. It is a view
    that holds until the next prompt is added to the log.
    """

    many: int = 0
    tokens: int = 0
    missing_share: float | None = None
    sizes: "Sequence[int] | NDArray[np.int32]" = ()
    own: int = 0


class Change(msgspec.Struct, frozen=True):
    """What came to an engine since its queue began, and what usually comes in that time.

    `since` is when the queue was last seen empty.
    """

    since: float
    seconds: float
    arrivals: float
    usual_arrivals: float
    prefill_tokens: float
    usual_prefill_tokens: float
    usual_running: float


class MissedHits(msgspec.Struct, frozen=True):
    """The shares of prompt tokens that the prefix cache had in a period, and usually has.

    `share` is the part of the computed prompt tokens that the cache usually has.
    """

    now: float
    usual: float
    share: float


class Period(msgspec.Struct, frozen=True):
    """The activity of an engine in a period (Unix time), and its source; None without a source."""

    start: float
    end: float
    activity: Activity
    source: str | None

    @property
    def seconds(self) -> float:
        """The length of the period."""
        return self.end - self.start
