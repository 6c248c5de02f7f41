"""Use and cost of the GPUs, and the ledger, from stored minutes: in a summary, and by step."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from math import fsum
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import Field

from agent.analysis.cost.bill import spending, usd_per_million_by_objective
from agent.analysis.efficiency.window_efficiency import (
    BatchFill,
    PrefixCache,
    Speculation,
    Utilisation,
    WindowEfficiency,
    batch_fill,
    prefix_cache,
    speculation,
    window_efficiency,
)
from agent.analysis.ledger import unaccounted_requests
from agent.catalog.reasons import WithoutRow
from agent.catalog.time_units import HOUR_S
from agent.outputs.api.api_context import ApiContext, ApiQueries
from agent.outputs.api.base_responses import BaseResponse, ListOf
from agent.outputs.api.query_parameters import AskedWindow, StepText, asked_window, selection
from agent.records.minute import MINUTE_LENGTH_S, Ledger, MinuteRow, total
from agent.records.queries import Selection, Window

_REASONS = ", ".join(WithoutRow)


class LedgerSideResponse(BaseResponse):
    """Tokens and requests; null if no engine counts them.

    Requests had their first token in the window. Each choice of `n` is one.
    """

    input_tokens: float | None
    output_tokens: float | None
    requests: float | None


class LedgerResponse(BaseResponse):
    """What engines counted in the minutes whose requests have all ended, and what of it is in rows.

    Minutes with open requests are in `open` alone; those without samples are in nothing here.
    """

    counted_from: datetime | None = Field(description="null while every minute has open requests")
    counted_until: datetime | None
    counted: LedgerSideResponse = Field(description="by the engines")
    unaccounted: LedgerSideResponse = Field(description="of these, in no row")
    unaccounted_usd: float | None = Field(
        description="busy time for unaccounted work, an estimate; null without a price"
    )
    unaccounted_requests: Mapping[str, float] = Field(description=f"by reason: {_REASONS}")
    rows_without_tokens: float = Field(
        description="requests with a row that lacks tokens, which are unaccounted for that reason"
    )
    open: LedgerSideResponse = Field(
        description="without a row, in minutes with requests that may still run"
    )


def ledger_of(minutes: Sequence[MinuteRow]) -> LedgerResponse | None:
    """The ledger of these minutes; None if no engine counts tokens."""
    known = [minute for minute in minutes if minute.ledger is not None]
    if not known:
        return None
    closed = [minute for minute in known if minute.ledger_closed]
    ledgers = _by_engine(closed)
    priced = [minute.cost.unseen for minute in closed if minute.cost is not None]
    return LedgerResponse(
        counted_from=None if not closed else _utc(min(minute.from_at for minute in closed)),
        counted_until=None if not closed else _utc(max(minute.until for minute in closed)),
        counted=LedgerSideResponse(
            input_tokens=_sum(each.input_tokens for each in ledgers),
            output_tokens=_sum(each.output_tokens for each in ledgers),
            requests=_sum(each.requests for each in ledgers),
        ),
        unaccounted=_without_row(ledgers),
        unaccounted_usd=fsum(priced) if priced else None,
        unaccounted_requests=_by_reason(ledgers),
        rows_without_tokens=fsum(each.rows_without_tokens for each in ledgers),
        open=_without_row(_by_engine([each for each in known if not each.ledger_closed])),
    )


def _utc(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)


def _by_engine(minutes: Sequence[MinuteRow]) -> list[Ledger]:
    """The sum of each engine: what one counted too little hides nothing of another."""
    ledgers: defaultdict[str, list[Ledger]] = defaultdict(list)
    for minute in minutes:
        if minute.ledger is not None:
            ledgers[minute.engine].append(minute.ledger)
    sums = (total(each) for each in ledgers.values())
    return [each for each in sums if each is not None]


def _by_reason(ledgers: Sequence[Ledger]) -> dict[str, float]:
    found: defaultdict[str, float] = defaultdict(float)
    for ledger in ledgers:
        for reason, requests in unaccounted_requests(ledger).items():
            found[reason] += max(requests, 0.0)
    return dict(found)


def _without_row(ledgers: Sequence[Ledger]) -> LedgerSideResponse:
    return LedgerSideResponse(
        input_tokens=_sum(_less(each.input_tokens, each.row_input_tokens) for each in ledgers),
        output_tokens=_sum(_less(each.output_tokens, each.row_output_tokens) for each in ledgers),
        requests=_sum(_less(each.requests, each.row_requests) for each in ledgers),
    )


def _less(counted: float | None, in_rows: float) -> float | None:
    return None if counted is None else max(counted - in_rows, 0.0)


def _sum(values: Iterable[float | None]) -> float | None:
    """The sum; None if any is unknown."""
    found = list(values)
    known = [value for value in found if value is not None]
    return fsum(known) if len(known) == len(found) else None


class UtilisationResponse(BaseResponse):
    """How well the GPUs were used. Fields are null if the model or a peak is unknown."""

    mfu: float | None
    mbu: float | None
    achieved_flops_per_s: float | None = Field(default=None, description="of all GPUs together")
    achieved_bytes_per_s: float | None = Field(default=None, description="of all GPUs together")
    flops_per_byte: float | None = None
    ridge_flops_per_byte: float | None = None
    roofline_share: float | None = Field(
        default=None, description="achieved FLOP/s over what the roofline allows there"
    )
    bound: str | None = Field(
        default=None, description="compute-bound, bandwidth-bound or memory-capacity-bound"
    )
    actions: list[str] = Field(default=[], description="what to do about it, best first")


class DisagreementResponse(BaseResponse):
    """A figure that is `times` as high by one source as by another, and why."""

    figure: str
    higher: str
    lower: str
    times: float | None = Field(description="null if the lower figure is 0")
    cause: str | None = Field(default=None, description="the name of the first of the causes")
    causes: list[str] = Field(description="the likely one first")


class EfficiencyResponse(BaseResponse):
    """How well the GPUs were used in the stored minutes, with idle and without unknown time.

    The phases and `busy` are estimates from the requests, over the time in which they went on.
    """

    counted_from: datetime
    counted_until: datetime
    prefill: UtilisationResponse | None
    decode: UtilisationResponse | None
    busy: UtilisationResponse | None
    sources: Mapping[str, UtilisationResponse] = Field(
        description="requests, counters (mean lengths, without rows) and engine are estimates, "
        "hardware is measured"
    )
    weights_alone: bool = Field(
        description="decode counts the bytes of weights and nothing else: the files tell them, but "
        "the architecture is unknown, and so are FLOPs and bytes of KV cache"
    )
    steps: list[str] = Field(description="counted by the engine, estimated, or both")
    disagreements: list[DisagreementResponse] = Field(description="of the newest minute")
    rejected_draft_share: float | None = Field(
        description="rejected drafts, as a share of all computed output tokens"
    )
    preemptions: float | None = Field(
        description="running requests that were thrown back and computed again"
    )
    prefix_cache: PrefixCache | None = Field(description="null if no engine counts it")
    speculation: Speculation | None = Field(description="null if no engine counts it")
    batch_fill: BatchFill | None = Field(description="null if no limit is known")


class CostResponse(BaseResponse):
    """Dollars for the stored minutes with a price.

    The bill is prefill + decode (with aborted requests) + unseen + idle + unknown. `busy` leaves
    out the last two. Active figures are of busy time for requests with a row.
    """

    counted_from: datetime
    counted_until: datetime
    priced_s: float = Field(description="time with a price, of all engines together")
    unpriced_s: float = Field(description="time without one, which is in no other figure in USD")
    bill_usd: float
    busy_usd: float
    prefill_usd: float
    decode_usd: float
    idle_usd: float
    unknown_usd: float = Field(description="time in which the engine was not read")
    unseen_usd: float = Field(description="work of requests without a row")
    aborted_usd: float
    aborted_prefill_usd: float = Field(description="of the aborted, in prefill")
    wasted_usd: float = Field(description="unseen and aborted")
    electricity_usd: float | None = Field(description="in the bill; null if not measured")
    usd_per_hour: float = Field(description="of all engines together, at the rate of the bill")
    usd_per_million_input_tokens: float | None
    usd_per_million_computed_input_tokens: float | None
    usd_per_million_cached_input_tokens: float | None
    usd_per_million_output_tokens: float | None
    allocated_usd_per_million_output_tokens: float | None = Field(
        description="the whole bill over all output tokens that engines counted, rows or not"
    )
    usd_per_request: float | None = Field(description="active")
    overhead: float | None = Field(description="the bill over the cost of the requests")
    allocated_usd_per_request: float | None = Field(description="the whole bill over the requests")
    usd_per_million_tokens_within_objective: float | None = Field(
        description="the whole bill over output tokens of requests that met their objectives"
    )
    usd_per_million_tokens_by_objective: Mapping[str, float] = Field(
        description="the same by objective, without objectives that no request met"
    )
    gpu_hours: float | None
    joules: float | None
    joules_per_output_token: float | None = Field(
        description="over all output tokens that engines counted while energy was measured"
    )
    methods: list[str] = Field(description="how work of one step was weighed")


def efficiency_and_cost(queries: ApiQueries, over: Window, chosen: Selection) -> dict[str, Any]:
    """The summary's fields; empty if no minute is stored, and for one tenant or objective.

    GPUs work for all requests at once, so the figures of a part of them are unknown.
    """
    if chosen.tenant is not None or chosen.objective is not None:
        return {}
    return efficiency_and_cost_of(queries.minutes(over, chosen))


def efficiency_and_cost_of(minutes: Sequence[MinuteRow]) -> dict[str, Any]:
    """The same fields of these minutes; empty if none has the engine's work."""
    found = window_efficiency(minutes)
    if found is None:
        return {}
    counted: dict[str, Any] = {
        "counted_from": _utc(min(minute.from_at for minute in minutes)),
        "counted_until": _utc(max(minute.until for minute in minutes)),
    }
    return {
        **_best(found),
        "efficiency": EfficiencyResponse(**counted, **_efficiency(found), **_counted(minutes)),
        "cost": _cost(minutes, counted),
        "ledger": ledger_of(minutes),
    }


