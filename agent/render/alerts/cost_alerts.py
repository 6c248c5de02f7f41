"""The alert on the cost of tokens, for those who set a budget."""

from collections.abc import Iterator

from agent.catalog import metrics as m
from agent.catalog.efficiency_metrics import COST
from agent.catalog.time_units import DAY_S, HOUR_S
from agent.render.alerts.alert_rule import Alert, Severity
from agent.render.alerts.number_text import number
from agent.render.alerts.timings import Timings
from agent.render.links import DashboardUid
from agent.render.promql import by, value_of

_MILLION = 1_000_000


def cost_alerts(budget_usd: float | None, timings: Timings) -> Iterator[Alert]:
    """The alert on a budget in dollars per million output tokens; none without a budget.

    The window is a day, so that a night without requests counts with the day before it.
    """
    if budget_usd is None:
        return
    window = timings.window(DAY_S)
    bill = by(("model",), f"increase({value_of(COST)}[{window}])")
    tokens = by(("model",), f"increase({value_of(m.OUTPUT_TOKENS)}[{window}])")
    yield Alert(
        name="LlmTokenCostOverBudget",
        severity=Severity.TICKET,
        expression=f"{_MILLION} * {bill}\n  / ({tokens} > 0)\n  > {number(budget_usd)}",
        hold_s=HOUR_S,
        summary="Output tokens of {{ $labels.model }} cost more than the budget for them",
        description='A million cost {{ $value | printf "%.2f" }} dollars over '
        f"{window}, idle time included; the budget is {number(budget_usd)}.",
        dashboard=DashboardUid.CAPACITY,
        variables=("model",),
    )
