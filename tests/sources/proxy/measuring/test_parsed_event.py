"""The engine's own times of a request, from the `metrics` object of its response.

The recorded request was queued at 100 s, scheduled at 100.25 s, and had its first token at 101 s
and the last of its 24 tokens at 106.75 s on the engine's clock.
"""

import json
from typing import Any

import pytest

from agent.records.request import EngineView, RequestRecord, Status, Vantage
from agent.sources.proxy.exchange import Ending
from agent.sources.proxy.measuring.measured_exchange import MeasuringOptions
from tests.sources.proxy.measuring.playing import (
    JSON_HEAD,
    REQUESTS,
    Setup,
    events,
    play,
    recorded,
    recorded_whole,
    route,
)

QUEUED_AT, SCHEDULED_AT, FIRST_AT, LAST_AT = 100.0, 100.25, 101.0, 106.75
PHASES = (SCHEDULED_AT - QUEUED_AT, FIRST_AT - SCHEDULED_AT, LAST_AT - FIRST_AT)
OF_ENGINE = EngineView(
    status=Status.OK,
    ttft_s=FIRST_AT - QUEUED_AT,
    tpot_s=(LAST_AT - FIRST_AT) / 23,
    e2e_s=LAST_AT - QUEUED_AT,
)
CHAT = "/v1/chat/completions"
WITH_METRICS = ["chat-metrics.usage", "completions-metrics.usage", "responses-metrics"]


def phases(record: RequestRecord) -> tuple[float | None, ...]:
    return record.queue_s, record.prefill_s, record.decode_s


@pytest.mark.parametrize("name", WITH_METRICS)
def test_a_stream_with_metrics_has_both_views(name: str) -> None:
    setup = Setup()
    played = play(name, setup=setup)
    record = played.record
    assert phases(record) == PHASES
    user_ttft_s = record.ttft_s
    assert user_ttft_s is not None
    assert record.engine_view == OF_ENGINE._replace(holdback_s=user_ttft_s - 1.0)
    assert record.vantage is Vantage.PROXY
    assert (played.client_bytes, setup.failures) == (recorded(name), [])
    alone = play(name.replace("-metrics", "")).record
    assert (record.ttft_s, record.tpot_s, record.e2e_s) == (alone.ttft_s, alone.tpot_s, alone.e2e_s)
    assert phases(alone) == (None, None, None)
    assert alone.engine_view is None


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
    played = Setup().play(CHAT, {"model": "m"}, [sent], head=JSON_HEAD, every_s=5.0)
    record = played.record
    assert phases(record) == PHASES
    # Its user saw no token arrive.
    assert (record.ttft_s, record.engine_view) == (None, OF_ENGINE)
    assert played.client_bytes == sent


def test_the_engine_finished_a_stream_whose_client_left_at_its_end() -> None:
    record = play("chat-metrics.usage", ending=Ending.CLIENT_GONE).record
    assert record.engine_view is not None
    assert record.engine_view.status is Status.OK


def whole(metrics: Any, n: int = 1, tokens: int = 24) -> tuple[Any, list[str]]:
    """The record of a whole response with these metrics, in 10 s, and the failures."""
    choices = [{"finish_reason": "stop"}] * n
    usage = {"prompt_tokens": 8, "completion_tokens": tokens}
    body = json.dumps({"id": "a", "choices": choices, "usage": usage, "metrics": metrics})
    setup = Setup()
    played = setup.play(CHAT, {"model": "m", "n": n}, [body.encode()], head=JSON_HEAD, every_s=5.0)
    return played.record, setup.failures


def test_what_metrics_leave_out_is_unknown() -> None:
    record, failures = whole({"time_to_first_token_ms": 750.0})
    assert (phases(record), failures) == ((None, 0.75, None), [])
    # Without the queue no TTFT is known.
    assert record.engine_view == EngineView(status=Status.OK)


@pytest.mark.parametrize(
    "metrics",
    [None, {}, [], 7, "x", {"speculative_decoding": {"num_drafts": 3}}, {"queue_time_ms": "1"}],
)
def test_metrics_without_times_are_no_view(metrics: Any) -> None:
    record, failures = whole(metrics)
    assert (phases(record), record.engine_view, failures) == ((None,) * 3, None, [])


@pytest.mark.parametrize("impossible_ms", [-1.0, 10_002.0, 10**400, -(10**400), 1e300])
def test_an_impossible_time_is_unknown_and_counted(impossible_ms: float) -> None:
    possible = {"time_to_first_token_ms": 750, "generation_time_ms": 0}
    record, failures = whole({"queue_time_ms": impossible_ms, **possible})
    assert phases(record) == (None, 0.75, 0.0)
    assert record.engine_view is not None
    assert (record.engine_view.ttft_s, record.engine_view.e2e_s) == (None, None)
    assert failures == ["engine_times"]


def test_times_of_one_of_several_choices_are_not_the_requests() -> None:
    metrics = {"queue_time_ms": 1.0, "time_to_first_token_ms": 2.0, "generation_time_ms": 3.0}
    record, failures = whole(metrics, n=2)
    assert (phases(record), record.engine_view, failures) == ((None,) * 3, None, [])


def test_one_token_has_no_time_per_token() -> None:
    metrics = {"queue_time_ms": 1.0, "time_to_first_token_ms": 2.0, "generation_time_ms": 0.0}
    record, _ = whole(metrics, tokens=1)
    assert record.engine_view is not None
    assert record.engine_view.tpot_s is None
