"""Tables of a report on how GPUs were used, what that cost, and what is in no row."""

from collections.abc import Iterator

from agent.outputs.report.document import ReportTable
from agent.outputs.report.figures import Json
from agent.outputs.report.number_texts import dollars, moment, number, share


def spending_tables(summary: Json) -> Iterator[ReportTable]:
    """Efficiency, cost and ledger, as far as minutes are booked."""
    if summary["efficiency"] is not None:
        yield _efficiency(summary)
    if summary["cost"] is not None:
        yield _cost(summary["cost"])
    if summary["ledger"] is not None:
        yield _ledger(summary["ledger"])


def _counted(part: Json) -> str:
    return f"Booked minutes from {moment(part['counted_from'])} to {moment(part['counted_until'])}."


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
        ["mean accepted length", number(drafts.get("mean_accepted_length"), 2)],
        ["preemptions", number(found["preemptions"])],
    ]
    note = f"{_counted(found)} MFU and MBU by requests and engine are estimates."
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
        "per million tokens within objectives": "usd_per_million_tokens_within_objective",
        "per request": "usd_per_request",
    }
    rows = [[name, dollars(cost[field])] for name, field in parts.items()]
    rows.append(["GPU-hours", number(cost["gpu_hours"], 3)])
    rows.append(["joules per output token", number(cost["joules_per_output_token"], 3)])
    return ReportTable(title="Cost", columns=("figure", "value"), rows=rows, note=_counted(cost))


def _ledger(ledger: Json) -> ReportTable:
    rows = [
        [name, *(number(ledger[side][field]) for side in ("counted", "unaccounted", "open"))]
        for name, field in (
            ("requests", "requests"),
            ("input tokens", "input_tokens"),
            ("output tokens", "output_tokens"),
        )
    ]
    rows += [
        [f"requests {reason}", "", number(requests), ""]
        for reason, requests in ledger["unaccounted_requests"].items()
    ]
    return ReportTable(
        title="Work that is in no row",
        columns=("what", "counted", "unaccounted", "open"),
        rows=rows,
        note=f"Cost of unaccounted work: {dollars(ledger['unaccounted_usd'])}, an estimate.",
    )
