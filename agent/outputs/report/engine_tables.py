"""Tables of what engines counted themselves: rates, latencies, caches, drafts and pools."""

from collections.abc import Callable, Iterator, Sequence

from agent.outputs.report.tables import PERCENTILES, Json, ReportTable, counted_note
from agent.outputs.report.texts import milliseconds, number_text, printable, share, words


def _between(bounds: Json, show: Callable[[float | None], str]) -> str:
    """Between which values the true one lies."""
    lower, upper = show(bounds["lower"]), show(bounds["upper"])
    if bounds["upper"] is None:
        return f"above {lower}"
    return lower if lower == upper else f"{lower} to {upper}"


def counted_tables(counted: Json) -> Iterator[ReportTable]:
    """What engines counted themselves, and latencies by their histograms."""
    yield _counts(counted)
    yield _latencies(counted["latencies_ms"])


def _counts(counted: Json) -> ReportTable:
    rows = [
        ["requests", number_text(counted["requests"])],
        ["of them with a row", share(counted["rows_ratio"])],
        ["completed requests/s", number_text(counted["throughput_rps"], 3)],
        ["failed, at least", number_text(counted["failed"])],
        ["aborted", number_text(counted["aborted"])],
        ["output tokens/s", number_text(counted["output_tokens_per_s"])],
        ["input tokens/s", number_text(counted["input_tokens_per_s"])],
        ["prompt tokens that a cache served", share(counted["cached_ratio"])],
        ["preemptions", number_text(counted["preemptions"])],
        ["running requests, mean", number_text(counted["running"])],
        ["waiting requests, mean", number_text(counted["waiting"])],
        ["KV cache in use, mean", share(counted["kv_cache_usage"])],
        ["KV cache in use, most", share(counted["kv_cache_usage_max"])],
    ]
    rows += [
        [f"attainment of {printable(each['objective'])}", _between(each, share)]
        for each in counted["attainment"]
    ]
    return ReportTable(
        title="Counted by the engines themselves",
        columns=("figure", "value"),
        rows=rows,
        note=f"{counted_note(counted)} Attainment by histograms lies between two bounds.",
    )


def _latencies(latencies: Json) -> ReportTable:
    rows = [
        [name, *(_between(each[p], milliseconds) for p in PERCENTILES), milliseconds(each["mean"])]
        for name, each in latencies.items()
    ]
    return ReportTable(
        title="Latency by the engines' histograms, ms",
        columns=("latency", *PERCENTILES, "mean"),
        rows=rows,
        note="A percentile lies between the bounds of its bucket.",
    )


def savings_tables(savings: Sequence[Json]) -> Iterator[ReportTable]:
    """Whether caches outside the GPUs and drafts pay, each without rows if no engine has them."""
    of = {
        key: [(printable(each["engine"]), each[key]) for each in savings if each[key] is not None]
        for key in ("offload", "speculation")
    }
    yield _offload(of["offload"])
    yield _drafts(of["speculation"])


def _offload(engines: Sequence[tuple[str, Json]]) -> ReportTable:
    rows = [
        [
            engine,
            number_text(found["query_tokens"]),
            number_text(found["hit_tokens"]),
            share(found["hit_ratio"]),
            number_text(found["saved_s"]),
            number_text(found["load_s"]),
            words(found["verdict"]),
        ]
        for engine, found in engines
    ]
    return ReportTable(
        title="Caches outside the GPU",
        columns=(
            *("engine", "tokens looked up", "found", "hit ratio"),
            *("prefill saved s (estimate)", "loading s", "verdict"),
        ),
        rows=rows,
        words=frozenset(("verdict",)),
        note="They pay if the prefill that they save takes longer than loading.",
    )


def _drafts(engines: Sequence[tuple[str, Json]]) -> ReportTable:
    rows = [
        [
            engine,
            number_text(found["drafts"]),
            share(found["acceptance_ratio"]),
            number_text(found["mean_accepted_length"], 2),
            number_text(found["speedup"], 2),
            f"{number_text(found['at_least'], 2)} to {number_text(found['at_most'], 2)}",
            words(found["verdict"]),
        ]
        for engine, found in engines
    ]
    return ReportTable(
        title="Drafts",
        columns=(
            *("engine", "drafts", "accepted", "tokens a step"),
            *("speed-up (estimate)", "bounds", "verdict"),
        ),
        rows=rows,
        words=frozenset(("verdict",)),
        note="The speed-up is of the tokens per second, at the batches that ran.",
    )


def pools_table(found: Json) -> ReportTable:
    """The pools of one model, with the one to grow."""
    rows = [
        [
            each["role"],
            ", ".join(map(printable, each["engines"])),
            number_text(each["running"]),
            number_text(each["waiting"]),
            number_text(each["load"], 2),
            number_text(each["queue_s"], 2),
            share(each["kv_cache_usage"]),
            number_text(each["transfer_s"], 3),
        ]
        for each in found["pools"]
    ]
    ratio, grow = found["load_ratio"], found["grow"]
    loads = "" if ratio is None else f"Prefill has {ratio:.2f} times the load of decode. "
    return ReportTable(
        title=f"Pools of {printable(found['model'])}",
        columns=(
            *("pool", "engines", "running", "waiting", "load", "queue s", "KV cache"),
            "KV transfer s",
        ),
        rows=rows,
        words=frozenset(("engines",)),
        note=f"{loads}Load is (running + waiting) / running."
        + ("" if grow is None else f" Add a {grow} engine."),
    )