def _best(found: WindowEfficiency) -> dict[str, float | None]:
    """MFU and MBU by the requests; by the engines' counters if no request has a row."""
    by_rows = found.mfu is not None or found.mbu is not None
    mfu, mbu = (found.mfu, found.mbu) if by_rows else found.counters
    return {"mfu": mfu, "mbu": mbu}


def _efficiency(found: WindowEfficiency) -> dict[str, Any]:
    sources = {
        "requests": (found.mfu, found.mbu),
        "counters": found.counters,
        "engine": found.engine,
        "hardware": found.hardware,
    }
    return {
        "prefill": _use(found.prefill),
        "decode": _use(found.decode),
        "busy": _use(found.busy),
        "sources": {
            name: UtilisationResponse(mfu=mfu, mbu=mbu) for name, (mfu, mbu) in sources.items()
        },
        "weights_alone": found.weights_alone,
        "steps": sorted(found.steps),
        "disagreements": [DisagreementResponse(**each) for each in found.disagreements],
        "rejected_draft_share": found.rejected_draft_share,
        "preemptions": found.preemptions,
    }


def _counted(minutes: Sequence[MinuteRow]) -> dict[str, Any]:
    return {
        "prefix_cache": prefix_cache(minutes),
        "speculation": speculation(minutes),
        "batch_fill": batch_fill(minutes),
    }


