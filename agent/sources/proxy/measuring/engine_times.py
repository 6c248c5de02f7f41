"""Reads the `metrics` object of a response: what vLLM's `--enable-per-request-metrics` adds."""

from typing import Any, NamedTuple

import msgspec

from agent.analysis.latency import ReportedPhases, screen, tpot_s
from agent.records.request import EngineView, RequestRecord, Status

_MS = 1e-3


class EngineTimes(NamedTuple):
    """The phases of a request as its engine measured them, in seconds, unknown None.

    They are those of vLLM's span. A request is in the queue until the scheduler takes it, in
    prefill until its first token and in decode until its last one.
    """

    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None


class _Metrics(msgspec.Struct, gc=False):
    queue_time_ms: Any = None
    # vLLM counts it from scheduling, without the queue: this is prefill, and no TTFT.
    time_to_first_token_ms: Any = None
    # From the first token to the last one.
    generation_time_ms: Any = None


def engine_times(metrics: object) -> EngineTimes | None:
    """Return the phases in a `metrics` object, None if it has none of them."""
    if not isinstance(metrics, dict):
        return None
    found = msgspec.convert(metrics, _Metrics)
    times = EngineTimes(
        _seconds(found.queue_time_ms),
        _seconds(found.time_to_first_token_ms),
        _seconds(found.generation_time_ms),
    )
    return None if times == (None, None, None) else times


def _seconds(value_ms: object) -> float | None:
    # A bool is an int, and an int may be too large for a float.
    if isinstance(value_ms, int | float) and not isinstance(value_ms, bool):
        return value_ms * _MS if -1e12 < value_ms < 1e12 else float("nan")
    return None


class WithEngineTimes(NamedTuple):
    """A record with its engine's times, and whether all of them were possible."""

    record: RequestRecord
    all_possible: bool


def with_engine_times(record: RequestRecord, times: EngineTimes, status: Status) -> WithEngineTimes:
    """Add the engine's times of a request of one choice, as its span would have them.

    The engine's TTFT begins when the request was queued, so it lacks the time of tokenizing, which
    is in a span's TTFT. No phase may be longer than the request was for its user.
    """
    phases, findings, _ = screen(
        ReportedPhases(record.e2e_s, None, *times, record.input_tokens, record.output_tokens)
    )
    ttft_s = _sum(phases.queue_s, phases.prefill_s) or None
    view = EngineView(
        status=status,
        ttft_s=ttft_s,
        tpot_s=tpot_s(phases.decode_s, record.output_tokens),
        e2e_s=_sum(ttft_s, phases.decode_s),
        holdback_s=None if record.ttft_s is None or ttft_s is None else record.ttft_s - ttft_s,
    )
    added = record._replace(
        queue_s=phases.queue_s,
        prefill_s=phases.prefill_s,
        decode_s=phases.decode_s,
        engine_view=view,
    )
    return WithEngineTimes(added, not findings)


def _sum(one_s: float | None, other_s: float | None) -> float | None:
    return None if one_s is None or other_s is None else one_s + other_s
