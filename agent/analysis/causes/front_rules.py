"""Rules for the time outside the engine's core: its front, its parsers, the network, the client."""

from agent.analysis.causes.baselines import hold_back_of
from agent.analysis.causes.engine_rules import front_waited, request_cold
from agent.analysis.causes.evidence import seconds
from agent.analysis.causes.missed_case import Claim, MissedCase

# A shorter delay is noise of clocks and event loops.
_SHORTEST_S = 0.01


def cpu_starved(case: MissedCase, left_s: float) -> Claim | None:
    """The engine's front had no processor."""
    return front_waited(case, (case.arrived_at, case.first_at))


def cold_start(case: MissedCase, left_s: float) -> Claim | None:
    """The engine had just started."""
    return request_cold(case, left_s)


def tokenising(case: MissedCase, left_s: float) -> Claim | None:
    """The engine took long before its queue: it renders and tokenises the prompt there."""
    usual_s = case.usual.front_s
    if left_s < _SHORTEST_S or usual_s is None:
        return None
    front_s = case.queued_at - case.arrived_at
    text = (
        f"the engine's front took {seconds(front_s)} (by the span), usually {seconds(usual_s)} "
        "for prompts of this length"
    )
    return Claim(left_s, (text,))


def parser_holdback(case: MissedCase, left_s: float) -> Claim | None:
    """The response had begun, and held its first tokens back."""
    held_s, usual_s = hold_back_of(case.record), case.usual.hold_back_s
    if held_s is None or held_s - (usual_s or 0.0) < _SHORTEST_S:
        return None
    text = (
        f"the first token came {seconds(held_s)} after the first byte of the response (by the "
        f"proxy), usually {seconds(usual_s or 0.0)}"
    )
    return Claim(held_s - (usual_s or 0.0), (text,))


def network(case: MissedCase, left_s: float) -> Claim | None:
    """The engine had its first token, and the response's first byte came late."""
    proxied = case.record.proxied
    if proxied is None or proxied.first_byte_s is None or case.usual.outside_s is None:
        return None
    engine_s = case.first_at - case.arrived_at
    late_s = proxied.first_byte_s - engine_s - case.usual.outside_s
    if late_s < max(_SHORTEST_S, left_s / 2):
        return None
    text = (
        f"the response's first byte reached the proxy {seconds(proxied.first_byte_s - engine_s)} "
        f"later than the engine's first token explains, usually {seconds(case.usual.outside_s)}"
    )
    return Claim(late_s, (text,))


def slow_client(case: MissedCase, left_s: float) -> Claim | None:
    """The engine had sent everything long before the client had read it."""
    if case.record.proxied is None or case.record.decode_s is None:
        return None
    text = (
        f"the engine generated for {seconds(case.record.decode_s)} (by its span), and the client "
        f"took {seconds(left_s)} longer to read the stream (by the proxy)"
    )
    return Claim(left_s, (text,)) if left_s >= _SHORTEST_S else None
