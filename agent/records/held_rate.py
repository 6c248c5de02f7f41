"""The minutes by which an engine was seen to hold an objective, as they outlive the agent."""

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

_Weight = Annotated[float, msgspec.Meta(ge=0.0)]


class RateEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Minutes of about one rate, in requests per second, that held the objective or missed it.

    Their counts are decayed to the Unix time `at`. `seen_at` is the end of the newest of them,
    `held_at` that of the newest one that held.
    """

    per_s: float
    at: float
    held: _Weight = 0.0
    missed: _Weight = 0.0
    seen_at: float
    held_at: float | None = None


HeldRates = Mapping[str, Mapping[str, Sequence[RateEvidence]]]
"""The evidence by objective, and then by engine."""
