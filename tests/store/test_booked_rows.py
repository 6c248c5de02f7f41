"""Requests as columns for booking."""

from dataclasses import fields

import numpy as np
import pytest
from sqlalchemy import Engine

from agent.catalog.definitions import Verdict
from agent.records.request import ProxyView, Status, Vantage
from agent.store import minutes
from agent.store.minutes import MinuteStore
from tests.records.columns import minute_requests
from tests.store.making import NOON, judgement, request, store

PROXIED = ProxyView(choices=3)
FACTS = {
    **{"ttft_s": 0.1, "queue_s": 0.01, "prefill_s": 0.09, "decode_s": 0.4},
    **{"input_tokens": 100, "cached_tokens": 7, "output_tokens": 21, "finish_reason": "stop"},
}
BOTH = judgement(Verdict.MET, chat=Verdict.MET, batch=Verdict.MET)
ONE = judgement(Verdict.MISSED, chat=Verdict.MISSED, batch=Verdict.MET)
REQUESTS = [
    request(1, BOTH, **FACTS),
    request(2, ONE, vantage=Vantage.PROXY, proxied=PROXIED, route="/v1/chat/completions"),
    request(3, ONE, status=Status.CANCELLED, finish_reason="abort", output_tokens=0),
]


@pytest.mark.parametrize("at_once", [1, 4096])
def test_columns_have_the_values_of_rows(
    sqlite: Engine, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(minutes, "ROWS_PER_READ", at_once)
    store(sqlite, REQUESTS)
    found = MinuteStore(sqlite, "agent-0").requests("chat-0", NOON, NOON + 60)
    expected = minute_requests([each.record for each in REQUESTS])
    for field in fields(found):
        if field.name not in ("rows", "met", "verdicts", "met_objectives"):
            columns = getattr(found, field.name), getattr(expected, field.name)
            np.testing.assert_array_equal(*columns, err_msg=field.name)
    assert np.isnan(found.ttft_s).tolist() == [False, True, True]
    assert (found.rows[1:] > found.rows[:-1]).all()
    assert found.met.tolist() == [True, False, False]
    met = [found.met_objectives[place] for place in found.verdicts.tolist()]
    assert met == [("chat", "batch"), ("batch",), ("batch",)]


def test_only_requests_that_reach_beyond_a_time_are_across_it(sqlite: Engine) -> None:
    times = [(0.0, 10.0), (5.0, 15.0), (12.0, 18.0), (12.0, 25.0), (30.0, 40.0)]
    store(
        sqlite,
        [
            request(number, started_at=NOON + from_at, ended_at=NOON + until)
            for number, (from_at, until) in enumerate(times)
        ],
    )
    found = MinuteStore(sqlite, "agent-0").requests_across("chat-0", NOON + 10, NOON + 20)
    assert (found.started_at - NOON).tolist() == [0, 5, 12]
    assert (found.ended_at - NOON).tolist() == [10, 15, 25]


def test_no_requests_are_empty_columns(sqlite: Engine) -> None:
    found = MinuteStore(sqlite, "agent-0").requests("chat-0", NOON, NOON + 60)
    assert {getattr(found, field.name).shape for field in fields(found)[:-1]} == {(0,)}
    assert found.met_objectives == ()
