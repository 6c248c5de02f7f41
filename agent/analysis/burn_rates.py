"""The error budget of an objective, and its burn rates: which alerts fire, and how soon.

The scheme is that of "The Site Reliability Workbook", chapter 5, in the four tiers of Sloth and the
Kubernetes mixin (slok/sloth: internal/alert/windows/google-30d.yaml; kubernetes-mixin:
config.libsonnet). Its windows are for a period of 30 days and scale with the period, so that each
tier spends the same share of the budget.
"""

from dataclasses import dataclass
from decimal import Decimal

from agent.catalog.time_units import DAY_S, HOUR_S, MINUTE_S

# The names of the alerts.
OUTAGE, BURN = "LlmObjectiveOutage", "LlmObjectiveBudgetBurn"

# The windows already smooth; the hold time only skips a single odd evaluation.
HOLD_S = 2.0 * MINUTE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBudget:
    """The budget of the requests that were judged so far.

    `allowed` misses are the target's share of them. `left` is the share of these that is left,
    below 0 if there were more, and None without judged requests.
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


SCHEME_PERIOD_S = 30 * DAY_S

# The short window, a twelfth of the long one, ends the alert soon after the failures end.
_LONG_TO_SHORT = 12

# A tier with a higher threshold would fire only if nearly everything fails.
MAX_THRESHOLD = Decimal("0.9")

# A few missed requests do not page, even if they are a large share of a quiet hour.
MIN_MISSED = 5

# If the paging tiers need longer than this for a total failure, an outage rule is added.
SLOWEST_PAGE_S = 15 * 60.0
OUTAGE_WINDOW_S = 5 * 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A burn rate that fires an alert: `budget_share` of the budget spent in the long window."""

    number: int
    pages: bool
    budget_share: Decimal
    long_s: float

    @property
    def factor(self) -> Decimal:
        """The burn rate: how many times faster than allowed the budget is spent."""
        return self.budget_share * Decimal(str(SCHEME_PERIOD_S)) / Decimal(str(self.long_s))

    def long_of(self, period_s: float) -> float:
        """Length of the long window for a period, in seconds."""
        return self.long_s * period_s / SCHEME_PERIOD_S

    def short_of(self, period_s: float) -> float:
        """Length of the short window for a period, in seconds."""
        return self.long_of(period_s) / _LONG_TO_SHORT


TIERS = (
    Tier(number=1, pages=True, budget_share=Decimal("0.02"), long_s=HOUR_S),
    Tier(number=2, pages=True, budget_share=Decimal("0.05"), long_s=6 * HOUR_S),
    Tier(number=3, pages=False, budget_share=Decimal("0.10"), long_s=DAY_S),
    Tier(number=4, pages=False, budget_share=Decimal("0.10"), long_s=3 * DAY_S),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Burn:
    """A tier for one target and period: fires when both windows miss more than `threshold`."""

    tier: Tier
    long_s: float
    threshold: Decimal

    @property
    def short_s(self) -> float:
        """Length of the short window in seconds."""
        return self.long_s / _LONG_TO_SHORT

    @property
    def reachable(self) -> bool:
        """Whether less than a total failure can make it fire."""
        return self.threshold < MAX_THRESHOLD

    def detects_in_s(self, missed_ratio: float) -> float | None:
        """Seconds until a constant share of misses makes it fire; None when it never fires."""
        return _detects_in_s(self.threshold, self.long_s, missed_ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutageRule:
    """The rule for a target with slow or dead tiers: most requests of a few minutes missed."""

    window_s: float
    threshold: Decimal

    def detects_in_s(self, missed_ratio: float) -> float | None:
        """Seconds until a constant share of misses makes it fire; None when it never fires."""
        return _detects_in_s(self.threshold, self.window_s, missed_ratio)


@dataclass(frozen=True, slots=True)
class BurnPlan:
    """The rules for one target: `kept` can fire, `dead` cannot."""

    kept: tuple[Burn, ...]
    dead: tuple[Burn, ...]
    outage: OutageRule | None


def plan(target: float, period_s: float) -> BurnPlan:
    """The rules for a target, a share above 0 and below 1, over a period in seconds."""
    budget = 1 - Decimal(str(target))
    burns = [
        Burn(tier=tier, long_s=tier.long_of(period_s), threshold=(tier.factor * budget).normalize())
        for tier in TIERS
    ]
    kept = tuple(burn for burn in burns if burn.reachable)
    dead = tuple(burn for burn in burns if not burn.reachable)
    # Midway between what the target allows and everything.
    outage = OutageRule(window_s=OUTAGE_WINDOW_S, threshold=(1 + budget) / 2)
    return BurnPlan(kept, dead, outage if budget >= outage_budget(period_s) else None)


def outage_budget(period_s: float) -> Decimal:
    """The least budget with an outage rule: its first tier is dead, or slow at a total failure."""
    first = TIERS[0]
    slow = Decimal(str(SLOWEST_PAGE_S)) / (first.budget_share * Decimal(str(period_s)))
    return min(slow, MAX_THRESHOLD / first.factor)


def _detects_in_s(threshold: Decimal, window_s: float, missed_ratio: float) -> float | None:
    if missed_ratio <= threshold:
        return None
    return float(threshold) / missed_ratio * window_s
