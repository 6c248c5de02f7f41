"""The error budget of an objective: how many of the misses that its target allows are left."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBudget:
    """The budget of the requests that were judged so far.

    `allowed` misses are the target's share of them. `left` is the share of these that is left,
    below 0 where there were more, and None without judged requests.
    """

    met: int
    missed: int
    allowed: float
    left: float | None


def error_budget(met: int, missed: int, target: float) -> ErrorBudget:
    """The budget of a target below 1."""
    allowed = (met + missed) * (1 - target)
    left = 1 - missed / allowed if allowed else None
    return ErrorBudget(met=met, missed=missed, allowed=allowed, left=left)
