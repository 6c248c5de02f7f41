"""Engine's spans whose parent is not the proxy's span: joined by trace and time, or not at all."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine

from agent.records.objective import JudgedRequest
from tests.store.making import NOON, counted_rollups, counted_rows
from tests.store.migrated import migrated_in
from tests.store.views import (
    DUE,
    WAIT_S,
    JoiningAgent,
    cut,
    empty,
    engine_view,
    proxy_view,
    rows,
    states,
)

TRACE = "7" * 32
# Of a span that another program, or the engine itself, puts above the engine's.
UNKNOWN = "b" * 16
LATER = DUE + WAIT_S + 1000.0


@pytest.fixture
def agent(sqlite: Engine) -> JoiningAgent:
    return JoiningAgent(sqlite)


def call(number: int, begins_s: float, lasts_s: float, **given: Any) -> list[JudgedRequest]:
    """A call of an agent's trace as the proxy saw it, and the engine's span, a grandchild."""
    begins = NOON + begins_s
    inner = begins + 0.1 * lasts_s, begins + 0.8 * lasts_s
    values: dict[str, Any] = {"trace_id": TRACE, "parent_span_id": UNKNOWN}
    values |= {"started_at": inner[0], "ended_at": inner[1], **given}
    return [
        proxy_view(number, trace_id=TRACE, started_at=begins, ended_at=begins + lasts_s),
        engine_view(number, **values),
    ]


def joined_pairs(sqlite: Engine) -> set[tuple[str, str]]:
    """The spans of proxy and engine of each joined row."""
    return {
        (row["proxy_span_id"], row["span_id"]) for row in rows(sqlite) if row["vantage"] == "joined"
    }


def own(*views: JudgedRequest) -> set[tuple[str, str]]:
    pairs = zip(views[::2], views[1::2], strict=True)
    return {(proxy.record.span_id, engine.record.span_id) for proxy, engine in pairs}


@pytest.mark.parametrize("engine_first", [True, False])
def test_a_grandchild_is_joined_when_the_wait_ends_and_counted_once(
    sqlite: Engine, agent: JoiningAgent, *, engine_first: bool
) -> None:
    proxy, engine = call(1, 0.0, 1.0)
    for view in (engine, proxy) if engine_first else (proxy, engine):
        assert agent.take(view).counted == []
    (counted,) = agent.settle(DUE)
    assert counted.record.proxy_span_id == proxy.record.span_id
    assert states(sqlite) == [("joined", True, False)]
    assert counted_rollups(sqlite) == counted_rows(sqlite)


def test_a_grandchild_that_comes_after_the_wait_of_the_proxys_view_is_joined(
    sqlite: Engine, agent: JoiningAgent
) -> None:
    proxy, engine = call(1, 0.0, 1.0)
    agent.take(proxy)
    agent.settle(DUE)
    agent.take(engine)
    agent.settle(DUE)
    assert states(sqlite) == [("joined", True, False)]
    assert counted_rollups(sqlite) == counted_rows(sqlite)


@pytest.mark.parametrize(
    "changed",
    [
        {"trace_id": "8" * 32},
        {"started_at": NOON - 0.1},
        {"ended_at": NOON + 1.1},
        {"output_tokens": 22},
        {"engine": "another"},
        {"clock_skew_s": 70.0},
        {"parent_span_id": None},
    ],
    ids=str,
)
def test_what_does_not_fit_is_not_joined(
    sqlite: Engine, agent: JoiningAgent, changed: dict[str, Any]
) -> None:
    agent.take(*call(1, 0.0, 1.0, **changed))
    agent.settle(LATER)
    assert joined_pairs(sqlite) == set()
    assert [row["counted"] for row in rows(sqlite)] == [True, True]


def test_calls_at_the_same_time_are_joined_by_their_parent_alone(
    sqlite: Engine, agent: JoiningAgent
) -> None:
    known = call(1, 0.0, 1.0, parent_span_id=proxy_view(1).record.span_id)
    agent.take(*known, *call(2, 0.2, 0.5))
    agent.settle(LATER)
    assert joined_pairs(sqlite) == own(*known)


# Beginnings and lengths in tenths of a second: calls that follow each other, with or without a gap.
_STEPS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), min_size=1, max_size=6)
_ANY = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 8)), min_size=1, max_size=6)
_CUTS = st.lists(st.integers(0, 12), max_size=3)


def calls_of(spans: list[tuple[int, int]]) -> list[JudgedRequest]:
    return [
        view
        for number, (begin, length) in enumerate(spans, 1)
        for view in call(number, begin / 10, length / 10)
    ]


@given(steps=_STEPS, places=_CUTS, shuffled=st.randoms(use_true_random=False))
def test_calls_one_after_the_other_are_joined_each_to_its_own(
    tmp_path_factory: pytest.TempPathFactory, steps: Any, places: Any, shuffled: Any
) -> None:
    begin, spans = 0, []
    for gap, length in steps:
        spans.append((begin + gap, length))
        begin += gap + length
    views = calls_of(spans)
    assert _joined_of(tmp_path_factory.mktemp("d"), views, places, shuffled) == own(*views)


@given(spans=_ANY, places=_CUTS, shuffled=st.randoms(use_true_random=False))
def test_no_call_is_ever_joined_to_the_span_of_another(
    tmp_path_factory: pytest.TempPathFactory, spans: Any, places: Any, shuffled: Any
) -> None:
    views = calls_of(spans)
    assert _joined_of(tmp_path_factory.mktemp("d"), views, places, shuffled) <= own(*views)


def _joined_of(
    folder: Path, views: list[JudgedRequest], places: list[int], shuffled: Any
) -> set[tuple[str, str]]:
    mixed = list(views)
    shuffled.shuffle(mixed)
    with migrated_in(folder) as sqlite:
        agent = JoiningAgent(sqlite)
        for batch in cut(mixed, [min(place, len(mixed)) for place in places]):
            agent.take(*batch)
        agent.settle(LATER)
        found = joined_pairs(sqlite)
        assert counted_rollups(sqlite) == counted_rows(sqlite)
        empty(sqlite)
    return found