def _use(use: Utilisation | None) -> UtilisationResponse | None:
    if use is None:
        return None
    at = use.position
    return UtilisationResponse(
        mfu=use.mfu,
        mbu=use.mbu,
        achieved_flops_per_s=use.achieved_flops_per_s,
        achieved_bytes_per_s=use.achieved_bytes_per_s,
        flops_per_byte=None if at is None else at.intensity,
        ridge_flops_per_byte=None if at is None else at.ridge,
        roofline_share=None if at is None else at.share,
        bound=use.bound,
        actions=list(use.actions),
    )


def _cost(minutes: Sequence[MinuteRow], counted: dict[str, Any]) -> CostResponse | None:
    spent = spending(minutes)
    cost, per = spent.cost, spent.ratios
    if cost is None or per is None:
        return None
    priced = [minute for minute in minutes if minute.bill_usd is not None]
    electricity = [minute.electricity_usd for minute in priced]
    known = [usd for usd in electricity if usd is not None]
    return CostResponse(
        **counted,
        priced_s=spent.priced_s,
        unpriced_s=spent.unpriced_s,
        bill_usd=spent.bill_usd,
        busy_usd=cost.requests + cost.unseen,
        prefill_usd=cost.prefill,
        decode_usd=cost.decode,
        idle_usd=cost.idle,
        unknown_usd=cost.unknown,
        unseen_usd=cost.unseen,
        aborted_usd=cost.aborted,
        aborted_prefill_usd=cost.aborted_prefill,
        wasted_usd=cost.unseen + cost.aborted,
        electricity_usd=fsum(known) if len(known) == len(electricity) else None,
        usd_per_hour=_usd_per_hour(priced),
        usd_per_million_input_tokens=per.per_million_input,
        usd_per_million_computed_input_tokens=per.per_million_computed_input,
        usd_per_million_cached_input_tokens=per.per_million_cached_input,
        usd_per_million_output_tokens=per.per_million_output,
        allocated_usd_per_million_output_tokens=per.allocated_per_million_output,
        usd_per_request=per.per_request,
        overhead=per.overhead,
        allocated_usd_per_request=per.allocated_per_request,
        usd_per_million_tokens_within_objective=per.allocated_per_million_good_tokens,
        usd_per_million_tokens_by_objective=usd_per_million_by_objective(priced),
        gpu_hours=spent.gpu_hours,
        joules=spent.joules,
        joules_per_output_token=spent.joules_per_output_token,
        methods=sorted(spent.methods),
    )


