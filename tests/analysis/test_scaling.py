"""Signals for autoscalers, against numpy's percentiles of raw requests and a queue's recursion."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.analysis.quantiles import RELATIVE_ERROR
from agent.analysis.scaling import (
    EngineSignals,
    Held,
    HeldRate,
    held_bin,
    replicas_needed,
)
from agent.catalog.engine_facts import TIME_TO_FIRST_TOKEN
from agent.records.engine import EngineSample, HistogramSnapshot
from agent.records.objective import Match
from agent.records.request import ProxyView, RequestRecord, Status
from tests.analysis.cost.engine_days import engine_sample
from tests.analysis.scaling_ramp import SIGNALS, ramp, row
from tests.records.making import NOON, judged, objective, record

CHAT = objective("chat", ttft_s=0.2, tpot_s=0.05)


def ended(at: float, **given: object) -> RequestRecord:
    """A request of half a second that ended at a time after NOON."""
    times = {"started_at": NOON + at - 0.5, "ended_at": NOON + at, "received_at": NOON + at}
    return record(1, **{**times, **given})


def signals_of(records: Iterable[RequestRecord], now_s: float) -> dict[str, float]:
    signals = EngineSignals([CHAT])
    signals.ended(judged([*records], [CHAT]))
    return dict(signals.signals(NOON + now_s).by_objective["chat"].ratios)


# Latency over its limit

SECONDS = st.floats(0.001, 50.0)
REQUESTS = st.lists(st.tuples(st.floats(5.0, 299.9), SECONDS, SECONDS), min_size=1, max_size=80)


@given(REQUESTS)
def test_the_ratio_is_that_of_the_worst_limit_at_the_90th_percentile_of_the_requests(
    requests: list[tuple[float, float, float]],
) -> None:
    rows = [ended(at, ttft_s=ttft_s, tpot_s=tpot_s) for at, ttft_s, tpot_s in requests]
    found = signals_of(rows, 300.0)
    for window, since_s in (("1m", 240.0), ("5m", 0.0)):
        # A slot that began when the window did is a part of it.
        inside = [each for each in requests if each[0] // 5.0 > since_s // 5.0]
        if not inside:
            assert window not in found
            continue
        ttft = np.percentile([each[1] for each in inside], 90, method="inverted_cdf") / 0.2
        tpot = np.percentile([each[2] for each in inside], 90, method="inverted_cdf") / 0.05
        assert found[window] == pytest.approx(max(ttft, tpot), rel=RELATIVE_ERROR + 1e-9)


def test_a_limit_that_the_client_sent_is_the_one_that_counts() -> None:
    view = ProxyView(ttft_limit_s=2.0, streamed=True)
    assert signals_of([ended(10.0, ttft_s=1.0, tpot_s=None, proxied=view)], 10.0) == {
        "1m": pytest.approx(0.5, rel=RELATIVE_ERROR),
        "5m": pytest.approx(0.5, rel=RELATIVE_ERROR),
    }


def test_a_window_without_a_latency_has_no_ratio() -> None:
    refused = ended(10.0, ttft_s=None, tpot_s=None, status=Status.INVALID)
    assert signals_of([refused], 10.0) == {}
    assert signals_of([ended(10.0)], 100.0).keys() == {"5m"}
    assert signals_of([ended(10.0)], 400.0) == {}


BOUNDS = (0.1, 0.2, 0.4, 0.8)


def sample(
    at: float, ttft: Sequence[float] = (), finished: float = 0.0, running: float = 0.0
) -> EngineSample:
    """A sample with the TTFT of all requests so far in the engine's own buckets."""
    counts = [float(sum(value <= bound for value in ttft)) for bound in (*BOUNDS, np.inf)]
    histogram = HistogramSnapshot((*BOUNDS, np.inf), tuple(counts), sum(ttft))
    plain = engine_sample(NOON + at, finished=finished, running=running, waiting=0.0)
    return replace(plain, histograms={TIME_TO_FIRST_TOKEN.name: histogram})


@given(st.lists(st.floats(0.05, 0.8), min_size=1, max_size=60))
def test_without_requests_the_ratio_lies_in_the_bucket_of_the_percentile(
    ttft: list[float],
) -> None:
    signals = EngineSignals([CHAT])
    signals.sample(sample(0.0, [0.7] * 50))
    signals.sample(sample(5.0, [0.7] * 50 + ttft))
    ratio = signals.signals(NOON + 5.0).by_objective["chat"].ratios["1m"]
    true = float(np.percentile(ttft, 90, method="inverted_cdf"))
    above = min(bound for bound in BOUNDS if bound >= true)
    below = max((bound for bound in BOUNDS if bound < true), default=0.0)
    assert below <= ratio * 0.2 <= above + 1e-9


