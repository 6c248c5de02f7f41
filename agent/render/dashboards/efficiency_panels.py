"""Panels on efficiency: MFU, MBU and the roofline, by the agent's and the engine's estimate."""

from agent.catalog import efficiency_metrics as em
from agent.catalog import engine_facts as fact
from agent.catalog.metric import Metric
from agent.render.dashboards.panel_parts import Panel, PanelRow, PanelUnit, Query, warn_above
from agent.render.dashboards.panel_queries import (
    ENGINE_MODEL,
    by_engine,
    gauge,
    legend,
    max_by,
    ratio,
)
from agent.render.dashboards.panel_styles import POINTS, STATES
from agent.render.promql import Matcher, by, eq

_PHASE = (*ENGINE_MODEL, "phase")
_FROM_REQUESTS = eq("source", "requests")
# The value `all` of the label covers both phases, idle time included.
_SINGLE_PHASE = Matcher("phase", 'phase!="all"')
_WHOLE = eq("phase", "all")


def _by_phase(metric: Metric) -> Query:
    return max_by(_PHASE, metric, "", _FROM_REQUESTS, _SINGLE_PHASE)


def _roofline(
    title: str, description: str, unit: PanelUnit, labels: tuple[str, ...], axes: dict[str, str]
) -> Panel:
    """A point for each value of the labels, at the expressions of `axes`: name to expression."""
    quoted = ", ".join(f'"{label}"' for label in labels)
    return Panel(
        title,
        description,
        unit,
        tuple(
            # One label that identifies the series, as Grafana joins the axes by one field.
            Query(f'label_join({expression}, "point", " ", {quoted})', name, instant=True)
            for name, expression in axes.items()
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
    )


_INTENSITY = max_by(_PHASE, em.INTENSITY)
_DISAGREEMENT_LABELS = (*ENGINE_MODEL, "figure", "higher", "lower", "cause")

EFFICIENCY_ROW = PanelRow(
    "Efficiency of engines",
    (
        Panel(
            "MFU by phase",
            "FLOP/s that requests needed over the GPUs' dense peak, for prefill and decode. "
            "Prefill near 0.5 is good; decode is low by nature, its MBU says more.",
            PanelUnit.SHARE,
            (_by_phase(em.MFU),),
        ),
        Panel(
            "MBU by phase",
            "Bytes that requests needed to move over the memory bandwidth, for prefill and decode. "
            "Decode near 0.7 is as fast as this model can be on this GPU.",
            PanelUnit.SHARE,
            (_by_phase(em.MBU),),
        ),
        Panel(
            "MFU and MBU by source",
            "The agent's estimate from requests, the engine's own estimate, and the hardware's "
            "counters, over the whole minute with its idle time.",
            PanelUnit.SHARE,
            tuple(
                Query(
                    by((*ENGINE_MODEL, "source"), gauge(metric, _WHOLE), "max"),
                    f"{legend(ENGINE_MODEL)} {name} {{{{source}}}}",
                )
                for metric, name in ((em.MFU, "MFU"), (em.MBU, "MBU"))
            ),
        ),
        _roofline(
            "Roofline",
            "MFU over operations per byte, a point for each engine and phase. Points far left are "
            "bound by bandwidth, far right by compute. Low and left: larger batches help; low and "
            "right: a faster kernel or another GPU.",
            PanelUnit.SHARE,
            _PHASE,
            {"intensity": _INTENSITY.expression, "MFU": _by_phase(em.MFU).expression},
        ),
        Panel(
            "Arithmetic intensity",
            "Operations for each byte that had to move, with the ridge: below it, memory bandwidth "
            "is the bound; above it, compute.",
            PanelUnit.NUMBER,
            (_INTENSITY, max_by(ENGINE_MODEL, em.RIDGE, "ridge")),
        ),
        Panel(
            "Share of what the roofline allows",
            "FLOP/s over the most that is possible at this intensity. If it is low under load, "
            "neither compute nor bandwidth is the bound: check the front's CPU, the batch and the "
            "traffic.",
            PanelUnit.SHARE,
            (max_by(_PHASE, em.ROOF_SHARE),),
            highest=1,
        ),
        Panel(
            "What bounds each phase",
            "Compute-bound: more or faster GPUs, a smaller type. Bandwidth-bound: larger batches, "
            "quantised weights. Memory-capacity-bound: more KV cache.",
            PanelUnit.NUMBER,
            (max_by((*_PHASE, "bound"), em.BOUND),),
            style=STATES,
            thresholds=warn_above(1, "blue"),
            highest=1,
        ),
        Panel(
            "Sources that disagree",
            "The ratio of two sources, where it is beyond the margin, with the likely cause. One "
            "of them is wrong: the model's config, the GPU's data, or requests that the agent did "
            "not see.",
            PanelUnit.NUMBER,
            (
                Query(
                    by(_DISAGREEMENT_LABELS, gauge(em.DISAGREEMENT), "max"),
                    f"{legend(ENGINE_MODEL)} {{{{figure}}}}: {{{{higher}}}} over {{{{lower}}}}, "
                    "{{cause}}",
                ),
            ),
        ),
    ),
)

# Only engines that estimate their own work have these: vLLM with --enable-mfu-metrics, SGLang.
_FLOPS = by_engine(fact.ESTIMATED_GPU_FLOPS)
_READ = by_engine(fact.ESTIMATED_GPU_READ_BYTES, "read")
_WRITTEN = by_engine(fact.ESTIMATED_GPU_WRITE_BYTES, "written")

ESTIMATES_ROW = PanelRow(
    "Work by the engine's own estimate",
    (
        Panel(
            "FLOP/s of a GPU, estimated by the engine",
            "Operations per second, summed over ranks. Over the GPU's peak this is MFU by the "
            "engine's estimate. Only for engines that are started with the estimate on.",
            PanelUnit.FLOPS,
            (_FLOPS,),
        ),
        Panel(
            "Memory traffic of a GPU, estimated by the engine",
            "Bytes per second read and written, summed over ranks. Over the GPU's bandwidth this "
            "is MBU. Only for engines that are started with the estimate on.",
            PanelUnit.BYTES_PER_S,
            (_READ, _WRITTEN),
        ),
        _roofline(
            "Roofline by the engine's estimate",
            "FLOP/s over operations per byte moved, a point for each engine. Far left and low is "
            "bound by bandwidth: larger batches help. Far right and high is bound by compute. Only "
            "for engines that are started with the estimate on.",
            PanelUnit.FLOPS,
            ENGINE_MODEL,
            {
                "intensity": ratio(
                    _FLOPS.expression, f"({_READ.expression}\n  + {_WRITTEN.expression})"
                ),
                "FLOP/s": _FLOPS.expression,
            },
        ),
    ),
    closed=True,
)
