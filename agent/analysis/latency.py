"""Screens the phases that an engine reports of a request, and computes the parts it does not.

An impossible value becomes None. vLLM reports queue times below zero, prefill times as long as the
machine's uptime, and a first token for requests without one: outputs that the engine core makes
without events leave `scheduled_ts` at zero (vLLM 0.33 `v1/metrics/stats.py`,
`update_from_finished_request`).
"""

from collections.abc import Callable
from math import isfinite
from typing import NamedTuple

from agent.catalog.reasons import ValueDropped

# Frontend and engine core read different clocks, and e2e ends shortly after the last token.
CLOCK_SLACK_S = 0.001

# No context window is this long; a larger count is a unit error or garbage.
MAX_TOKENS = 1_000_000_000

Finding = tuple[str, str]


def tpot_s(first_to_last_s: float | None, output_tokens: int | None) -> float | None:
    """Seconds per output token after the first; None for one token, where it is not defined.

    `first_to_last_s` is the time from the first token to the last one.
    """
    if first_to_last_s is None or output_tokens is None or output_tokens < 2:
        return None
    return first_to_last_s / (output_tokens - 1)


class ReportedPhases(NamedTuple):
    """The phases that an engine reported of one request, in seconds and tokens, unknown None."""

    e2e_s: float | None
    ttft_s: float | None
    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None
    input_tokens: int | None
    output_tokens: int | None


class Screened(NamedTuple):
    """The possible phases, and the refused values as (field, reason).

    `ended_before_first_token` is True if the refused values show that the engine itself ended
    the request before its first token.
    """

    phases: ReportedPhases
    findings: tuple[Finding, ...]
    ended_before_first_token: bool


def screen(reported: ReportedPhases) -> Screened:
    """The reported phases, impossible values replaced by None, each with its reason."""
    if _plausible(reported):
        return Screened(reported, (), False)
    return _screen_each(reported)


def _plausible(p: ReportedPhases) -> bool:
    """Whether all values are known and possible together: the common case."""
    if (
        p.e2e_s is None
        or p.ttft_s is None
        or p.queue_s is None
        or p.prefill_s is None
        or p.decode_s is None
        or p.input_tokens is None
        or p.output_tokens is None
    ):
        return False
    bound_s = p.e2e_s + CLOCK_SLACK_S
    return (
        0.0 <= p.e2e_s < 1e9
        and 0.0 < p.ttft_s <= bound_s
        and 0.0 <= p.queue_s <= bound_s
        and 0.0 <= p.prefill_s <= bound_s
        and 0.0 <= p.decode_s <= bound_s
        and 0 < p.output_tokens <= MAX_TOKENS
        and 0 <= p.input_tokens <= MAX_TOKENS
    )


def _screen_each(p: ReportedPhases) -> Screened:
    findings: list[Finding] = []
    e2e_s = _bounded("e2e_s", p.e2e_s, 1e9, findings)
    bound_s = 1e9 if e2e_s is None else e2e_s + CLOCK_SLACK_S
    queue_s = _bounded("queue_s", p.queue_s, bound_s, findings)
    prefill_s = _bounded("prefill_s", p.prefill_s, bound_s, findings)
    decode_s = _bounded("decode_s", p.decode_s, bound_s, findings)
    ttft_s = _bounded("ttft_s", p.ttft_s, bound_s, findings)
    output_tokens = _counted("output_tokens", p.output_tokens, findings)
    clock_never_started = (p.queue_s is not None and queue_s is None) or (
        p.prefill_s is not None and prefill_s is None
    )
    if output_tokens == 0:
        ttft_s = _refused("ttft_s", ttft_s, ValueDropped.NO_OUTPUT, findings)
        decode_s = _refused("decode_s", decode_s, ValueDropped.NO_OUTPUT, findings)
        prefill_s = _refused("prefill_s", prefill_s, ValueDropped.NO_OUTPUT, findings)
    elif ttft_s == 0.0:
        ttft_s = _refused("ttft_s", ttft_s, ValueDropped.ZERO, findings)
    return Screened(
        ReportedPhases(
            e2e_s,
            ttft_s,
            queue_s,
            prefill_s,
            decode_s,
            _counted("input_tokens", p.input_tokens, findings),
            output_tokens,
        ),
        tuple(findings),
        output_tokens == 0 and clock_never_started,
    )