def _usd_per_hour(minutes: Sequence[MinuteRow]) -> float:
    """The sum over the engines of each one's own rate: engines can have different minutes."""
    of_engine: dict[str, list[MinuteRow]] = {}
    for minute in minutes:
        of_engine.setdefault(minute.engine, []).append(minute)
    return fsum(
        HOUR_S * fsum(m.bill_usd or 0.0 for m in own) / fsum(m.length_s for m in own)
        for own in of_engine.values()
    )


class EfficiencyStepResponse(BaseResponse):
    """The stored minutes that began in a step, which starts at `at`."""

    at: datetime
    mfu: float | None = Field(description="of the requests, over all counted time")
    mbu: float | None = Field(description="of the requests, over all counted time")
    efficiency: EfficiencyResponse
    cost: CostResponse | None = Field(description="null without a price")


def efficiency_routes(context: ApiContext) -> APIRouter:
    """The route of efficiency and cost by step."""
    router = APIRouter(tags=["figures"])

    @router.get("/efficiency")
    def efficiency(
        chosen: Annotated[Selection, Depends(selection)],
        asked: Annotated[AskedWindow, asked_window("1h")],
        step: StepText = "1m",
    ) -> ListOf[EfficiencyStepResponse]:
        """MFU, MBU and cost by step; steps without a stored minute are left out.

        Empty for one tenant or objective: GPUs work for all requests at once.
        """
        now, longest_s = context.now(), context.longest_window_s

        def steps(queries: ApiQueries) -> list[EfficiencyStepResponse]:
            over, each_s = asked.in_steps(
                step, now, longest_s, lambda age_s: max(queries.grid_s(age_s), MINUTE_LENGTH_S)
            )
            if chosen.tenant is not None or chosen.objective is not None:
                return []
            return list(_efficiency_steps(queries.minutes(over, chosen, each_s), over, each_s))

        return ListOf[EfficiencyStepResponse](items=context.read(steps))

    return router


def _efficiency_steps(
    minutes: Sequence[MinuteRow], over: Window, step_s: int
) -> Iterator[EfficiencyStepResponse]:
    by_step: defaultdict[int, list[MinuteRow]] = defaultdict(list)
    for minute in minutes:
        since_begin = max(minute.starts_at - over.from_s, 0)
        by_step[over.from_s + since_begin // step_s * step_s].append(minute)
    for start in sorted(by_step):
        figures = efficiency_and_cost_of(by_step[start])
        if figures:
            yield EfficiencyStepResponse(at=_utc(start), **figures)
