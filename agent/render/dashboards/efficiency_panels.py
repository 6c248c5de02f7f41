"""How well the GPUs of an engine are used: MFU, MBU and the roofline, as the agent reckons them."""

from agent.catalog import efficiency_metrics as em
from agent.render.dashboards.panel_expressions import gauge
from agent.render.dashboards.panel_parts import Panel, PanelRow, PanelUnit, Query, warn_above
from agent.render.dashboards.panel_styles import POINTS, STATES
from agent.render.dashboards.shared_queries import ENGINE_NAME, named_point
from agent.render.promql import Matcher, by, eq

_PHASE = ("engine", "model", "phase")
_SOURCE = ("engine", "model", "source")
_REQUESTS = eq("source", "requests")
# The phases apart; `all` of them together is another question.
_APART = Matcher("phase", 'phase!="all"')
_WHOLE = eq("phase", "all")
_MFU_BY_PHASE = by(_PHASE, gauge(em.MFU, _REQUESTS, _APART), "max")
_MBU_BY_PHASE = by(_PHASE, gauge(em.MBU, _REQUESTS, _APART), "max")
_INTENSITY = by(_PHASE, gauge(em.INTENSITY), "max")

EFFICIENCY_ROW = PanelRow(
    "Efficiency of engines",
    (
        Panel(
            title="MFU by phase",
            description="FLOP/s that requests needed over the GPUs' dense peak, prefill and decode "
            "apart. Prefill near 0.5 is good; decode is low by nature, look at its MBU.",
            unit=PanelUnit.SHARE,
            queries=(Query(expression=_MFU_BY_PHASE, legend=f"{ENGINE_NAME} {{{{phase}}}}"),),
        ),
        Panel(
            title="MBU by phase",
            description="Bytes that had to move over the memory bandwidth, prefill and decode "
            "apart. Decode near 0.7 is as fast as this model can be on this GPU.",
            unit=PanelUnit.SHARE,
            queries=(Query(expression=_MBU_BY_PHASE, legend=f"{ENGINE_NAME} {{{{phase}}}}"),),
        ),
        Panel(
            title="MFU and MBU by source",
            description="Our estimate from requests, the engine's own estimate, and the hardware's "
            "counters side by side, over the whole minute with its idle time.",
            unit=PanelUnit.SHARE,
            queries=tuple(
                Query(
                    expression=by(_SOURCE, gauge(metric, _WHOLE), "max"),
                    legend=f"{ENGINE_NAME} {what} {{{{source}}}}",
                )
                for metric, what in ((em.MFU, "MFU"), (em.MBU, "MBU"))
            ),
        ),
        Panel(
            title="Roofline",
            description="MFU over operations per byte, a point for each engine and phase. Points "
            "far left are bound by bandwidth, far right by compute. Small and left: larger "
            "batches; small and right: a faster kernel or another GPU.",
            unit=PanelUnit.SHARE,
            queries=(
                Query(
                    expression=named_point(_INTENSITY, *_PHASE), legend="intensity", instant=True
                ),
                Query(expression=named_point(_MFU_BY_PHASE, *_PHASE), legend="MFU", instant=True),
            ),
            style=POINTS,
            lowest=None,
            transformations=(
                {"id": "joinByField", "options": {"byField": "point", "mode": "inner"}},
                {
                    "id": "filterFieldsByName",
                    "options": {"include": {"names": ["point", "Value #A", "Value #B"]}},
                },
            ),
        ),
        Panel(
            title="Arithmetic intensity",
            description="Operations for each byte that had to move, with the ridge: below it, "
            "memory bandwidth is the bound; above it, computing.",
            unit=PanelUnit.NUMBER,
            queries=(
                Query(expression=_INTENSITY, legend=f"{ENGINE_NAME} {{{{phase}}}}"),
                Query(
                    expression=by(("engine", "model"), gauge(em.RIDGE), "max"),
                    legend=f"{ENGINE_NAME} ridge",
                ),
            ),
        ),
        Panel(
            title="Share of what the roofline allows",
            description="FLOP/s over the most that is possible at this intensity. Low under load "
            "is neither compute nor bandwidth: look at the front's CPU, the batch and the traffic.",
            unit=PanelUnit.SHARE,
            queries=(
                Query(
                    expression=by(_PHASE, gauge(em.ROOF_SHARE), "max"),
                    legend=f"{ENGINE_NAME} {{{{phase}}}}",
                ),
            ),
            highest=1,
        ),
        Panel(
            title="What bounds each phase",
            description="Compute-bound: more or faster GPUs, a smaller type. Bandwidth-bound: "
            "larger batches, quantised weights. Memory-capacity-bound: more KV cache.",
            unit=PanelUnit.NUMBER,
            queries=(
                Query(
                    expression=by((*_PHASE, "bound"), gauge(em.BOUND), "max"),
                    legend=f"{ENGINE_NAME} {{{{phase}}}} {{{{bound}}}}",
                ),
            ),
            style=STATES,
            thresholds=warn_above(1, "blue"),
            highest=1,
        ),
        Panel(
            title="Sources that disagree",
            description="How many times as much one source tells as another, where that is beyond "
            "margin. One of them is wrong: the model's config, the GPU's data, or work unseen; the "
            "likely cause is told.",
            unit=PanelUnit.NUMBER,
            queries=(
                Query(
                    expression=by(
                        ("engine", "model", "figure", "higher", "lower", "cause"),
                        gauge(em.DISAGREEMENT),
                        "max",
                    ),
                    legend=f"{ENGINE_NAME} {{{{figure}}}}: {{{{higher}}}} over {{{{lower}}}}, "
                    "{{cause}}",
                ),
            ),
        ),
    ),
)
