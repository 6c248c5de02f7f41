"""The overview that `top` shows of a running agent or of one engine, as text for a terminal.

Unknown figures are None, and shown as `-`. Bounds are of engines' histograms.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from agent.analysis.engine_figures import EngineFigures
from agent.analysis.histogram_bounds import Bounds
from agent.catalog import engine_facts as fact
from agent.catalog import gpu_facts
from agent.records.engine import EngineSample

Json = Mapping[str, Any]
Figure = float | Bounds | None

UNKNOWN = "-"
_QUANTILES = ("p50", "p95", "p99")
_LIMITED = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s"}
# Of the summary and of `engine_counts`.
_LATENCIES = ("ttft", "tpot", "itl", "e2e", "queue", "prefill", "decode")
_RATES = {
    "requests/s": "throughput_rps",
    "goodput/s": "goodput_rps",
    "input tokens/s": "input_tokens_per_s",
    "output tokens/s": "output_tokens_per_s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLine:
    """An engine; `problem`: why it is not up. `old`: its figures are not of now."""

    name: str
    up: bool | None
    model: str | None = None
    running: float | None = None
    waiting: float | None = None
    kv_cache_usage: float | None = None
    problem: str | None = None
    old: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyLine:
    """Percentiles of a latency in milliseconds, and its limits by objective."""

    name: str
    quantiles_ms: Mapping[str, Figure]
    limits_ms: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveLine:
    """The attainment of an objective."""

    name: str
    target: float
    attainment: Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLine:
    """A GPU; memory in bytes. `old`: its figures are not of now."""

    name: str
    utilization: float | None
    memory_used: float | None
    memory_total: float | None
    power_watts: float | None
    temperature_celsius: float | None
    old: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EventLine:
    """An event of an engine or of a GPU."""

    at: datetime
    where: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """Everything that is shown. `rates` are by name; `notes` are sentences."""

    title: str
    at: datetime
    engines: Sequence[EngineLine]
    rates: Mapping[str, Figure]
    latencies: Sequence[LatencyLine]
    objectives: Sequence[ObjectiveLine] = ()
    gpus: Sequence[GpuLine] = ()
    events: Sequence[EventLine] = ()
    notes: Sequence[str] = ()


# Of a running agent


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFigures:
    """Responses of an agent's API: the summary, and the items of the others."""

    summary: Json
    objectives: Sequence[Json]
    engines: Sequence[Json]
    gpus: Sequence[Json]
    events: Sequence[Json]


def agent_overview(title: str, at: datetime, found: AgentFigures) -> Overview:
    """The overview of what an agent responded."""
    summary: Json = found.summary
    counts: Json = summary.get("engine_counts") or {}
    by_rows = bool(summary.get("requests"))
    notes = [] if by_rows or not counts else [_OF_ENGINES]
    if summary.get("simulated"):
        notes.append("SIMULATED: engines and GPUs of the demo")
    return Overview(
        title=title,
        at=at,
        engines=[_engine(each) for each in found.engines],
        rates={name: _either(summary, counts, key) for name, key in _RATES.items()},
        latencies=[*_latencies(summary, counts, found.objectives, by_rows=by_rows)],
        objectives=[_objective(each, counts) for each in found.objectives],
        gpus=[_gpu(each) for each in found.gpus],
        events=[_event(each) for each in found.events],
        notes=notes,
    )


_OF_ENGINES = "no request has a row: figures are of the engines' counters and histograms"


_OF_ENGINE = ("model", "running", "waiting", "kv_cache_usage", "problem")


def _engine(row: Json) -> EngineLine:
    # An agent of another version may not know each of them.
    known = {name: row.get(name) for name in _OF_ENGINE}
    return EngineLine(name=row["name"], up=row.get("up"), **known, old=_is_old(row))


def _is_old(row: Json) -> bool:
    age_s, most_s = row.get("age_s"), row.get("stale_after_s")
    return age_s is not None and most_s is not None and age_s > most_s


def _either(summary: Json, counts: Json, key: str) -> Figure:
    """The figure of rows; without any that of engines."""
    found = summary.get(key)
    return _figure(counts.get(key) if found is None else found)


def _figure(value: Json | float | None) -> Figure:
    if isinstance(value, Mapping):
        return Bounds(value["lower"], value["upper"], value.get("estimate"))
    return value


