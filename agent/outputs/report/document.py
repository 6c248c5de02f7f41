"""A report as plain data: the API's figures, and the tables and charts made of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from agent.outputs.report.engine_tables import counted_tables, pools_table, savings_tables
from agent.outputs.report.tables import PERCENTILES, Json, ReportTable, counted_note
from agent.outputs.report.texts import (
    dollars,
    evidence_text,
    milliseconds,
    moment,
    number_text,
    percent,
    plural,
    printable,
    share,
    words,
)
from agent.settings.values import duration_text


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportChart:
    """Lines over time; None is a gap. Times are Unix seconds. `limits` are values by name."""

    title: str
    unit: str
    at: Sequence[float]
    lines: Mapping[str, Sequence[float | None]]
    limits: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportDocument:
    """A whole report. `sentences` say the most important first."""

    title: str
    window: str
    sentences: Sequence[str]
    warnings: Sequence[str]
    tables: Sequence[ReportTable]
    charts: Sequence[ReportChart]


DIMENSIONS = ("engine", "model", "tenant", "input_length")
MOST_GROUPS = 20
MOST_EVENTS = 100
_MOST_STEPS = 150
_STEPS_S = (10, 60, 300, 600, 1800, 3600, 6 * 3600, 86400, 7 * 86400)


class ReadApi(Protocol):
    """Reads one route of the API below `/api/v1/`; parameters are of its query."""

    def __call__(self, route: str, **parameters: str | int) -> Json:
        """The response. Raises AgentError if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFigures:
    """Responses of the API: `groups` by dimension, `pools` by model, the newest events first."""

    summary: Json
    objectives: Sequence[Json]
    groups: Mapping[str, Json]
    steps: Sequence[Json]
    pools: Sequence[Json]
    events: Sequence[Json]
    more_events: bool


def read_figures(
    read: ReadApi, window: Mapping[str, str], done: Callable[[], None]
) -> ReportFigures:
    """The figures of a window, as parameters of the API; calls `done` after each of the READS."""

    def get(route: str, **parameters: str | int) -> Json:
        found = read(route, **window, **parameters)
        done()
        return found

    summary = get("summary")
    step = _step(summary["window_s"])
    events = get("events", limit=MOST_EVENTS)
    return ReportFigures(
        summary=summary,
        objectives=get("objectives")["items"],
        groups={by: get("breakdown", by=by, limit=MOST_GROUPS) for by in DIMENSIONS},
        steps=get("timeseries", step=step)["items"] if step else [],
        pools=get("pools")["items"],
        events=events["items"],
        more_events=events["next"] is not None,
    )


# How many responses make a report.
READS = 5 + len(DIMENSIONS)


def _step(window_s: float) -> str | None:
    """The shortest step that makes a readable chart; None of a window too short for one."""
    fitting = (step for step in _STEPS_S if window_s / step <= _MOST_STEPS)
    step = next(fitting, _STEPS_S[-1])
    return f"{step}s" if window_s >= 2 * step else None


def spending_tables(summary: Json) -> Iterator[ReportTable]:
    """Efficiency, cost and ledger, as far as minutes are stored."""
    if summary["efficiency"] is not None:
        yield _efficiency(summary)
    if summary["cost"] is not None:
        yield _cost(summary["cost"])
    if summary["ledger"] is not None:
        yield _ledger(summary["ledger"])


def _efficiency(summary: Json) -> ReportTable:
    found = summary["efficiency"]
    rows = [
        [f"MFU and MBU by {source}", f"{share(use['mfu'])}, {share(use['mbu'])}"]
        for source, use in found["sources"].items()
    ]
    rows += [
        [f"{phase} is", found[phase]["bound"]]
        for phase in ("prefill", "decode")
        if found[phase] is not None and found[phase]["bound"] is not None
    ]
    cache, drafts = found["prefix_cache"] or {}, found["speculation"] or {}
    fill = found["batch_fill"] or {}
    rows += [
        ["running requests, share of the most that may run", share(fill.get("requests"))],
        ["tokens of a step, share of the most (estimate)", share(fill.get("tokens"))],
        ["prefix cache, share of tokens found", share(cache.get("hit_ratio"))],
        ["drafted tokens accepted", share(drafts.get("acceptance_rate"))],
        ["mean accepted length", number_text(drafts.get("mean_accepted_length"), 2)],
        ["preemptions", number_text(found["preemptions"])],
    ]
    note = f"{counted_note(found)} Only those by hardware are no estimates."
    return ReportTable(title="Efficiency", columns=("figure", "value"), rows=rows, note=note)


