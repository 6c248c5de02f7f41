"""The objective's `compat` and TPOT against what each load generator's own code counts.

vLLM's benchmark, AIPerf and GuideLLM run here. inference-perf is in no package index: the function
below repeats its arithmetic.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

import pytest

from agent.analysis.latency import tpot_s
from agent.analysis.verdicts import judge
from agent.catalog.definitions import DEFINITIONS, Verdict
from agent.records.request import ProxyView, RequestRecord, Status, Vantage
from tests.real_parts.load_generators import (
    TOOLS,
    Answer,
    ClientRequest,
    LimitsMs,
    Score,
    Stream,
    answer,
)
from tests.records.making import objective, record
from tests.sources.proxy.measuring.playing import Setup, events, play, recorded, route

LIMITS: tuple[LimitsMs, ...] = tuple(
    {"ttft": ttft, "tpot": tpot, "e2e": e2e}
    for ttft, tpot, e2e in product((200.0, None), (30.0, None), (1000.0, None))
    if (ttft, tpot, e2e) != (None, None, None)
)
ALL_LIMITS = LIMITS[0]

# Before a limit, at it and beyond it; with and without tokens.
_WITH_TOKENS: list[dict[str, Any]] = [
    {"first_s": first_s, "end_s": first_s + rest_s if tokens > 1 else first_s, "tokens": tokens}
    for first_s, rest_s, tokens in product((0.1, 0.2, 0.3, 1.2), (0.05, 0.5, 0.9), (1, 2, 11, 41))
]
_WITHOUT_TOKENS: list[dict[str, Any]] = [
    {"first_s": None, "first_byte_s": first_byte_s, "end_s": end_s, "tokens": tokens}
    for first_byte_s, end_s, tokens in product((0.1, 0.2, 0.3), (0.4, 1.0, 1.5), (0, None))
]
CASES = [
    ClientRequest(ending=ending, **values)
    for ending in ("ok", "error", "cancelled")
    for values in (*_WITH_TOKENS, *_WITHOUT_TOKENS)
]
# Runs whose score differs by definition.
ONE_TOKEN = [ClientRequest(first_s=first_s, end_s=first_s, tokens=1) for first_s in (0.1, 0.3)] * 20
CANCELLING = [
    *[ClientRequest(first_s=0.1, end_s=0.3, tokens=11)],
    *[ClientRequest(first_s=0.3, end_s=0.5, tokens=11)] * 17,
    *[ClientRequest(ending="cancelled", first_s=0.1, end_s=0.3, tokens=11)] * 12,
]
WITHOUT_TEXT = [
    ClientRequest(first_s=None, first_byte_s=0.1, end_s=0.4, tokens=tokens) for tokens in (0, None)
]
# Each request alone, all together, and the runs.
GROUPS = [*[[case] for case in CASES], CASES, ONE_TOKEN, CANCELLING, WITHOUT_TEXT]

STATUSES = {"ok": Status.OK, "error": Status.ERROR, "cancelled": Status.CANCELLED}


# vLLM's benchmark reads no messages and counts no tool calls. AIPerf counts the event that repeats
# the whole text of /v1/responses as one with tokens, and not the name of a tool of /v1/messages.
CLIENT_OF = {
    "responses": "vllm",
    "responses-reasoning": "vllm",
    **dict.fromkeys(("responses-tools", "messages", "messages-reasoning"), "aiperf"),
}
# As a pacer does, that delays each event alike: those after the last token end the request later.
EVERY_S = 0.02


@cache
def played() -> dict[str, RequestRecord]:
    """The record of each recorded stream."""
    return {name: play(name, setup=Setup(), every_s=EVERY_S).record for name in CLIENT_OF}


def streams() -> list[Stream]:
    return [
        Stream(
            client=CLIENT_OF[name],
            endpoint=route(name).rpartition("/")[2],
            events=[
                (event.decode(), EVERY_S * number)
                for number, event in enumerate(events(recorded(name)), 1)
            ],
            tokens=record.output_tokens or 0,
        )
        for name, record in played().items()
    ]


@cache
def asked() -> Answer:
    return answer(LIMITS, GROUPS, streams())


def our_score(requests: Sequence[ClientRequest], compat: str, limits: LimitsMs) -> Score:
    limits_s = {
        f"{name}_s": None if limit_ms is None else limit_ms / 1000
        for name, limit_ms in limits.items()
    }
    judged_by = objective(definition=DEFINITIONS[compat], **limits_s)
    verdicts = Counter(judge(record(**_values(request)), judged_by) for request in requests)
    met, missed = verdicts[Verdict.MET], verdicts[Verdict.MISSED]
    return Score(met, met + missed)


def _values(request: ClientRequest) -> dict[str, Any]:
    """What the proxy records of the request."""
    decode_s = None if request.first_s is None else request.end_s - request.first_s
    return {
        "vantage": Vantage.PROXY,
        "status": STATUSES[request.ending],
        "ttft_s": request.first_s,
        "e2e_s": request.end_s,
        "tpot_s": tpot_s(decode_s, request.tokens),
        "output_tokens": request.tokens,
        "finish_reason": "stop" if request.ending == "ok" else None,
        "proxied": ProxyView(streamed=True, first_byte_s=request.first_byte_s),
    }


@pytest.mark.parametrize("tool", TOOLS)
def test_each_verdict_equals_that_of_the_tool(tool: str) -> None:
    different = [
        (limits, group, theirs, ours)
        for limits, counted in zip(LIMITS, asked().scores[tool], strict=True)
        for group, theirs in zip(GROUPS, counted, strict=True)
        if (ours := our_score(group, tool, limits)) != theirs
    ]
    assert different == []


def test_the_time_per_token_ends_at_the_last_token_as_that_of_clients() -> None:
    theirs = dict(zip(CLIENT_OF, asked().tpot_s, strict=True))
    assert {name: record.tpot_s for name, record in played().items()} == pytest.approx(theirs)


def inference_perf(request: ClientRequest) -> Score:
    """Failures are left out; a request without a TPOT is not good."""
    if request.ending != "ok":
        return Score(0, 0)
    more = (request.tokens or 0) - 1
    good = (
        request.first_s is not None
        and more > 0
        and request.first_s <= 0.2
        and request.end_s <= 1.0
        and (request.end_s - request.first_s) / more <= 0.03
    )
    return Score(int(good), 1)


def test_each_verdict_equals_the_arithmetic_of_inference_perf() -> None:
    for request in CASES:
        theirs = inference_perf(request)
        assert our_score([request], "inference-perf", ALL_LIMITS) == theirs, request
