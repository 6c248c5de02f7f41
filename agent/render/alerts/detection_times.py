"""How long the rules on an error budget take until they fire."""

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal

from agent.analysis.burn_rates import Burn, OutageRule, plan
from agent.records.objective import Objective
from agent.render.alerts.objective_alerts import HOLD_S
from agent.render.alerts.timings import Timings

# The shares of misses for which the times are known.
MISSED_RATIOS = (1.0, 0.5, 0.25)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleDetection:
    """How long a rule takes at each of MISSED_RATIOS, in seconds; None: it never fires."""

    objective: str
    rule: str
    threshold: Decimal
    after_s: tuple[float | None, ...]


def detections(objective: Objective, timings: Timings) -> Iterator[RuleDetection]:
    """The rules on the error budget of an objective."""
    found = plan(objective.target, objective.window_s)
    named: list[tuple[str, Burn | OutageRule]] = []
    if found.outage:
        named.append(("outage, page", found.outage))
    for burn in found.kept:
        kind = "page" if burn.tier.pages else "ticket"
        named.append((f"tier {burn.tier.number}, {kind}", burn))
    for name, rule in named:
        times = (_longest_s(rule.detects_in_s(ratio), timings) for ratio in MISSED_RATIOS)
        yield RuleDetection(
            objective=objective.name, rule=name, threshold=rule.threshold, after_s=tuple(times)
        )


def _longest_s(detects_in_s: float | None, timings: Timings) -> float | None:
    """The longest time: detection, hold time, a scrape and two evaluations."""
    if detects_in_s is None:
        return None
    waits_s = timings.scrape_interval_s + 2 * timings.evaluation_interval_s
    return timings.seconds(detects_in_s + HOLD_S) + waits_s
