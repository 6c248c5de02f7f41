"""The token times that the readers of responses find."""

import json
from dataclasses import replace
from typing import Any

import pytest

from agent.analysis.quantiles import bin_of
from agent.catalog.reasons import ProxyFailure
from agent.records.request import EngineView, RequestRecord, Status, Vantage
from agent.sources.proxy.exchange import Ending
from agent.sources.proxy.measuring.api_protocols import PROTOCOLS, ApiProtocol
from agent.sources.proxy.measuring.measured_exchange import MeasuringOptions
from agent.sources.proxy.measuring.parsed_event import VISIBLE_TOKEN
from agent.sources.proxy.measuring.response_readers import ResponseFindings
from agent.sources.proxy.measuring.stream_reader import MAX_DEFERRED_PIECES, StreamReader
from tests.sources.proxy.measuring.playing import (
    JSON_HEAD,
    REQUESTS,
    STREAMS,
    VERSION,
    Setup,
    events,
    play,
    recorded,
    recorded_whole,
    route,
)


@pytest.mark.parametrize("name", ["chat.usage", "completions.usage", "responses"])
def test_one_event_with_all_tokens_has_no_time_per_token(name: str) -> None:
    sent = events(recorded(name))
    if name == "responses":
        deltas = [event for event in sent if b"output_text.delta" in event]
        pieces = [event for event in sent if event not in deltas[1:]]
    else:
        # The last text comes with the finish reason.
        pieces = sent[-3:]
    record = play(name, pieces).record
    assert record.ttft_s is not None
    assert record.output_tokens == 24
    assert (record.tpot_s, record.max_gap_s) == (None, None)


def chat_with_reasoning(deltas: list[dict[str, str]], tokens: int, reasoning: int) -> list[bytes]:
    """A stream of an event for each delta, whose engine counts so many tokens of reasoning."""
    usage = {
        "prompt_tokens": 8,
        "completion_tokens": tokens,
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }
    sent = [
        *({"choices": [{"delta": delta}]} for delta in deltas),
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": usage},
    ]
    return [b"data: " + json.dumps(event).encode() + b"\n\n" for event in sent]


@pytest.mark.parametrize(
    ("deltas", "tokens"),
    [
        # Hidden, as by `include_reasoning: false` of vLLM: the last 4 of 104 tokens were seen.
        ([{"content": "a"}] * 3, 4),
        # Streamed as reasoning, or as text: 104 tokens were seen.
        ([{"reasoning": "a"}, {"content": "a"}, {"content": "a"}], 104),
        ([{"content": "a"}, {"reasoning": "a"}, {"content": "a"}], 104),
        ([{"content": "a"}] * 103, 104),
    ],
)
def test_reasoning_that_is_not_streamed_is_in_no_time_per_token(
    deltas: list[dict[str, str]], tokens: int
) -> None:
    sent = chat_with_reasoning(deltas, 104, 100)
    record = play("chat.usage", [*sent, b"data: [DONE]\n\n"]).record
    assert (record.output_tokens, record.reasoning_tokens) == (104, 100)
    assert record.tpot_s == pytest.approx(len(deltas) / (tokens - 1))


NAMES = sorted(path.stem.removeprefix(VERSION) for path in STREAMS.glob("*.sse"))
CHAT = PROTOCOLS["/v1/chat/completions"]
# It can read no event by itself.
ONLY_RUNS = replace(CHAT, read_event=lambda _: None)
TOKEN = events(recorded("chat.plain"))[2]
LAST = b"data: [DONE]\n\n"


def read(pieces: list[bytes], protocol: ApiProtocol = CHAT) -> ResponseFindings:
    """What is found in pieces that arrive a second apart."""
    reader = StreamReader(protocol, None, choices=1)
    for second, piece in enumerate(pieces):
        reader.take(piece, float(second))
    reader.catch_up()
    return reader.findings


@pytest.mark.parametrize("name", NAMES)
def test_each_event_of_a_run_is_a_visible_token_by_itself(name: str) -> None:
    protocol = PROTOCOLS[route(name)]
    data = [event[len(b"data: ") : -2] for event in events(recorded(name))]
    count = protocol.count_tokens or (lambda _: 0)
    tokens = [line for line in data if count(line)]
    assert all(protocol.read_event(line) is VISIBLE_TOKEN for line in tokens)
    assert count(b"\n".join(tokens)) == len(tokens)
    others = [line for line in data if line not in tokens]
    assert not any(count(b"\n".join([*tokens, line])) for line in others)