def _latencies(
    summary: Json, counts: Json, objectives: Sequence[Json], *, by_rows: bool
) -> Iterator[LatencyLine]:
    of_engines: Json = counts.get("latencies_ms", {})
    for name in _LATENCIES:
        found = summary.get(f"{name}_ms") if by_rows else None
        values = found or of_engines.get(name)
        if values is not None:
            yield LatencyLine(
                name=name,
                quantiles_ms={each: _figure(values.get(each)) for each in _QUANTILES},
                limits_ms=_limits(objectives, _LIMITED.get(name)),
            )


def _limits(objectives: Sequence[Json], key: str | None) -> dict[str, float]:
    limits = {each["name"]: each["definition"].get(key) for each in objectives}
    return {name: 1000 * limit_s for name, limit_s in limits.items() if limit_s is not None}


def _objective(row: Json, counts: Json) -> ObjectiveLine:
    bounds = {each["objective"]: each for each in counts.get("attainment", ())}
    attainment: Figure = row["attainment"]
    if attainment is None and row["name"] in bounds:
        found = bounds[row["name"]]
        attainment = Bounds(found["lower"], found["upper"])
    return ObjectiveLine(
        name=row["name"], target=row["definition"]["target"], attainment=attainment
    )


def _gpu(row: Json) -> GpuLine:
    facts: Json = row["facts"]
    hottest = [
        value
        for name, value in facts.items()
        if name.startswith(gpu_facts.TEMPERATURE.name) and value is not None
    ]
    return GpuLine(
        name=f"{row['index']} {row['name']}",
        utilization=facts.get(gpu_facts.UTILIZATION.name),
        memory_used=facts.get(gpu_facts.MEMORY_USED.name),
        memory_total=facts.get(gpu_facts.MEMORY_TOTAL.name),
        power_watts=facts.get(gpu_facts.POWER.name),
        temperature_celsius=max(hottest, default=None),
        old=_is_old(row),
    )


def _event(row: Json) -> EventLine:
    return EventLine(
        at=datetime.fromisoformat(row["at"]),
        where=row["engine"] or row["gpu"] or row["agent"],
        kind=row["kind"],
    )


# Of one engine


def engine_overview(url: str, sample: EngineSample, found: EngineFigures | None) -> Overview:
    """The overview of an engine that no agent watches; `found` is None after one read."""
    line = EngineLine(
        name=sample.dialect,
        up=True,
        model=sample.model,
        running=sample.fact(fact.REQUESTS_RUNNING.name),
        waiting=sample.fact(fact.REQUESTS_WAITING.name),
        kv_cache_usage=sample.fact(fact.KV_CACHE_USAGE.name),
    )
    return Overview(
        title=url,
        at=datetime.fromtimestamp(sample.at, UTC),
        engines=[line],
        rates={name: getattr(found, key, None) for name, key in _RATES.items()},
        latencies=[]
        if found is None
        else [
            LatencyLine(name=name, quantiles_ms=each.quantiles_ms, limits_ms={})
            for name, each in found.latencies.items()
        ],
        notes=[_NO_AGENT],
    )


_NO_AGENT = (
    "one engine by its own metrics, of the last five minutes at most, and none before this began; "
    "`goodput-agent run --engine URL` adds limits, requests, GPUs and events"
)


# As JSON and as text


