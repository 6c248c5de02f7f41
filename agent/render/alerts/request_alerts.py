"""Alerts on requests that fail, time out or are turned away, whatever was promised."""

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal

from agent.catalog import engine_facts as fact
from agent.catalog import metrics as m
from agent.records.request import Status
from agent.render.alerts.alert_conditions import share_over
from agent.render.alerts.alert_rule import ENGINE, ENGINE_MODEL, Alert, Severity
from agent.render.alerts.number_text import number, percent
from agent.render.alerts.timings import Timings
from agent.render.promql import by, eq, none_of, value_of

_MINUTE_S = 60

# Where no objective says otherwise. One in twenty is an outage for some; one in a hundred a fault.
_OUTAGE = Decimal("0.05")
_FAULT = Decimal("0.01")

_ENDED = value_of(m.REQUESTS, none_of("status", (Status.CANCELLED,)))
_FINISHED = value_of(fact.REQUESTS_FINISHED)
_FAILED = value_of(fact.REQUESTS_FAILED)
_REJECTED = value_of(fact.ADMISSION_REJECTIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _BadEnd:
    """A kind of bad end, and from which share of all ends on it is an alert."""

    name: str
    severity: Severity
    limit: Decimal
    part: str
    whole: tuple[str, ...]
    summary: str
    what: str


_BAD_ENDS = (
    _BadEnd(
        name="LlmRequestsFailing",
        severity=Severity.PAGE,
        limit=_OUTAGE,
        part=value_of(m.REQUESTS, eq("status", Status.ERROR)),
        whole=(_ENDED,),
        summary="Requests to {{ $labels.model }} on {{ $labels.engine }} fail",
        what="requests ended in an error",
    ),
    _BadEnd(
        name="LlmEngineAnswersErrors",
        severity=Severity.PAGE,
        limit=_OUTAGE,
        part=_FAILED,
        whole=(_FAILED, _FINISHED),
        summary="Engine {{ $labels.engine }} answers with errors",
        what="answers were errors by the engine's own count",
    ),
    _BadEnd(
        name="LlmRequestsTimingOut",
        severity=Severity.TICKET,
        limit=_FAULT,
        part=value_of(m.REQUESTS, eq("status", Status.TIMEOUT)),
        whole=(_ENDED,),
        summary="Requests to {{ $labels.model }} on {{ $labels.engine }} time out",
        what="requests timed out",
    ),
    _BadEnd(
        name="LlmRequestsThrottled",
        severity=Severity.TICKET,
        limit=_FAULT,
        part=value_of(m.REQUESTS, eq("status", Status.THROTTLED)),
        whole=(_ENDED,),
        summary="Requests to {{ $labels.model }} on {{ $labels.engine }} are throttled",
        what="requests were turned away with 429 or 503",
    ),
    _BadEnd(
        name="LlmAdmissionRejections",
        severity=Severity.TICKET,
        limit=_FAULT,
        part=_REJECTED,
        whole=(_REJECTED, _FINISHED),
        summary="Engine {{ $labels.engine }} turns requests away at its door",
        what="requests were turned away by the engine's admission limits",
    ),
)

# Those that name an engine and wake somebody.
PAGES = tuple(row.name for row in _BAD_ENDS if row.severity is Severity.PAGE)


def request_alerts(timings: Timings) -> Iterator[Alert]:
    """Every alert on how requests end."""
    window = timings.window(5 * _MINUTE_S)
    for row in _BAD_ENDS:
        yield Alert(
            name=row.name,
            severity=row.severity,
            expression=share_over(
                number(row.limit), ENGINE_MODEL, window, part=row.part, whole=row.whole
            ),
            hold_s=2 * _MINUTE_S,
            summary=row.summary,
            description=f"{{{{ $value | humanizePercentage }}}} of the {row.what} over {window}; "
            f"the alert begins above {percent(row.limit)}.",
            variables=("engine", "model"),
        )
    yield _not_seen(timings)


def _not_seen(timings: Timings) -> Alert:
    window = timings.window(15 * _MINUTE_S)
    finished = by(ENGINE, f"increase({_FINISHED}[{window}])")
    seen = by(ENGINE, f"increase({value_of(m.REQUESTS)}[{window}])")
    return Alert(
        name="LlmRequestsNotSeen",
        severity=Severity.TICKET,
        expression=f"{finished} >= 5\nunless\n{seen} > 0",
        hold_s=5 * _MINUTE_S,
        summary="The agent sees no request of engine {{ $labels.engine }}, which serves some",
        description=f"The engine finished about {{{{ $value | humanize }}}} requests over "
        f"{window}, and not one reached the agent: no objective is judged on this engine.",
        variables=("engine",),
    )
