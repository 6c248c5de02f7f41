"""What a result file holds: single requests, or only figures of all together."""

from collections.abc import Mapping
from dataclasses import dataclass

from agent.errors import AgentError
from agent.records.request import RequestRecord, Status, Vantage

# Those of figures that are compared.
PERCENTILES = ("p50", "p95", "p99")

_LARGEST = 1e15


class ResultFileInvalid(AgentError):
    """A file that no known load generator wrote, or that cannot be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchedRun:
    """The requests as the load generator saw them, at least one, and the load that it made.

    `load` maps each setting of its load to the value, both as text.
    """

    tool: str
    records: tuple[RequestRecord, ...]
    load: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchedFigures:
    """Figures of all requests together, by the names of measures of a comparison."""

    tool: str
    requests: int
    length_s: float
    figures: Mapping[str, float]
    load: Mapping[str, str]


def benched_request(
    number: int,
    status: Status,
    times: tuple[float, float],
    *,
    latencies_s: tuple[float | None, float | None, float | None],
    tokens: tuple[int | None, int | None],
) -> RequestRecord:
    """One request: begin and end; TTFT, TPOT and end to end; input and output tokens.

    What a request took and made is unknown unless it ended well.
    """
    started_at, ended_at = times
    whole = status is Status.OK
    ttft_s, tpot_s, e2e_s = latencies_s if whole else (None,) * 3
    return RequestRecord(
        trace_id="",
        span_id=str(number),
        vantage=Vantage.PROXY,
        status=status,
        started_at=started_at,
        ended_at=ended_at,
        received_at=ended_at,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        e2e_s=e2e_s,
        input_tokens=tokens[0],
        output_tokens=tokens[1] if whole else None,
    )


def check_numbers(run: BenchedRun | BenchedFigures) -> None:
    """Raise ValueError for a number that is infinite or too large to compute with."""
    if isinstance(run, BenchedFigures):
        _check(run.requests, run.length_s, *run.figures.values())
        return
    for each in run.records:
        times = (each.started_at, each.ended_at, each.ttft_s, each.tpot_s, each.e2e_s)
        _check(*times, each.input_tokens, each.output_tokens)


def _check(*numbers: float | None) -> None:
    for number in numbers:
        if number is not None and not abs(number) <= _LARGEST:
            raise ValueError(f"the number {str(number)[:20]} in it is too large")


def texts(load: Mapping[str, object]) -> dict[str, str]:
    """What is known of a load, as text; whole numbers without a fraction."""
    return {
        name: f"{value:g}" if isinstance(value, (int, float)) else str(value)
        for name, value in load.items()
        if value is not None
    }


def known(figures: Mapping[str, float | None]) -> dict[str, float]:
    """The figures that are known."""
    return {name: value for name, value in figures.items() if value is not None}
