"""The document of a report, from its figures."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from agent.outputs.report.document import ReportChart, ReportDocument, ReportTable
from agent.outputs.report.figures import DIMENSIONS, Json, ReportFigures
from agent.outputs.report.number_texts import milliseconds, moment, number, printable, share
from agent.outputs.report.spending_sections import spending_tables
from agent.settings.values import duration_text

_PERCENTILES = ("p50", "p95", "p99")
_LATENCIES = {
    "time to first token, ms": "ttft_ms",
    "time per output token, ms": "tpot_ms",
    "end to end, ms": "e2e_ms",
    "queue, ms": "queue_ms",
}
_LONGEST_EVIDENCE = 120


def document_of(figures: ReportFigures) -> ReportDocument:
    """The whole report; tables without any row are left out."""
    summary = figures.summary
    return ReportDocument(
        title="goodput-agent report",
        window=f"{moment(summary['window_from'])} to {moment(summary['window_until'])} UTC",
        warnings=list(warnings_of(summary)),
        tables=[table for table in _tables(figures) if table.rows],
        charts=list(_charts(figures.steps)),
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
    yield _causes(summary["cause_details"])
    for by in DIMENSIONS:
        yield _groups(by, figures.groups[by])
    yield from spending_tables(summary)
    yield _events(figures)


def _objectives(objectives: Sequence[Json]) -> ReportTable:
    rows = [
        [
            printable(each["name"]),
            share(each["definition"]["target"]),
            share(each["attainment"]),
            number(each["met"]),
            number(each["missed"]),
            number(each["undetermined"]),
            number(each["violations_per_min"]),
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
        "of the objective's own window, below 0 where it is overspent.",
    )


def _traffic(summary: Json) -> ReportTable:
    failures = summary["failures"]
    rows = [
        ["requests", number(summary["requests"])],
        ["goodput, requests/s", number(summary["goodput_rps"], 3)],
        ["throughput, requests/s", number(summary["throughput_rps"], 3)],
        ["goodput, output tokens/s", number(summary["goodput_tokens_per_s"])],
        ["output tokens/s", number(summary["output_tokens_per_s"])],
        ["input tokens/s", number(summary["input_tokens_per_s"])],
        ["error ratio", share(summary["error_ratio"])],
        ["failed at the proxy", number(failures["proxy"]["failed"])],
        ["failed at the engine, at least", number(failures["engine"]["failed"])],
    ]
    return ReportTable(title="Traffic", columns=("figure", "value"), rows=rows)


def _latencies(summary: Json) -> ReportTable:
    rows = [
        [name, *(milliseconds(summary[field][p]) for p in _PERCENTILES)]
        for name, field in _LATENCIES.items()
    ]
    speeds = summary["stream_tokens_per_s"]
    slowest = [number(speeds[p]) for p in ("p50", "p5", "p1")]
    rows.append(["tokens/s of a stream, p50 p5 p1", *slowest])
    error = share(summary["relative_error"])
    return ReportTable(
        title="Latency",
        columns=("latency", *_PERCENTILES),
        rows=rows,
        note=f"Each percentile is within {error} of a real request's value.",
    )


def _causes(causes: Sequence[Json]) -> ReportTable:
    rows = [
        [
            printable(each["cause"]).replace("_", " "),
            number(each["requests"]),
            number(each["seconds"], 2),
            share(each["share"]),
            "" if each["advice"] is None else each["advice"]["knob"],
        ]
        for each in causes
    ]
    return ReportTable(
        title="Causes of misses",
        columns=("cause", "requests", "seconds", "share", "what to turn"),
        rows=rows,
        words=frozenset(("what to turn",)),
    )


def _groups(by: str, response: Json) -> ReportTable:
    rows = [
        [
            printable(each["group"]),
            number(each["requests"]),
            share(each["attainment"]),
            number(each["goodput_rps"], 3),
            number(each["output_tokens_per_s"]),
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
            printable(each["kind"]),
            printable(each["engine"] or each["gpu"]),
            printable(each["confidence"]),
            _evidence(each["evidence"]),
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


def _evidence(evidence: Mapping[str, Any]) -> str:
    text = printable(", ".join(f"{name}: {value}" for name, value in evidence.items()))
    return text if len(text) <= _LONGEST_EVIDENCE else f"{text[:_LONGEST_EVIDENCE]}..."


def _charts(steps: Sequence[Json]) -> Iterator[ReportChart]:
    if not steps:
        return
    at = [datetime.fromisoformat(step["at"]).timestamp() for step in steps]

    def chart(title: str, unit: str, lines: Mapping[str, Sequence[float | None]]) -> ReportChart:
        return ReportChart(title=title, unit=unit, at=at, lines=lines)

    def flat(name: str) -> list[float | None]:
        return [step[name] for step in steps]

    names = sorted({each["objective"] for step in steps for each in step["by_objective"]})
    yield chart("Attainment", "share", {name: _attained(steps, name) for name in names})
    yield chart(
        "Goodput and throughput",
        "requests/s",
        {"goodput": flat("goodput_rps"), "throughput": flat("throughput_rps")},
    )
    for title, field in (("Time to first token", "ttft_ms"), ("Time per output token", "tpot_ms")):
        lines = {p: [step[field][p] for step in steps] for p in _PERCENTILES}
        yield chart(title, "ms", lines)
    tokens = {"input": flat("input_tokens_per_s"), "output": flat("output_tokens_per_s")}
    yield chart("Tokens", "tokens/s", tokens)


def _attained(steps: Sequence[Json], objective: str) -> list[float | None]:
    by_name = [
        {each["objective"]: each["attainment"] for each in step["by_objective"]} for step in steps
    ]
    return [attained.get(objective) for attained in by_name]
