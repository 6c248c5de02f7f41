"""Misses of an objective that the page on an engine already explains.

An alert on an objective names a model, the page on an engine names an engine, and several engines
may serve one model: that one of them died explains the misses only where they are its own.
"""

from agent.catalog import metrics as m
from agent.catalog.definitions import Verdict
from agent.records.objective import Objective
from agent.render.alerts import engine_alerts, request_alerts
from agent.render.alerts.alert_rule import ENGINE, OBJECTIVE, Alert, Severity
from agent.render.alerts.number_text import percent
from agent.render.alerts.timings import Timings
from agent.render.promql import by, eq, value_of

EXPLAINED = "LlmMissesExplained"

# As far back as the quickest alerts on an objective look: what an engine did not answer in time
# is counted when it answers again.
_WINDOW_S = 5 * 60
# What is left is no outage by itself.
_MOST = 0.9


def explained(objective: Objective, timings: Timings) -> Alert:
    """The alert that mutes pages on an objective while engines have pages that say why."""
    window = timings.window(_WINDOW_S)
    matchers = (eq("objective", objective.name), eq("verdict", Verdict.MISSED))
    missed = f"increase({value_of(m.SLO_REQUESTS, *matchers)}[{window}])"
    names = "|".join((*engine_alerts.PAGES, *request_alerts.PAGES))
    paged = f'max_over_time(ALERTS{{alertname=~"{names}",alertstate="firing"}}[{window}])'
    theirs = f"{missed}\n  and on ({', '.join(ENGINE)}) {paged}"
    return Alert(
        name=EXPLAINED,
        severity=Severity.NONE,
        expression=f"{by(OBJECTIVE, theirs)}\n  / ({by(OBJECTIVE, missed)} > 0)\n  >= {_MOST}",
        hold_s=0.0,
        labels={"objective": objective.name},
        summary=f"Requests to {{{{ $labels.model }}}} miss objective {objective.name} on engines "
        "that have pages of their own",
        description=f"{{{{ $value | humanizePercentage }}}} of the misses over {window} are of "
        "engines that somebody was paged for. This alert is told to nobody; from "
        f"{percent(_MOST)} on it mutes the pages on the objective.",
        variables=OBJECTIVE,
    )
