"""What a part of the requests has more of than the rest.

A name is told if its share of the part is higher than its share of the rest, and chance would
hardly make such a difference: many names are compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

# One name in 700 differs by as many standard errors by chance.
_STANDARD_ERRORS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCount:
    """How many requests of a name are in the part, and how many in the rest."""

    dimension: str
    name: str
    inside: int
    outside: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxCounts:
    """The requests of a part and of the rest, in all and by each name."""

    inside: int
    outside: int
    groups: Sequence[GroupCount]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """A name that the part has more of, with its shares of the part and of the rest."""

    dimension: str
    name: str
    inside: int
    outside: int
    inside_share: float
    outside_share: float


def contrasts(of: BoxCounts) -> list[Contrast]:
    """The names that the part has more of than the rest, the clearest first.

    Empty if either has no request.
    """
    inside, outside = of.inside, of.outside
    if not inside or not outside:
        return []
    found = [
        Contrast(
            dimension=group.dimension,
            name=group.name,
            inside=group.inside,
            outside=group.outside,
            inside_share=group.inside / inside,
            outside_share=group.outside / outside,
        )
        for group in of.groups
        if _standard_errors(group.inside, inside, group.outside, outside) >= _STANDARD_ERRORS
    ]
    return sorted(found, key=_clearest_first)


def _standard_errors(inside: int, of_inside: int, outside: int, of_outside: int) -> float:
    """The difference of two shares in standard errors, as if both were the same (z-test)."""
    pooled = (inside + outside) / (of_inside + of_outside)
    error = sqrt(pooled * (1.0 - pooled) * (1.0 / of_inside + 1.0 / of_outside))
    if error == 0.0:
        return 0.0
    return (inside / of_inside - outside / of_outside) / error


def _clearest_first(one: Contrast) -> tuple[float, int, str, str]:
    return (one.outside_share - one.inside_share, -one.inside, one.dimension, one.name)
