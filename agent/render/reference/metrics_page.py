"""The page of metrics: labels, unit, meaning, and when each has no series."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from agent.catalog.efficiency_metrics import EFFICIENCY_METRICS
from agent.catalog.engine_facts import ENGINE_FACTS
from agent.catalog.engines import DIALECTS
from agent.catalog.gpu_facts import GPU_FACTS
from agent.catalog.host_facts import HOST_FACTS
from agent.catalog.metric import Kind, Metric
from agent.catalog.metrics import AGENT_METRICS
from agent.render.reference.markdown_page import code, page, table

_ENDINGS = {Kind.COUNTER: "_total", Kind.GAUGE: "", Kind.HISTOGRAM: ""}
_HEADER = ("metric", "type", "unit", "labels", "meaning", "absent")


@dataclass(frozen=True, slots=True)
class _Group:
    """Metrics of one kind. `labels` come before each metric's own."""

    title: str
    remark: str
    metrics: Sequence[Metric]
    labels: tuple[str, ...]
    absent: Callable[[Metric], str]


def _own(metric: Metric) -> str:
    return metric.absent or "never"


def _of_engine(fact: Metric) -> str:
    engines = [name for name, dialect in DIALECTS.items() if fact in dialect.facts]
    given = "" if set(engines) == set(DIALECTS) else f"on engines other than {', '.join(engines)}"
    return fact.absent or given


def _of_gpu(fact: Metric) -> str:
    return fact.absent or "where the GPU does not report it"


_GROUPS = (
    _Group(
        "Requests, objectives and the agent",
        "Counters of known labels are 0 from the start.",
        AGENT_METRICS,
        (),
        _own,
    ),
    _Group(
        "Efficiency and cost",
        "Of the newest booked minute of an engine, so absent until its first minute is booked, "
        "about two minutes after the start.",
        EFFICIENCY_METRICS,
        (),
        _own,
    ),
    _Group(
        "Engines",
        "Every engine's own metrics under one name. All are absent while the engine does not "
        "answer (`llm_engine_up` is 0), and each where the exposition of the engine lacks it.",
        ENGINE_FACTS,
        ("engine", "model"),
        _of_engine,
    ),
    _Group(
        "Machines of engines",
        "Read by the agent on its own machine.",
        HOST_FACTS,
        (),
        _own,
    ),
    _Group(
        "GPUs",
        "The label `gpu` is the UUID. Of a GPU that cannot be read only `gpu_up` and the counts of "
        "Xids are left.",
        GPU_FACTS,
        ("gpu",),
        _of_gpu,
    ),
)


def metrics_page() -> str:
    """The page in Markdown."""
    return page(
        "Metrics",
        "Every metric on `/metrics`. A histogram has the series `_bucket`, `_sum` and `_count`. "
        "Prometheus adds `job` and `instance`; `instance` tells agents apart.",
        _parts(),
    )


def _parts() -> Iterator[str]:
    for group in _GROUPS:
        yield f"## {group.title}"
        yield group.remark
        yield table(_HEADER, (_row(metric, group) for metric in group.metrics))


def _row(metric: Metric, group: _Group) -> tuple[str, ...]:
    labels = (*group.labels, *metric.labels)
    return (
        code(metric.name + _ENDINGS[metric.kind]),
        metric.kind.value,
        metric.unit.value,
        ", ".join(code(label) for label in labels),
        metric.help,
        group.absent(metric),
    )