def json_values(value: Any) -> Any:
    """An overview as values of JSON; bounds have `lower`, `upper` and `estimate`."""
    if isinstance(value, Bounds):
        return value._asdict()
    if isinstance(value, Mapping):
        return {key: json_values(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(inner) for inner in value]
    if is_dataclass(value):
        return {each.name: json_values(getattr(value, each.name)) for each in fields(value)}
    return value.isoformat() if isinstance(value, datetime) else value


def renderable(overview: Overview) -> RenderableType:
    """The overview for a terminal; a pure function."""
    head = Text(f"{overview.title}  {overview.at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC", "bold")
    parts: list[RenderableType] = [
        head,
        _engines(overview.engines),
        *_problems(overview.engines),
        _rates(overview.rates),
    ]
    if overview.objectives:
        parts.append(_objectives(overview.objectives))
    if overview.latencies:
        parts.append(_latency_table(overview.latencies))
    if overview.gpus:
        parts.append(_gpus(overview.gpus))
    if overview.events:
        parts.append(_events(overview.events))
    notes = [Text(note, "dim") for note in overview.notes]
    # A line between the parts.
    spaced = [each for part in parts for each in (part, Text())]
    return Group(*spaced, *notes)


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


_UP = {True: Text("up", "green"), False: Text("down", "bold red"), None: Text(UNKNOWN)}


def _engines(lines: Sequence[EngineLine]) -> Table:
    table = _table("engine", "", "running", "waiting", "KV cache", "model")
    for line in lines:
        table.add_row(
            Text(line.name),
            _UP[line.up],
            _number(line.running),
            _number(line.waiting),
            _percent(line.kv_cache_usage),
            Text(line.model or UNKNOWN),
            style="dim" if line.old else None,
        )
    if not lines:
        table.add_row(*(Text(UNKNOWN) for _ in table.columns))
    return table


def _problems(lines: Sequence[EngineLine]) -> Iterator[Text]:
    for line in lines:
        if line.problem is not None:
            yield Text(f"{line.name} is {_STATE[line.up]}: {line.problem}", "red")


_STATE = {True: "up", False: "down", None: "unknown"}


def _rates(rates: Mapping[str, Figure]) -> Table:
    table = _table(*rates)
    table.add_row(*map(_number, rates.values()))
    table.columns[0].justify = "right"
    return table


def _objectives(lines: Sequence[ObjectiveLine]) -> Table:
    table = _table("objective", "attainment", "target")
    for line in lines:
        style = _against(line.attainment, line.target, above=False)
        table.add_row(Text(line.name), _percent(line.attainment, style), _percent(line.target))
    return table


def _latency_table(lines: Sequence[LatencyLine]) -> Table:
    table = _table("latency, ms", *_QUANTILES, "limits")
    for line in lines:
        lowest = min(line.limits_ms.values(), default=None)
        cells = [
            _number(figure, _against(figure, lowest, above=True))
            for figure in (line.quantiles_ms.get(name) for name in _QUANTILES)
        ]
        limits = [f"{limit:g} {name}" for name, limit in line.limits_ms.items()]
        table.add_row(Text(line.name), *cells, Text(", ".join(limits) or UNKNOWN))
    return table


def _gpus(lines: Sequence[GpuLine]) -> Table:
    table = _table("GPU", "busy", "memory", "power", "temperature")
    for line in lines:
        table.add_row(
            Text(line.name),
            _percent(line.utilization),
            _memory(line),
            _number(line.power_watts, unit=" W"),
            _number(line.temperature_celsius, unit=" °C"),
            style="dim" if line.old else None,
        )
    return table


def _memory(line: GpuLine) -> Text:
    used, total = line.memory_used, line.memory_total
    if used is None or total is None:
        return Text(UNKNOWN)
    return Text(f"{used / 1e9:.1f} of {total / 1e9:.1f} GB")


def _events(lines: Sequence[EventLine]) -> Table:
    table = _table("last events, UTC", "", "")
    for line in lines:
        table.add_row(
            Text(f"{line.at.astimezone(UTC):%m-%d %H:%M:%S}"), Text(line.kind), Text(line.where)
        )
    return table


def _against(figure: Figure, limit: float | None, *, above: bool) -> str:
    """Red if a figure is surely on the wrong side of a limit, yellow if it may be."""
    if figure is None or limit is None:
        return ""
    bounds = figure if isinstance(figure, Bounds) else Bounds(figure, figure)
    sign = 1 if above else -1
    ends = [None if end is None else sign * (end - limit) > 0 for end in (bounds[0], bounds[1])]
    wrong = [end is None or end for end in ends]
    return "red" if all(wrong) and None not in ends else "yellow" if any(wrong) else ""


def _percent(figure: Figure, style: str = "") -> Text:
    scaled = figure.times(100.0) if isinstance(figure, Bounds) else figure
    if isinstance(scaled, float | int) and not isinstance(figure, Bounds):
        scaled = 100.0 * scaled
    return _number(scaled, style, unit=" %")


def _number(figure: Figure, style: str = "", *, unit: str = "") -> Text:
    if figure is None:
        return Text(UNKNOWN)
    if not isinstance(figure, Bounds):
        return Text(f"{_digits(figure)}{unit}", style)
    if figure.upper is None:
        return Text(f"over {_digits(figure.lower)}{unit}", style)
    if figure.lower == figure.upper:
        return Text(f"{_digits(figure.lower)}{unit}", style)
    return Text(f"{_digits(figure.lower)}-{_digits(figure.upper)}{unit}", style)


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
