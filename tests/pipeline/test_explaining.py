"""When missed requests are explained, and what becomes of those that cannot be stored."""

from collections.abc import Sequence
from typing import Any

import pytest

from agent.analysis.verdicts import Judge
from agent.catalog.causes import Cause
from agent.catalog.definitions import GOODPUT
from agent.errors import StoreUnavailable
from agent.pipeline import explaining
from agent.pipeline.explaining import (
    ALL_CAME_S,
    LONGEST_WAIT_S,
    REQUESTS_PER_SLICE,
    REQUESTS_PER_TURN,
    MissedRequests,
)
from agent.records.objective import ExplainedRequest, JudgedRequest, Objective
from agent.records.request import ProxyView
from agent.store.explanations import ExplanationStore
from tests.store.making import ended_request, engine_sample, request

AT = 1_800_000_000.0
OBJECTIVE = Objective(name="chat", definition=GOODPUT, target=0.9, window_s=3600, ttft_s=0.2)
JUDGE = Judge([OBJECTIVE])


def judged(number: int, *, ttft_s: float = 1.0, ended_at: float = AT) -> JudgedRequest:
    facts: dict[str, Any] = {
        **{"started_at": ended_at - 2.0, "ended_at": ended_at, "request_id": f"r-{number}"},
        **{"ttft_s": ttft_s, "queue_s": 0.9 * ttft_s, "prefill_s": 0.1 * ttft_s},
        **{"decode_s": 1.0, "e2e_s": 2.0, "input_tokens": 100, "output_tokens": 10},
    }
    return JUDGE.judged(request(number, **facts).record)


class Keeper(ExplanationStore):
    def __init__(self) -> None:
        self.away = False
        self.explained: list[ExplainedRequest] = []
        self.left_over: list[JudgedRequest] = []

    def unexplained(
        self, ended_from: float, ended_before: float, limit: int = 1000
    ) -> list[JudgedRequest]:
        found = [
            item for item in self.left_over if ended_from <= item.record.ended_at < ended_before
        ]
        return found[:limit]

    def explain(self, explained: Sequence[ExplainedRequest], now: float) -> list[ExplainedRequest]:
        if self.away:
            raise StoreUnavailable("away")
        self.explained += explained
        done = {item.judged.record.span_id for item in explained}
        self.left_over = [item for item in self.left_over if item.record.span_id not in done]
        return list(explained)


def missed_requests(
    keeper: Keeper, counted: list[ExplainedRequest] | None = None
) -> MissedRequests:
    return MissedRequests(
        [OBJECTIVE],
        ["chat-0"],
        keeper,
        gpus=lambda _engine: [],
        on_explained=lambda items: None if counted is None else counted.extend(items),
    )


def sampled(missed: MissedRequests, until: float) -> None:
    missed.on_sample(engine_sample(until - 1.0))
    missed.on_sample(engine_sample(until))


def test_a_request_waits_for_spans_and_for_a_sample_after_its_end() -> None:
    keeper, counted = Keeper(), list[ExplainedRequest]()
    missed = missed_requests(keeper, counted)
    missed.counted([judged(1)])
    sampled(missed, AT - 0.5)
    missed.run(AT + ALL_CAME_S - 0.1)
    missed.run(AT + ALL_CAME_S + 0.1)
    assert keeper.explained == []
    sampled(missed, AT + 0.5)
    missed.run(AT + ALL_CAME_S + 2.0)
    assert [item.explanation.span_id for item in keeper.explained] == [f"{1:016x}"]
    assert counted == keeper.explained


def test_many_requests_are_explained_in_turns_that_give_way_to_the_writer() -> None:
    keeper, given_way = Keeper(), list[int]()
    missed = MissedRequests(
        [OBJECTIVE],
        ["chat-0"],
        keeper,
        gpus=lambda _engine: [],
        give_way=lambda: given_way.append(len(keeper.explained)),
    )
    missed.counted([judged(number) for number in range(REQUESTS_PER_SLICE + 1)])
    sampled(missed, AT + 0.5)
    missed.run(AT + ALL_CAME_S + 2.0)
    assert len(keeper.explained) == REQUESTS_PER_SLICE + 1
    turns = REQUESTS_PER_SLICE // REQUESTS_PER_TURN
    # Once more before the run and before each write.
    assert given_way == [0] * (turns + 2) + [REQUESTS_PER_SLICE] * 2


def test_without_samples_it_waits_no_longer_than_it_must() -> None:
    keeper = Keeper()
    missed = missed_requests(keeper)
    missed.counted([judged(1)])
    missed.run(AT + LONGEST_WAIT_S - 1)
    assert keeper.explained == []
    missed.run(AT + LONGEST_WAIT_S + 2)
    (item,) = keeper.explained
    assert item.explanation.top is Cause.UNEXPLAINED


def test_only_missed_requests_are_explained() -> None:
    keeper = Keeper()
    missed = missed_requests(keeper)
    missed.counted([judged(1, ttft_s=0.1), judged(2)])
    missed.run(AT + 2 * LONGEST_WAIT_S)
    assert [item.judged.record.request_id for item in keeper.explained] == ["r-2"]


def test_the_plugins_report_of_a_request_is_found_by_its_id() -> None:
    keeper = Keeper()
    missed = missed_requests(keeper)
    missed.on_ended(ended_request(request_id="r-1", ended_at=AT))
    missed.counted([judged(1), judged(2)])
    missed.run(AT + 2 * LONGEST_WAIT_S)
    sources = {item.judged.record.request_id: item.explanation.sources for item in keeper.explained}
    assert sources == {"r-1": ("plugin", "span"), "r-2": ("span",)}


def test_a_store_that_is_away_is_asked_later_for_what_it_has() -> None:
    keeper = Keeper()
    missed, item = missed_requests(keeper), judged(1)
    keeper.away, keeper.left_over = True, [item]
    missed.counted([item])
    missed.run(AT + LONGEST_WAIT_S + 1)
    assert keeper.explained == []
    keeper.away = False
    missed.run(AT + 4 * LONGEST_WAIT_S)
    assert [each.judged for each in keeper.explained] == [item]


def test_a_flood_is_explained_in_parts_and_none_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More than memory keeps: the rest comes from the store."""
    monkeypatch.setattr(explaining, "MOST_WAITING", 800)
    monkeypatch.setattr(explaining, "MOST_AT_ONCE", 200)
    keeper = Keeper()
    missed, flood = missed_requests(keeper), [judged(number) for number in range(850)]
    keeper.left_over = list(flood)
    missed.counted(flood)
    now = AT + 3 * LONGEST_WAIT_S
    missed.run(now)
    assert len(keeper.explained) == 200
    for second in range(1, 100):
        missed.run(now + second)
    assert {item.judged.record.span_id for item in keeper.explained} == {
        item.record.span_id for item in flood
    }


def test_a_request_that_cannot_be_explained_keeps_no_other_from_it() -> None:
    keeper = Keeper()
    missed, odd = missed_requests(keeper), judged(1)
    record = odd.record._replace(proxied=ProxyView(ttft_limit_s="soon"))  # type: ignore[arg-type]
    missed.counted([odd._replace(record=record), judged(2)])
    missed.run(AT + 2 * LONGEST_WAIT_S)
    causes = {item.explanation.span_id: item.explanation.top for item in keeper.explained}
    assert causes == {f"{1:016x}": Cause.UNEXPLAINED, f"{2:016x}": Cause.UNEXPLAINED}
    shares = [len(item.explanation.shares) for item in keeper.explained]
    assert sorted(shares) == [0, 1]