def _cost(cost: Json) -> ReportTable:
    parts = {
        "bill": "bill_usd",
        "prefill": "prefill_usd",
        "decode": "decode_usd",
        "work of requests without a row": "unseen_usd",
        "idle": "idle_usd",
        "not read": "unknown_usd",
        "aborted requests, in the above": "aborted_usd",
        "per hour": "usd_per_hour",
        "per million input tokens": "usd_per_million_input_tokens",
        "per million output tokens": "usd_per_million_output_tokens",
        "bill per million output tokens": "allocated_usd_per_million_output_tokens",
        "per million tokens within objectives": "usd_per_million_tokens_within_objective",
        "per request": "usd_per_request",
    }
    rows = [[name, dollars(cost[field])] for name, field in parts.items()]
    rows.append(["GPU-hours", number_text(cost["gpu_hours"], 3)])
    rows.append(["joules per output token", number_text(cost["joules_per_output_token"], 3)])
    return ReportTable(
        title="Cost", columns=("figure", "value"), rows=rows, note=counted_note(cost)
    )


def _ledger(ledger: Json) -> ReportTable:
    rows = [
        [name, *(number_text(ledger[side][field]) for side in ("counted", "unaccounted", "open"))]
        for name, field in (
            ("requests", "requests"),
            ("input tokens", "input_tokens"),
            ("output tokens", "output_tokens"),
        )
    ]
    rows += [
        [f"requests {reason}", "", number_text(requests), ""]
        for reason, requests in ledger["unaccounted_requests"].items()
    ]
    return ReportTable(
        title="Work that is in no row",
        columns=("what", "counted", "unaccounted", "open"),
        rows=rows,
        note=f"Cost of unaccounted work: {dollars(ledger['unaccounted_usd'])}, an estimate.",
    )


_LATENCIES = {
    "time to first token, ms": "ttft_ms",
    "time per output token, ms": "tpot_ms",
    "end to end, ms": "e2e_ms",
    "queue, ms": "queue_ms",
}


def document_of(figures: ReportFigures) -> ReportDocument:
    """The whole report; tables without any row are left out."""
    summary = figures.summary
    return ReportDocument(
        title="goodput-agent report",
        window=f"{moment(summary['window_from'])} to {moment(summary['window_until'])} UTC",
        sentences=list(_sentences(figures)),
        warnings=list(warnings_of(summary)),
        tables=[table for table in _tables(figures) if table.rows],
        charts=list(_charts(figures)),
    )


def _sentences(figures: ReportFigures) -> Iterator[str]:
    """Was the promise kept, what prevented it, and what did it cost?"""
    summary = figures.summary
    judged = [each for each in figures.objectives if each["attainment"] is not None]
    if not judged:
        yield f"No request of this window was judged; {plural(summary['requests'])} ended."
    for each in sorted(judged, key=_margin):
        yield _kept(each)
    yield from _blamed(summary)
    if (cost := summary["cost"]) is not None:
        idle = cost["idle_usd"] / cost["bill_usd"] if cost["bill_usd"] else None
        yield f"The GPUs cost {dollars(cost['bill_usd'])}; {percent(idle)} of it was idle time."


def _margin(objective: Json) -> float:
    """How far it is above its target."""
    return float(objective["attainment"] - (objective["definition"]["target"] or 0.0))


def _kept(objective: Json) -> str:
    met, missed = objective["met"], objective["missed"]
    target = objective["definition"]["target"]
    against = "" if target is None else f", {_against(objective)} its target of {percent(target)}"
    return (
        f"{percent(objective['attainment'])} of {plural(met + missed, 'judged request')} "
        f"met the objective {printable(objective['name'])}{against}; {number_text(missed)} missed."
    )