THOUGHT = TOKEN.replace(b'"content":', b'"reasoning":')


@pytest.mark.parametrize(
    ("pieces", "visible_s", "gaps"),
    [
        ([TOKEN, TOKEN * 3, TOKEN + LAST], 0.0, {bin_of(0.0): 2, bin_of(1.0): 2}),
        ([TOKEN * 2, TOKEN, LAST], 0.0, {bin_of(0.0): 1, bin_of(1.0): 1}),
        ([THOUGHT, THOUGHT * 2 + TOKEN, TOKEN + LAST], 1.0, {bin_of(0.0): 2, bin_of(1.0): 2}),
        ([TOKEN * 3 + LAST], 0.0, {bin_of(0.0): 2}),
    ],
)
def test_the_tokens_of_a_run_have_the_times_of_their_pieces(
    pieces: list[bytes], visible_s: float, gaps: dict[int, int]
) -> None:
    found = read(pieces, ONLY_RUNS)
    assert (found.missed, found.done) == (None, True)
    assert found.response_id
    assert (found.timing.first_s, found.timing.visible_s) == (0.0, visible_s)
    assert found.timing.gaps == gaps
    assert found.timing.max_gap_s == (len(pieces) > 1)


@pytest.mark.parametrize(
    ("piece", "tokens"),
    [
        (TOKEN[:-2] + TOKEN[len(b"data: ") :] + TOKEN, 1),
        (TOKEN.replace(b'"choices":', b'\n\ndata: "choices":') + TOKEN, 1),
        (TOKEN[:-2] + b"\ndata: \n\n" + TOKEN, 2),
        (b"event: chunk\n" + TOKEN + TOKEN, 2),
        (TOKEN + b": ping\n\n" + TOKEN, 2),
    ],
    ids=["two in an event", "one in two events", "of two lines", "named", "after a comment"],
)
def test_other_events_are_read_one_by_one(piece: bytes, tokens: int) -> None:
    found = read([TOKEN, piece])
    assert sum(found.timing.gaps.values()) == tokens
    unreadable = tokens == 1
    assert found.missed is (ProxyFailure.EVENT_UNREADABLE if unreadable else None)


def test_a_token_that_comes_in_two_pieces_has_the_time_of_the_second() -> None:
    found = read([TOKEN, TOKEN + TOKEN[:20], TOKEN[20:], TOKEN])
    assert found.timing.gaps == {bin_of(1.0): 3}


def test_a_response_without_an_id_is_read() -> None:
    unnamed = TOKEN.replace(b'"id":"', b'"no_id":"')
    found = read([unnamed * 3])
    assert found.response_id is None
    assert found.timing.gaps == {bin_of(0.0): 2}


def test_after_a_token_without_a_count_the_tokens_of_an_event_are_unknown() -> None:
    one, three = (
        TOKEN.replace(b"}]}", b'}],"usage":{"completion_tokens":%d}}' % number) for number in (1, 3)
    )
    assert read([one, three]).timing.chunk_tokens == 2
    assert read([one, three, *[TOKEN] * MAX_DEFERRED_PIECES]).timing.chunk_tokens is None


# The engine's own times of a request, from the `metrics` object of its response.
QUEUED_AT, SCHEDULED_AT, FIRST_AT, LAST_AT = 100.0, 100.25, 101.0, 106.75
PHASES = (SCHEDULED_AT - QUEUED_AT, FIRST_AT - SCHEDULED_AT, LAST_AT - FIRST_AT)
OF_ENGINE = EngineView(
    status=Status.OK,
    ttft_s=FIRST_AT - QUEUED_AT,
    tpot_s=(LAST_AT - FIRST_AT) / 23,
    e2e_s=LAST_AT - QUEUED_AT,
)
ROUTE = "/v1/chat/completions"
UNKNOWN = (None, None, None)


def phases(record: RequestRecord) -> tuple[float | None, ...]:
    return record.queue_s, record.prefill_s, record.decode_s