def test_an_engines_histogram_says_nothing_of_the_requests_of_one_tenant() -> None:
    signals = EngineSignals([replace(CHAT, match=Match(tenant="acme"))])
    signals.sample(sample(0.0))
    signals.sample(sample(5.0, [0.3] * 9))
    assert signals.signals(NOON + 5.0).by_objective["chat"].ratios == {}


# Arrivals


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=10))
def test_arrivals_are_requests_that_finished_and_those_that_the_load_grew_by(
    polls: list[tuple[int, int]],
) -> None:
    signals = EngineSignals([CHAT])
    signals.sample(sample(0.0, running=3.0))
    arrived, finished, load = 0, 0, 3
    for number, (came, ends) in enumerate(polls, 1):
        arrived += came
        ending = min(ends, load + came)
        finished, load = finished + ending, load + came - ending
        signals.sample(sample(5.0 * number, finished=float(finished), running=float(load)))
    rate = signals.signals(NOON + 5.0 * len(polls)).arrival_per_s
    assert rate == pytest.approx(arrived / (5.0 * len(polls)))


def test_the_arrival_rate_is_known_five_seconds_after_the_first_sample_and_no_sooner() -> None:
    signals = EngineSignals([CHAT])
    signals.sample(sample(0.0))
    signals.sample(sample(1.0, finished=4.0))
    assert signals.signals(NOON + 1.0).arrival_per_s is None
    signals.sample(sample(6.0, finished=24.0))
    assert signals.signals(NOON + 6.0).arrival_per_s == pytest.approx(4.0)


def test_an_engine_that_does_not_answer_has_no_arrival_rate() -> None:
    signals = EngineSignals([CHAT])
    for second in (0.0, 5.0, 10.0):
        signals.sample(sample(second, finished=second))
    assert signals.signals(NOON + 90.0).arrival_per_s is None


# The rate that is held


def wrong_minutes(minutes: Sequence[tuple[int, bool]], limit: int) -> int:
    return sum(held == (rate > limit) for rate, held in minutes)


@given(st.lists(st.tuples(st.integers(1, 12), st.booleans()), max_size=30))
def test_no_other_rate_is_contradicted_by_fewer_minutes(minutes: list[tuple[int, bool]]) -> None:
    weights = {
        rate: (float(minutes.count((rate, True))), float(minutes.count((rate, False))))
        for rate, _ in minutes
    }
    found = held_bin(weights)
    every = {rate for rate, held in minutes if held}
    fewest = min((wrong_minutes(minutes, rate) for rate in every), default=0)
    none = wrong_minutes(minutes, 0)
    if found is None:
        assert not every or none <= fewest
    else:
        assert wrong_minutes(minutes, found) == fewest < none
        assert found == min(rate for rate in every if wrong_minutes(minutes, rate) == fewest)


def learnt(*minutes: tuple[float, bool], each_s: float = 60.0) -> HeldRate:
    rate = HeldRate()
    for number, (per_s, held) in enumerate(minutes):
        rate.learn(per_s, each_s * number, held=held)
    return rate


def test_nothing_is_held_before_a_minute_has() -> None:
    assert HeldRate().held(0.0) is None
    assert learnt((3.0, False)).held(60.0) is None


def test_a_rate_above_which_nothing_was_seen_is_no_limit() -> None:
    held = learnt((3.0, True), (4.0, True)).held(60.0)
    assert held is not None
    assert held.per_s == pytest.approx(4.0, rel=RELATIVE_ERROR)
    assert not held.is_limit
    limited = learnt((3.0, True), (4.0, True), (6.0, False)).held(120.0)
    assert limited is not None
    assert limited.is_limit


def test_confidence_grows_with_minutes_and_falls_with_their_age() -> None:
    few, many = (learnt(*[(4.0, True)] * count) for count in (2, 20))
    seen = [each.held(60.0 * 19) for each in (few, many)]
    assert seen[0] is not None
    assert seen[1] is not None
    assert 0.0 < seen[0].confidence < seen[1].confidence < 1.0
    later = many.held(60.0 * 19 + 6 * 3600.0)
    assert later is not None
    assert later.per_s == seen[1].per_s
    assert later.confidence < seen[1].confidence
    assert later.age_s == pytest.approx(6 * 3600.0)


def test_a_slower_engine_is_learnt_within_a_few_half_lives() -> None:
    rate = learnt(*[(8.0, True)] * 30, *[(5.0, False), (3.0, True)] * 60)
    held = rate.held(60.0 * 150)
    assert held is not None
    assert held.per_s == pytest.approx(3.0, rel=RELATIVE_ERROR)


def test_what_was_last_seen_a_week_ago_is_forgotten() -> None:
    rate = learnt((4.0, True))
    assert rate.held(6.9 * 86400.0) is not None
    assert rate.held(7.1 * 86400.0) is None