def _against(objective: Json) -> str:
    margin = _margin(objective)
    return "at" if margin == 0 else "above" if margin > 0 else "below"


def _blamed(summary: Json) -> Iterator[str]:
    """The cause of most excess seconds, and what to change."""
    found = [each for each in summary["cause_details"] if each["share"]]
    if not found:
        return
    first = max(found, key=lambda each: each["share"])
    advice = first["advice"]
    yield (
        f"{percent(first['share'])} of the time over the limits is due to "
        f"{words(first['cause'])}. {'' if advice is None else advice['text']}".rstrip()
    )


def warnings_of(summary: Json) -> Iterator[str]:
    """What a reader must know before any figure of this window."""
    if summary["simulated"]:
        yield "SIMULATED: these figures come from the built-in simulator, not from a real engine."
    if summary["data_from"] is None:
        yield "No data is stored of this window."
    elif summary["covered_s"] < 0.99 * summary["window_s"]:
        yield f"The stored data begins at {moment(summary['data_from'])} UTC, within the window."


def _tables(figures: ReportFigures) -> Iterator[ReportTable]:
    summary = figures.summary
    yield _objectives(figures.objectives)
    yield _traffic(summary)
    yield _latencies(summary)
    if (counted := summary["engine_counts"]) is not None:
        yield from counted_tables(counted)
    yield _causes(summary["cause_details"])
    for by in DIMENSIONS:
        yield _groups(by, figures.groups[by])
    yield from spending_tables(summary)
    yield from savings_tables((counted or {}).get("savings", ()))
    yield from map(pools_table, figures.pools)
    yield _events(figures)


def _objectives(objectives: Sequence[Json]) -> ReportTable:
    rows = [
        [
            printable(each["name"]),
            share(each["definition"]["target"]),
            share(each["attainment"]),
            number_text(each["met"]),
            number_text(each["missed"]),
            number_text(each["undetermined"]),
            number_text(each["violations_per_min"]),
            f"{share(each['budget']['left'])} of {duration_text(each['definition']['window_s'])}",
        ]
        for each in objectives
    ]
    return ReportTable(
        title="Objectives",
        columns=(
            *("objective", "target", "attained", "met", "missed", "undetermined"),
            *("missed per min", "budget left"),
        ),
        rows=rows,
        note="Attained is met / (met + missed) of this report's window; the error budget is that "
        "of the objective's own window, below 0 if it is overspent.",
    )


def _traffic(summary: Json) -> ReportTable:
    failures = summary["failures"]
    rows = [
        ["requests", number_text(summary["requests"])],
        ["goodput, requests/s", number_text(summary["goodput_rps"], 3)],
        ["throughput, requests/s", number_text(summary["throughput_rps"], 3)],
        ["goodput, output tokens/s", number_text(summary["goodput_tokens_per_s"])],
        ["output tokens/s", number_text(summary["output_tokens_per_s"])],
        ["input tokens/s", number_text(summary["input_tokens_per_s"])],
        ["error ratio", share(summary["error_ratio"])],
        ["failed, of those with the user's view", number_text(failures["proxy"]["failed"])],
        [
            "failed, of those with the engine's alone, at least",
            number_text(failures["engine"]["failed"]),
        ],
    ]
    return ReportTable(title="Traffic", columns=("figure", "value"), rows=rows)


def _latencies(summary: Json) -> ReportTable:
    rows = [
        [name, *(milliseconds(summary[field][p]) for p in PERCENTILES)]
        for name, field in _LATENCIES.items()
    ]
    speeds = summary["stream_tokens_per_s"]
    slowest = [number_text(speeds[p]) for p in ("p50", "p5", "p1")]
    rows.append(["tokens/s of a stream, p50 p5 p1", *slowest])
    error = share(summary["relative_error"])
    return ReportTable(
        title="Latency",
        columns=("latency", *PERCENTILES),
        rows=rows,
        note=f"Each percentile is within {error} of a real request's value.",
    )


