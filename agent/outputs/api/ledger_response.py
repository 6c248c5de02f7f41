"""The `ledger` field of a summary: what engines counted and what is in no row."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from math import fsum

from pydantic import Field

from agent.analysis.ledger import unaccounted_requests
from agent.catalog.reasons import WithoutRow
from agent.outputs.api.base_response import BaseResponse
from agent.records.minute import Ledger, MinuteRow, total

_REASONS = ", ".join(WithoutRow)


class LedgerSideResponse(BaseResponse):
    """Tokens and requests; null where no engine counts them.

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
    untold_rows: float = Field(
        description="requests with a row that lacks tokens, which are unaccounted for that reason"
    )
    open: LedgerSideResponse = Field(
        description="without a row, in minutes with requests that may still run"
    )


def ledger_of(minutes: Sequence[MinuteRow]) -> LedgerResponse | None:
    """The ledger of these minutes; None where no engine counts tokens."""
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
        untold_rows=fsum(each.untold_rows for each in ledgers),
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
    """The sum; None where any is unknown."""
    found = list(values)
    known = [value for value in found if value is not None]
    return fsum(known) if len(known) == len(found) else None
