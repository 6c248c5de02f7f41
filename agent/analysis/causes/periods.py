"""What rules read of an engine: a period, the requests in it, and the prompts of others."""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from agent.analysis.causes.activity import Activity


class Prompts(msgspec.Struct, frozen=True):
    """Prompts of other requests that were prefilled in a period, until the next one is logged.

    `missing_share` is the part of their computed tokens that the prefix cache usually has; None
    unless all of their rows have their cached tokens. `sizes` are the computed tokens of each, and,
    where that is not 0, those of the request's `own` prompt.
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
    """What the engine did in a period, and from which source that is known: None for none."""

    start: float
    end: float
    activity: Activity
    source: str | None

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start