def _causes(causes: Sequence[Json]) -> ReportTable:
    rows = [
        [
            words(each["cause"]),
            number_text(each["requests"]),
            number_text(each["seconds"], 2),
            share(each["share"]),
            "" if each["advice"] is None else each["advice"]["text"],
        ]
        for each in causes
    ]
    return ReportTable(
        title="Causes of misses",
        columns=("cause", "requests", "seconds", "share", "what to change"),
        rows=rows,
        words=frozenset(("what to change",)),
    )


def _groups(by: str, response: Json) -> ReportTable:
    rows = [
        [
            printable(each["group"]),
            number_text(each["requests"]),
            share(each["attainment"]),
            number_text(each["goodput_rps"], 3),
            number_text(each["output_tokens_per_s"]),
            milliseconds(each["ttft_ms"]["p95"]),
            milliseconds(each["tpot_ms"]["p95"]),
        ]
        for each in response["groups"]
    ]
    left_out = response["left_out"]
    name = by.replace("_", " ")
    return ReportTable(
        title=f"By {name}",
        columns=(
            *(name, "requests", "attained", "goodput/s", "output tokens/s"),
            *("TTFT p95 ms", "TPOT p95 ms"),
        ),
        rows=rows,
        note=f"{left_out} more have fewer requests." if left_out else None,
    )


def _events(figures: ReportFigures) -> ReportTable:
    rows = [
        [
            moment(each["at"]),
            words(each["kind"]).lower(),
            printable(each["engine"] or each["gpu"]),
            printable(each["confidence"]),
            evidence_text(each["evidence"]),
        ]
        for each in figures.events
    ]
    return ReportTable(
        title="Events",
        columns=("at (UTC)", "kind", "engine or GPU", "confidence", "evidence"),
        rows=rows,
        words=frozenset(("kind", "engine or GPU", "confidence", "evidence")),
        note="Earlier events of the window are at /api/v1/events." if figures.more_events else None,
    )


def _charts(figures: ReportFigures) -> Iterator[ReportChart]:
    steps = figures.steps
    if not steps:
        return
    at = [datetime.fromisoformat(step["at"]).timestamp() for step in steps]

    def chart(
        title: str,
        unit: str,
        lines: Mapping[str, Sequence[float | None]],
        limits: Mapping[str, float] | None = None,
    ) -> ReportChart:
        return ReportChart(title=title, unit=unit, at=at, lines=lines, limits=limits or {})

    def flat(name: str) -> list[float | None]:
        return [step[name] for step in steps]

    names = sorted({each["objective"] for step in steps for each in step["by_objective"]})
    attained = {name: _attained(steps, name) for name in names}
    yield chart("Attainment", "%", attained, _limits(figures, "target", 100))
    yield chart(
        "Goodput and throughput",
        "requests/s",
        {"goodput": flat("goodput_rps"), "throughput": flat("throughput_rps")},
    )
    for title, field in (("Time to first token", "ttft_ms"), ("Time per output token", "tpot_ms")):
        lines = {p: [step[field][p] for step in steps] for p in PERCENTILES}
        yield chart(title, "ms", lines, _limits(figures, field.replace("_ms", "_s"), 1000))
    tokens = {"input": flat("input_tokens_per_s"), "output": flat("output_tokens_per_s")}
    yield chart("Tokens", "tokens/s", tokens)


def _attained(steps: Sequence[Json], objective: str) -> list[float | None]:
    by_name = [
        {each["objective"]: each["attainment"] for each in step["by_objective"]} for step in steps
    ]
    return [None if (found := each.get(objective)) is None else 100 * found for each in by_name]


def _limits(figures: ReportFigures, field: str, scale: float) -> dict[str, float]:
    """What objectives promise, as lines of a chart; equal ones are one line."""
    names: dict[float, list[str]] = {}
    for each in figures.objectives:
        if (value := each["definition"][field]) is not None:
            names.setdefault(scale * value, []).append(printable(each["name"]))
    kind = "target" if field == "target" else "limit"
    return {f"{kind} of {', '.join(of)}": value for value, of in names.items()}
