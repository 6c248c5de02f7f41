"""Panels on the signals for autoscalers: replicas needed, and what they are computed from."""

from agent.catalog import metrics as m
from agent.render.dashboards.panel_parts import (
    ENGINE_MODEL,
    OBJECTIVE_MODEL,
    Panel,
    PanelRow,
    PanelUnit,
    Query,
    gauge,
    legend,
    max_by,
    warn_above,
)
from agent.render.promql import by

_OF_ENGINE = ("objective", *ENGINE_MODEL)
# Several agents may watch one engine, and one name may be of an engine in each pod.
_NEEDED = by(("objective", "engine", "model", "instance"), gauge(m.SLO_REPLICAS_NEEDED), "max")

SCALING_ROW = PanelRow(
    "Replicas for the objective",
    (
        Panel(
            "Replicas needed",
            "The sum over all engines is the number of replicas that the load needs within the "
            "objective. An autoscaler runs this number with some reserve.",
            PanelUnit.NUMBER,
            (
                Query(by(OBJECTIVE_MODEL, _NEEDED), legend(OBJECTIVE_MODEL, "all engines")),
                max_by(_OF_ENGINE, m.SLO_REPLICAS_NEEDED),
            ),
        ),
        Panel(
            "p90 over its limit",
            "The worst limited latency, over 1 and 5 minutes. From 1 on the objective is in "
            "danger, and near 1 there is no room for peaks.",
            PanelUnit.NUMBER,
            (max_by((*_OF_ENGINE, "window"), m.SLO_P90_TO_LIMIT),),
            thresholds=warn_above(1),
        ),
        Panel(
            "Arrivals, and the rate that is held",
            "Requests per second that come, and that the engine was seen to hold within the "
            "objective. While the limit is `open` no minute has missed, so it may hold more.",
            PanelUnit.REQUESTS_PER_S,
            (
                max_by(ENGINE_MODEL, m.ARRIVAL_RATE, "arrivals"),
                max_by((*_OF_ENGINE, "limit"), m.SLO_HELD_RATE, "held"),
            ),
        ),
        Panel(
            "Confidence in the rate that is held",
            "The least share of minutes at about that rate that hold the objective, with 95 % "
            "confidence. It rises with the number of such minutes and falls with their age.",
            PanelUnit.SHARE,
            (max_by(_OF_ENGINE, m.SLO_HELD_RATE_CONFIDENCE),),
            highest=1,
        ),
        Panel(
            "Age of the rate that is held",
            "Time since a minute last held about that rate. After a change of the model or of its "
            "flags an old rate may be wrong.",
            PanelUnit.SECONDS,
            (max_by(_OF_ENGINE, m.SLO_HELD_RATE_AGE),),
        ),
    ),
)
