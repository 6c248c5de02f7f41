"""The engine's own estimate of its work, for those that make one (vLLM's --enable-mfu-metrics)."""

from agent.catalog import engine_facts as fact
from agent.render.dashboards.panel_expressions import ENGINE_MODEL, rate, ratio
from agent.render.dashboards.panel_parts import Panel, PanelRow, PanelUnit, Query
from agent.render.dashboards.panel_styles import POINTS
from agent.render.dashboards.shared_queries import by_engine, named_point
from agent.render.promql import by

_FLOPS = by(ENGINE_MODEL, rate(fact.ESTIMATED_GPU_FLOPS))
_MOVED = (
    f"{by(ENGINE_MODEL, rate(fact.ESTIMATED_GPU_READ_BYTES))}\n"
    f"  + {by(ENGINE_MODEL, rate(fact.ESTIMATED_GPU_WRITE_BYTES))}"
)
_INTENSITY = ratio(_FLOPS, f"({_MOVED})")


ESTIMATES_ROW = PanelRow(
    "Work by the engine's own estimate",
    (
        Panel(
            title="FLOP/s of a GPU, estimated by the engine",
            description="Operations per second, summed over ranks. Over the GPU's peak this is "
            "MFU by the engine's own reckoning. Only where the engine was told to estimate.",
            unit=PanelUnit.FLOPS,
            queries=(by_engine(fact.ESTIMATED_GPU_FLOPS, ""),),
        ),
        Panel(
            title="Memory traffic of a GPU, estimated by the engine",
            description="Bytes per second read and written, summed over ranks. Over the GPU's "
            "bandwidth this is MBU. Only where the engine was told to estimate.",
            unit=PanelUnit.BYTES_PER_S,
            queries=(
                by_engine(fact.ESTIMATED_GPU_READ_BYTES, "read"),
                by_engine(fact.ESTIMATED_GPU_WRITE_BYTES, "written"),
            ),
        ),
        Panel(
            title="Roofline by the engine's estimate",
            description="FLOP/s over operations per byte moved, a point for each engine. Far left "
            "and low is bound by bandwidth: larger batches help. Far right and high is bound by "
            "compute. Only where the engine was told to estimate.",
            unit=PanelUnit.FLOPS,
            queries=(
                Query(
                    expression=named_point(_INTENSITY, *ENGINE_MODEL),
                    legend="intensity",
                    instant=True,
                ),
                Query(expression=named_point(_FLOPS, *ENGINE_MODEL), legend="FLOP/s", instant=True),
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
    ),
    closed=True,
)