def waits(
    rate: float, service_s: float, seconds: float, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Arrivals and times in the system of a queue with one server, by Lindley's recursion."""
    arrivals = np.cumsum(random.exponential(1 / rate, int(rate * seconds * 1.2)))
    arrivals = arrivals[arrivals < seconds]
    free_at, spent = 0.0, []
    for at in arrivals:
        free_at = max(free_at, at) + service_s
        spent.append(free_at - at)
    return arrivals, np.array(spent)


def test_the_held_rate_of_a_queue_is_that_at_which_its_waits_reach_the_limit() -> None:
    """The oracle is the recursion itself at fixed rates, for an hour each."""
    random = np.random.default_rng(1)
    service_s, limit_s = 0.1, 0.5
    true = max(
        rate
        for rate in np.arange(2.0, 10.0, 0.1)
        if np.mean(waits(rate, service_s, 3600.0, random)[1] <= limit_s) >= 0.95
    )
    chat = objective("chat", ttft_s=limit_s)
    signals, finished, at_s = EngineSignals([chat]), 0, 0.0
    signals.sample(sample(0.0))
    # Ten minutes of each rate, the second half of which counts as steady.
    for rate in random.permutation(np.arange(3.0, 9.6, 0.5)):
        arrivals, spent = waits(rate, service_s, 300.0, random)
        rows = [
            record(
                started_at=NOON + at_s + at,
                ended_at=NOON + at_s + at + wait,
                received_at=NOON + at_s + at + wait,
                ttft_s=wait,
                tpot_s=None,
                output_tokens=1,
            )
            for at, wait in zip(arrivals, spent, strict=True)
        ]
        signals.ended(judged(rows, [chat]))
        for poll in range(1, 61):
            finished += int(np.sum((arrivals > 5.0 * (poll - 1)) & (arrivals <= 5.0 * poll)))
            signals.sample(sample(at_s + 5.0 * poll, finished=float(finished)))
        at_s += 300.0
    for poll in range(1, 100):
        signals.sample(sample(at_s + 5.0 * poll, finished=float(finished)))
    held = signals.signals(NOON + at_s + 5.0 * 99).by_objective["chat"].held
    assert held is not None
    assert held.is_limit
    assert held.per_s == pytest.approx(true, rel=0.15)


# Replicas


def held(per_s: float, *, is_limit: bool = True) -> Held:
    return Held(per_s=per_s, age_s=60.0, confidence=0.9, is_limit=is_limit)


@pytest.mark.parametrize(
    ("arrival", "rate", "ratio", "occupied", "needed"),
    [
        (6.0, held(4.0), 0.7, 0.9, 1.5),
        (2.0, held(4.0), 0.7, 0.9, 0.5),
        # Latency is over its limit already, whatever the rate.
        (2.0, held(4.0), 1.3, 0.9, 1.3),
        # Latency says no more than that.
        (2.0, held(4.0), 40.0, 1.0, 2.0),
        (20.0, held(4.0), 40.0, 1.0, 5.0),
        (2.0, held(4.0), None, 0.9, 0.5),
        # A cold start: no limit was seen, so that latency and the room in the engine count.
        (6.0, held(4.0, is_limit=False), 0.7, 0.2, 0.7),
        (6.0, None, 0.7, 0.9, 0.9),
        (6.0, None, None, 0.9, 0.9),
        (None, held(4.0), 0.7, None, 0.7),
        (6.0, None, None, None, None),
        (None, held(4.0), None, None, None),
        (0.0, held(4.0), None, None, 0.0),
    ],
)
def test_replicas_are_needed_by_rate_and_by_latency_over_its_limit(
    arrival: float | None,
    rate: Held | None,
    ratio: float | None,
    occupied: float | None,
    needed: float | None,
) -> None:
    assert replicas_needed(arrival, rate, ratio, occupied) == needed


@given(st.lists(st.floats(0.01, 50.0), min_size=1, max_size=9), st.floats(0.1, 20.0))
def test_the_sum_over_replicas_is_the_load_over_what_one_holds(
    arrivals: list[float], per_s: float
) -> None:
    needed = [replicas_needed(each, held(per_s), None, None) for each in arrivals]
    assert sum(filter(None, needed)) == pytest.approx(sum(arrivals) / per_s)


@pytest.mark.parametrize(
    ("facts", "needed"),
    [({"kv": 0.6, "running": 12.0, "places": 16.0}, 0.75), ({"kv": 0.6, "running": 12.0}, 0.6)],
)
def test_an_engine_is_occupied_as_its_cache_and_its_batch_are(
    facts: dict[str, float], needed: float
) -> None:
    signals = EngineSignals([CHAT])
    for second in (0.0, 5.0):
        signals.sample(engine_sample(NOON + second, waiting=0.0, finished=0.0, **facts))
    assert signals.signals(NOON + 5.0).by_objective["chat"].needed == pytest.approx(needed)


# Memory


def test_memory_does_not_grow_with_time() -> None:
    signals = EngineSignals([CHAT])
    for minute in range(0, 60 * 24, 3):
        signals.sample(sample(60.0 * minute, finished=float(minute)))
        signals.ended(judged([ended(60.0 * minute + 1.0)], [CHAT]))
    assert len(signals._slots) <= 61
    assert len(signals._minutes) <= 7


def test_requests_alone_do_not_fill_the_memory_while_the_engine_is_down() -> None:
    signals = EngineSignals([CHAT])
    for minute in range(60 * 24):
        signals.ended(judged([ended(60.0 * minute + 1.0)], [CHAT]))
    assert len(signals._minutes) <= 7


# A load that doubles in five minutes


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("KV cache full first, has served a morning, requests and metrics", {}),
        ("KV cache full first, just started, requests and metrics", {"seen_before": False}),
    ],
)
def test_a_replica_is_asked_for_before_the_objective_is_missed_and_the_queue_is_deep(
    name: str, options: dict[str, bool]
) -> None:
    run = ramp(**options)
    first_miss_s = run.first_miss_s()
    needed_s = run.first_s(SIGNALS["replicas needed > 0.8"])
    waiting_s = run.first_s(SIGNALS["requests waiting > 10"])
    assert needed_s is not None
    assert first_miss_s is not None
    assert waiting_s is not None
    assert needed_s < first_miss_s < waiting_s
    page = (Path(__file__).parents[2] / "docs" / "autoscaling.md").read_text(encoding="utf-8")
    assert row(name, run) in page


