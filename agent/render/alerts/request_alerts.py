"""Alerts on requests that fail, time out or are rejected, and on the cost of tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from inspect import cleandoc

from agent.catalog import engine_facts as fact
from agent.catalog import metrics as m
from agent.catalog.efficiency_metrics import COST
from agent.catalog.time_units import DAY_S, HOUR_S, MINUTE_S
from agent.records.request import BY_CLIENT, Status
from agent.render.alerts.alert_rule import (
    ENGINE_MODEL,
    Alert,
    Severity,
    Timings,
    number,
    share_over,
)
from agent.render.alerts.thresholds import (
    ERROR_PAGE_RATIO,
    ERROR_TICKET_RATIO,
    INVALID_RATIO,
    MIN_EVENTS,
    AlertThreshold,
)
from agent.render.links import DashboardUid
from agent.render.promql import eq, none_of, value_of

_ENDED = value_of(m.REQUESTS, none_of("status", sorted(BY_CLIENT)))
_FINISHED = value_of(fact.REQUESTS_FINISHED)
_FAILED = value_of(fact.REQUESTS_FAILED)
_REJECTED = value_of(fact.ADMISSION_REJECTIONS)
_ON = "{{ $labels.model }} on {{ $labels.engine }}"


@dataclass(frozen=True, slots=True)
class _BadEnd:
    """A bad end of requests. A ratio of an outage is a page, one of a fault a ticket."""

    name: str
    ratio: AlertThreshold
    part: str
    whole: tuple[str, ...]
    summary: str
    what: str

    @property
    def severity(self) -> Severity:
        return Severity.PAGE if self.ratio is ERROR_PAGE_RATIO else Severity.TICKET


_BAD_ENDS = (
    _BadEnd(
        "LlmRequestsFailing",
        ERROR_PAGE_RATIO,
        value_of(m.REQUESTS, eq("status", Status.ERROR)),
        (_ENDED,),
        f"Requests to {_ON} fail",
        "requests ended in an error",
    ),
    _BadEnd(
        "LlmEngineAnswersErrors",
        ERROR_PAGE_RATIO,
        _FAILED,
        (_FAILED, _FINISHED),
        "Engine {{ $labels.engine }} answers with errors",
        "responses were errors by the engine's own count",
    ),
    _BadEnd(
        "LlmRequestsTimingOut",
        ERROR_TICKET_RATIO,
        value_of(m.REQUESTS, eq("status", Status.TIMEOUT)),
        (_ENDED,),
        f"Requests to {_ON} time out",
        "requests timed out",
    ),
    _BadEnd(
        "LlmRequestsThrottled",
        ERROR_TICKET_RATIO,
        value_of(m.REQUESTS, eq("status", Status.THROTTLED)),
        (_ENDED,),
        f"Requests to {_ON} are throttled",
        "requests were rejected with 429 or 503",
    ),
    _BadEnd(
        "LlmAdmissionRejections",
        ERROR_TICKET_RATIO,
        _REJECTED,
        (_REJECTED, _FINISHED),
        "Engine {{ $labels.engine }} rejects requests",
        "requests were rejected by the engine's admission limits",
    ),
)

PAGES = tuple(row.name for row in _BAD_ENDS if row.severity is Severity.PAGE)


def request_alerts(timings: Timings) -> Iterator[Alert]:
    """Every alert on how requests end."""
    window = timings.window(5 * MINUTE_S)
    for row in _BAD_ENDS:
        yield Alert(
            name=row.name,
            severity=row.severity,
            expression=share_over(row.ratio, ENGINE_MODEL, window, part=row.part, whole=row.whole),
            hold_s=2 * MINUTE_S,
            summary=row.summary,
            description=f"{{{{ $value | humanizePercentage }}}} of the {row.what} over {window}; "
            f"the alert begins above {row.ratio.percent}.",
            variables=("engine", "model"),
        )
    yield _invalid(timings)
    yield _not_seen(timings)


def _invalid(timings: Timings) -> Alert:
    """Nearly all requests to a model that an engine serves, or with wrong names to an engine.

    Requests with a wrong name have no served model, so they are compared with all of the engine.
    """
    # As long as the window, so that a handful of wrong requests alone does not fire.
    hold_s = 15 * MINUTE_S
    window = timings.window(hold_s)
    requests = value_of(m.REQUESTS)
    invalid = value_of(m.REQUESTS, eq("status", Status.INVALID))
    nameless = value_of(m.REQUESTS, eq("status", Status.INVALID), eq("model", m.UNKNOWN))
    of_engine = f"sum by (instance, engine) (rate({requests}[{window}]))"
    return Alert(
        name="LlmRequestsInvalid",
        severity=Severity.TICKET,
        # `or` keeps the left side if both have the labels: wrong names are compared first.
        expression=cleandoc(f"""
            (
            sum by (instance, engine, model) (rate({nameless}[{window}]))
              / on (instance, engine) group_left () ({of_engine} > 0)
            or
            sum by (instance, engine, model) (rate({invalid}[{window}]))
              / (sum by (instance, engine, model) (rate({requests}[{window}])) > 0)
            )
              > {INVALID_RATIO}
            and
            sum by (instance, engine, model) (increase({invalid}[{window}])) >= {MIN_EVENTS}
        """),
        hold_s=hold_s,
        summary=f"Nearly all requests to {_ON} are invalid",
        description="{{ $value | humanizePercentage }} of the requests were answered as the "
        f"client's own mistake over {window}; the alert begins above "
        f"{INVALID_RATIO.percent}. With the model {m.UNKNOWN!r} they name a model that no "
        "engine serves, and are compared with all requests to the engine.",
        variables=("engine", "model"),
    )


def _not_seen(timings: Timings) -> Alert:
    window = timings.window(15 * MINUTE_S)
    return Alert(
        name="LlmRequestsNotSeen",
        severity=Severity.TICKET,
        expression=cleandoc(f"""
            sum by (instance, engine) (increase({_FINISHED}[{window}])) >= {MIN_EVENTS}
            unless
            sum by (instance, engine) (increase({value_of(m.REQUESTS)}[{window}])) > 0
        """),
        hold_s=5 * MINUTE_S,
        summary="The agent sees no request of engine {{ $labels.engine }}, which serves some",
        description=f"The engine finished about {{{{ $value | humanize }}}} requests over "
        f"{window}, and the agent received none: no objective is judged on this engine.",
        variables=("engine",),
    )


_MILLION = 1_000_000


def cost_alerts(budget_usd: float | None, timings: Timings) -> Iterator[Alert]:
    """The alert on a budget in dollars per million output tokens; none without a budget.

    The window is a day, so that a night without requests counts with the day before it.
    """
    if budget_usd is None:
        return
    window = timings.window(DAY_S)
    yield Alert(
        name="LlmTokenCostOverBudget",
        severity=Severity.TICKET,
        expression=cleandoc(f"""
            {_MILLION} * sum by (model) (increase({value_of(COST)}[{window}]))
              / (sum by (model) (increase({value_of(m.OUTPUT_TOKENS)}[{window}])) > 0)
              > {number(budget_usd)}
        """),
        hold_s=HOUR_S,
        summary="Output tokens of {{ $labels.model }} cost more than the budget for them",
        description='A million cost {{ $value | printf "%.2f" }} dollars over '
        f"{window}, idle time included; the budget is {number(budget_usd)}.",
        dashboard=DashboardUid.CAPACITY,
        variables=("model",),
    )