@pytest.mark.parametrize(
    "name", ["chat-metrics.usage", "completions-metrics.usage", "responses-metrics"]
)
def test_a_stream_with_metrics_has_both_views(name: str) -> None:
    setup = Setup()
    played = play(name, setup=setup)
    record = played.record
    assert (phases(record), record.vantage) == (PHASES, Vantage.PROXY)
    assert record.engine_view == OF_ENGINE._replace(holdback_s=(record.ttft_s or 0) - 1.0)
    assert (played.client_bytes, setup.failures) == (recorded(name), [])
    alone = play(name.replace("-metrics", "")).record
    assert (record.ttft_s, record.tpot_s, record.e2e_s) == (alone.ttft_s, alone.tpot_s, alone.e2e_s)
    assert (phases(alone), alone.engine_view) == (UNKNOWN, None)
    left = play(name, ending=Ending.CLIENT_GONE).record
    assert left.engine_view is not None
    assert left.engine_view.status is Status.OK, "the engine finished it"


@pytest.mark.parametrize("name", ["chat-metrics", "completions-metrics"])
def test_metrics_that_only_the_added_usage_brought_are_read_and_stripped(name: str) -> None:
    pieces = events(recorded(f"{name}.usage"))
    played = Setup().play(route(name), REQUESTS[f"{name}.plain"], pieces)
    assert b"metrics" not in played.client_bytes
    assert phases(played.record) == PHASES


def test_a_client_that_asked_for_usage_keeps_its_metrics_beside_counts_of_each_chunk() -> None:
    name = "chat-metrics.usage"
    played = play(name, setup=Setup(MeasuringOptions(continuous_usage=True)))
    assert played.client_bytes == recorded(name)


def test_a_whole_response_with_metrics_has_the_engines_times() -> None:
    sent = recorded_whole("chat-metrics")
    played = Setup().play(ROUTE, {"model": "m"}, [sent], head=JSON_HEAD, every_s=5.0)
    record = played.record
    assert phases(record) == PHASES
    # Its user saw no token arrive.
    assert (record.ttft_s, record.engine_view) == (None, OF_ENGINE)
    assert played.client_bytes == sent


def whole(metrics: Any, n: int = 1, tokens: int = 24) -> tuple[Any, list[str]]:
    """The record of a whole response with these metrics, in 10 s, and the failures."""
    choices = [{"finish_reason": "stop"}] * n
    usage = {"prompt_tokens": 8, "completion_tokens": tokens}
    body = json.dumps({"id": "a", "choices": choices, "usage": usage, "metrics": metrics})
    setup = Setup()
    played = setup.play(ROUTE, {"model": "m", "n": n}, [body.encode()], head=JSON_HEAD, every_s=5.0)
    return played.record, setup.failures


NO_TIMES: list[Any] = [None, {}, [], 7, "x", {"spec": {"drafts": 3}}, {"queue_time_ms": "1"}]


@pytest.mark.parametrize(
    ("metrics", "n", "known", "view"),
    [
        # Without the queue no TTFT is known.
        ({"time_to_first_token_ms": 750.0}, 1, (None, 0.75, None), EngineView(status=Status.OK)),
        # Those of one of several choices are not the request's.
        ({"queue_time_ms": 1.0, "time_to_first_token_ms": 2.0}, 2, UNKNOWN, None),
        *((nothing, 1, UNKNOWN, None) for nothing in NO_TIMES),
    ],
)
def test_what_metrics_leave_out_is_unknown(metrics: Any, n: int, known: Any, view: Any) -> None:
    record, failures = whole(metrics, n)
    assert (phases(record), record.engine_view, failures) == (known, view, [])


@pytest.mark.parametrize("impossible_ms", [-1.0, 10_002.0, 10**400, -(10**400), 1e300])
def test_an_impossible_time_is_unknown_and_counted(impossible_ms: float) -> None:
    possible = {"time_to_first_token_ms": 750, "generation_time_ms": 0}
    record, failures = whole({"queue_time_ms": impossible_ms, **possible})
    assert phases(record) == (None, 0.75, 0.0)
    assert record.engine_view is not None
    assert (record.engine_view.ttft_s, record.engine_view.e2e_s) == (None, None)
    assert failures == ["engine_times"]


def test_one_token_has_no_time_per_token() -> None:
    metrics = {"queue_time_ms": 1.0, "time_to_first_token_ms": 2.0, "generation_time_ms": 0.0}
    record, _ = whole(metrics, tokens=1)
    assert record.engine_view is not None
    assert record.engine_view.tpot_s is None