# What is learnt of minutes


class Served:
    """An engine that is polled every 5 s and serves requests of one latency at a time."""

    def __init__(self) -> None:
        self.signals = EngineSignals([CHAT])
        self.now_s, self._finished, self._number = 0.0, 0.0, 0
        self.signals.sample(sample(0.0))

    def serve(self, per_s: float, ttft_s: float, *, seconds: float) -> None:
        for _ in range(int(seconds // 5)):
            rows = [
                ended(self.now_s + 0.5 + number / per_s, ttft_s=ttft_s)
                for number in range(int(5 * per_s))
            ]
            self.now_s += 5.0
            self._finished += 5 * per_s
            if rows:
                self.signals.ended(judged(rows, [CHAT]))
            self.signals.sample(sample(self.now_s, finished=self._finished))

    def held(self) -> Held | None:
        """What is held, five idle minutes later, when all minutes are judged."""
        for _ in range(75):
            self.now_s += 5.0
            self.signals.sample(sample(self.now_s, finished=self._finished))
        return self.signals.signals(NOON + self.now_s).by_objective["chat"].held


def test_a_minute_that_missed_behind_a_busier_one_says_nothing_of_its_rate() -> None:
    engine = Served()
    engine.serve(4.0, 0.1, seconds=120.0)
    engine.serve(8.0, 0.9, seconds=60.0)
    # The queue of that minute lasts for four more.
    engine.serve(2.0, 0.9, seconds=240.0)
    held = engine.held()
    assert held is not None
    assert held.per_s == pytest.approx(4.0, rel=RELATIVE_ERROR)


def test_a_minute_of_few_requests_or_of_half_a_minute_says_nothing() -> None:
    engine = Served()
    engine.serve(0.2, 0.9, seconds=120.0)
    assert engine.held() is None
    engine = Served()
    engine.serve(4.0, 0.1, seconds=30.0)
    # The engine did not answer for the other half.
    engine.now_s += 300.0
    assert engine.held() is None


def test_a_restart_loses_what_was_in_work_and_adds_no_arrivals() -> None:
    signals = EngineSignals([CHAT])
    signals.sample(started(0.0, 1.0, finished=500.0, running=40.0))
    signals.sample(started(5.0, 4.0, finished=3.0, running=7.0))
    assert signals.signals(NOON + 5.0).arrival_per_s == pytest.approx(10 / 5)


def started(at: float, since: float, finished: float, running: float) -> EngineSample:
    """A sample of a process that began at a time after NOON."""
    facts = {"finished": finished, "running": running, "waiting": 0.0}
    return engine_sample(NOON + at, NOON + since, **facts)


def test_a_first_token_counts_before_its_request_has_ended() -> None:
    signals = EngineSignals([CHAT])
    signals.ended(judged([ended(1.0, ttft_s=0.1)], [CHAT]))
    signals.sample(sample(0.0))
    # All of the last requests wait longer than 0.4 s for their first token, and go on.
    signals.sample(sample(5.0, [0.5] * 20, running=20.0))
    ratio = signals.signals(NOON + 5.0).by_objective["chat"].ratios["1m"]
    assert ratio == pytest.approx(0.4 / 0.2)
