"""The alert on misses of an objective that a page on an engine already explains.

An alert on an objective has the label `model`, a page on an engine has `engine`, and several
engines may serve one model. An engine's page explains only the misses of its own requests, and a
page on one model of the engine only those of this model.
"""

from agent.catalog import metrics as m
from agent.catalog.definitions import Verdict
from agent.catalog.time_units import MINUTE_S
from agent.records.objective import Objective
from agent.render.alerts import engine_alerts, request_alerts
from agent.render.alerts.alert_conditions import firing
from agent.render.alerts.alert_rule import ENGINE, ENGINE_MODEL, OBJECTIVE, Alert, Severity
from agent.render.alerts.number_text import percent
from agent.render.alerts.timings import Timings
from agent.render.promql import by, eq, value_of

EXPLAINED = "LlmMissesExplained"

# As long as the window of the quickest alerts on an objective: requests that an engine did not
# answer in time are counted when it answers again.
_WINDOW_S = 5 * MINUTE_S
# Pages by the labels of what they are about: a whole engine, or one model of it.
_PAGES = {ENGINE: engine_alerts.PAGES, ENGINE_MODEL: request_alerts.PAGES}
# The remaining share of misses is no outage by itself.
_MOST = 0.9


def explained(objective: Objective, timings: Timings) -> Alert:
    """The alert that mutes pages on an objective while pages on engines give the reason."""
    window = timings.window(_WINDOW_S)
    matchers = (eq("objective", objective.name), eq("verdict", Verdict.MISSED))
    missed = f"increase({value_of(m.SLO_REQUESTS, *matchers)}[{window}])"
    theirs = "\n  or ".join(
        f"{missed}\n  and on ({', '.join(labels)}) max_over_time({firing(pages)}[{window}])"
        for labels, pages in _PAGES.items()
    )
    return Alert(
        name=EXPLAINED,
        severity=Severity.NONE,
        expression=f"{by(OBJECTIVE, theirs)}\n  / ({by(OBJECTIVE, missed)} > 0)\n  >= {_MOST}",
        labels={"objective": objective.name},
        summary=f"Requests to {{{{ $labels.model }}}} miss objective {objective.name} on engines "
        "that have pages of their own",
        description=f"{{{{ $value | humanizePercentage }}}} of the misses over {window} are of "
        "engines with a firing page. This alert is sent to no receiver; from "
        f"{percent(_MOST)} on it mutes the pages on the objective.",
        variables=OBJECTIVE,
    )