def _bounded(
    field: str, value_s: float | None, bound_s: float, findings: list[Finding]
) -> float | None:
    if value_s is None:
        return None
    for broken, reason in _BOUNDS:
        if broken(value_s, bound_s):
            findings.append((field, reason))
            return None
    return value_s


_BOUNDS: tuple[tuple[Callable[[float, float], bool], str], ...] = (
    (lambda value_s, _: not isfinite(value_s), ValueDropped.NOT_FINITE),
    (lambda value_s, _: value_s < 0, ValueDropped.NEGATIVE),
    (lambda value_s, bound_s: value_s > bound_s, ValueDropped.LONGER_THAN_REQUEST),
)


def _counted(field: str, tokens: int | None, findings: list[Finding]) -> int | None:
    if tokens is None or 0 <= tokens <= MAX_TOKENS:
        return tokens
    findings.append((field, ValueDropped.NEGATIVE if tokens < 0 else ValueDropped.TOO_LARGE))
    return None


def _refused(
    field: str, value_s: float | None, reason: str, findings: list[Finding]
) -> float | None:
    if value_s is not None:
        findings.append((field, reason))
    return None


LATENCIES = ("ttft_s", "e2e_s", "queue_s", "prefill_s", "decode_s")


class RequestParts(NamedTuple):
    """`queue_s`, `prefill_s`, `decode_s`, `front_s` and `rest_s` add up to the whole request.

    `front_s` is the time before the first token outside of the engine's scheduler: the engine's
    frontend and, seen at the proxy, the way there and back. `rest_s` is what is left over: after
    the last token, and what the clocks and views of one request differ by, so it may be negative.
    """

    front_s: float | None
    rest_s: float | None


def request_parts(
    *,
    ttft_s: float | None,
    e2e_s: float | None,
    queue_s: float | None,
    prefill_s: float | None,
    decode_s: float | None,
) -> RequestParts:
    """The missing parts; a part that needs an unknown latency is None."""
    if ttft_s is None or queue_s is None or prefill_s is None:
        return RequestParts(None, None)
    front_s = ttft_s - queue_s - prefill_s
    if e2e_s is None or decode_s is None:
        return RequestParts(front_s, None)
    return RequestParts(front_s, e2e_s - ttft_s - decode_s)


class FirstTokenParts(NamedTuple):
    """The parts of the time to the first token of a request with a prefill engine.

    `router_s`, `prefill_s`, `kv_wait_s` and `decode_s` add up to `whole_s`. `router_s` is the time
    outside of both engines, `kv_wait_s` the wait in the decode engine for the KV values and for a
    place in the batch, and `decode_s` the rest there. If both engines had the request at once,
    what the decode engine waited for the prefill is in `prefill_s` alone.
    """

    whole_s: float
    router_s: float
    prefill_s: float
    kv_wait_s: float | None
    decode_s: float


def first_token_parts(
    *,
    user_ttft_s: float | None,
    decode_ttft_s: float | None,
    decode_queue_s: float | None,
    prefill_hop_s: float | None,
    prefill_gap_s: float | None,
) -> FirstTokenParts | None:
    """The parts; None without both engines' times.

    By the user's TTFT the clocks of the engines do not matter. It may be that since the arrival at
    the router. It is None of a view that began at one of the engines: the time between these is
    then by their clocks.
    """
    if prefill_hop_s is None or decode_ttft_s is None:
        return None
    if user_ttft_s is not None:
        outside_s = user_ttft_s - prefill_hop_s - decode_ttft_s
        is_parallel = outside_s < -CLOCK_SLACK_S
        router_s = max(user_ttft_s - decode_ttft_s if is_parallel else outside_s, 0.0)
        whole_s = user_ttft_s
    elif prefill_gap_s is not None:
        router_s = max(prefill_gap_s, 0.0)
        whole_s = max(prefill_hop_s + prefill_gap_s + decode_ttft_s, prefill_hop_s)
    else:
        return None
    prefill_s = min(prefill_hop_s, whole_s - router_s)
    after_s = max(whole_s - router_s - prefill_s, 0.0)
    if decode_queue_s is None:
        return FirstTokenParts(whole_s, router_s, prefill_s, None, after_s)
    hidden_s = max(decode_ttft_s - after_s, 0.0)
    kv_wait_s = min(max(decode_queue_s - hidden_s, 0.0), after_s)
    return FirstTokenParts(whole_s, router_s, prefill_s, kv_wait_s, after_s - kv_wait_s)
