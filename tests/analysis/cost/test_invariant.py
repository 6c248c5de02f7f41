"""The parts add up to the bill for any rows and samples."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.analysis.efficiency.busy_time import TimeParts, time_parts
from agent.analysis.efficiency.engine_observation import observe
from agent.analysis.efficiency.request_activity import TimeRange
from agent.analysis.efficiency.work import Role, Serving
from agent.catalog.hardware import find_gpu
from agent.records.engine import EngineSample
from agent.records.minute import EngineWork
from agent.records.model import Parallelism
from agent.records.request import RequestRecord, Status
from tests.analysis.cost.engine_days import (
    LLAMA_ON_H100,
    UNKNOWN,
    SplitMinute,
    cost,
    efficiency_in,
    engine_sample,
    split_minute,
    whole,
)
from tests.analysis.cost.stepped_engine import H100, Job, Machine, SteppedEngine
from tests.records.columns import active
from tests.records.making import record

SECONDS = st.none() | st.floats(-10, 1e6) | st.floats(0, 30) | st.just(0.0)
TOKENS = st.none() | st.integers(-5, 10**7) | st.integers(0, 300)
TIMES = st.floats(-200, 200) | st.integers(-20, 20).map(float)
COUNTER = st.floats(0, 1e15) | st.integers(0, 1000).map(float)
NAMES = ("running", "steps", "input", "cached", "output", "preemptions", "drafts", "prefix_hits")
SAMPLES = st.builds(
    lambda at, started, counts: engine_sample(at, started, **counts),
    TIMES,
    st.none() | st.sampled_from((-1000.0, 50.0)),
    st.dictionaries(st.sampled_from(NAMES), COUNTER),
)


@st.composite
def rows(draw: st.DrawFn) -> RequestRecord:
    """A row whose values may contradict each other."""
    given: dict[str, Any] = {
        **{name: draw(SECONDS) for name in ("queue_s", "prefill_s", "decode_s", "ttft_s")},
        **{name: draw(TOKENS) for name in ("input_tokens", "cached_tokens", "output_tokens")},
        "status": draw(st.sampled_from(Status)),
        "finish_reason": draw(st.sampled_from((None, "stop", "abort"))),
        "started_at": draw(TIMES),
        "ended_at": draw(TIMES),
    }
    return record(draw(st.integers(1, 20)), **given)


SERVINGS = st.sampled_from(
    (
        Serving(),
        LLAMA_ON_H100,
        Serving(model=LLAMA_ON_H100.model),
        Serving(model=LLAMA_ON_H100.model, gpu=LLAMA_ON_H100.gpu, role=Role.PREFILL),
        Serving(
            model=LLAMA_ON_H100.model,
            gpu=LLAMA_ON_H100.gpu,
            parallelism=Parallelism(tensor=16, data=2),
            role=Role.DECODE,
        ),
    )
)
DAYS = st.tuples(
    st.lists(SAMPLES, max_size=15, unique_by=lambda sample: sample.at),
    st.lists(rows(), max_size=12),
    SERVINGS,
)
WINDOWS = st.tuples(TIMES, st.floats(0.01, 300)).map(lambda w: TimeRange(w[0], w[0] + w[1]))
BILLS = st.just(0.0) | st.floats(1e-6, 1e9)
Day = tuple[list[EngineSample], list[RequestRecord], Serving]


def work_of(day: Day, window: TimeRange) -> EngineWork:
    samples, requests, serving = day
    return efficiency_in(observe(samples, window, max_gap_s=15), requests, serving).work


def bill_of(window: TimeRange) -> float:
    return window.length_s * 7


def split(day: Day, window: TimeRange, bill: float | None = None) -> SplitMinute:
    samples, requests, serving = day
    found = split_minute(observe(samples, window, max_gap_s=15), requests, serving)
    return found.times(bill_of(window) if bill is None else bill)


def close(amount: float, scale: float) -> Any:
    return pytest.approx(amount, rel=1e-9, abs=1e-9 * scale)


@given(DAYS, WINDOWS, BILLS)
def test_requests_idle_unknown_and_unseen_add_up_to_the_bill(
    day: Day, window: TimeRange, bill: float
) -> None:
    """No part is negative; the prices of tokens add up to the cost of the requests."""
    found, work = split(day, window, bill), work_of(day, window)
    assert whole(found) == close(bill, bill)
    outside = (found.cost.idle, found.cost.unknown, found.cost.unseen)
    phases = (found.cost.prefill, found.cost.decode)
    assert sum((*outside, *phases)) == close(bill, bill)
    priced = list(zip(_prices(found, work), _tokens(work), strict=True))
    parts = [*outside, found.cost.aborted, *found.requests.values()]
    parts += [found.cost.computed, found.cost.cached, found.cost.decode]
    parts += [price for price, _ in priced if price is not None]
    assert min(parts) >= 0
    assert found.cost.unseen + found.cost.aborted <= bill * (1 + 1e-9)
    paid = sum(price * count for price, count in priced if price)
    assert paid == close(sum(found.requests.values()), bill)


def _prices(found: SplitMinute, work: EngineWork) -> tuple[float | None, ...]:
    parts = (found.cost.computed, found.cost.cached, found.cost.decode)
    return tuple(cost / n if n > 0 else None for cost, n in zip(parts, _tokens(work), strict=True))


def _tokens(work: EngineWork) -> tuple[float, float, float]:
    return work.computed_tokens, work.cached_tokens, work.output_tokens


@settings(max_examples=25)
@given(DAYS, WINDOWS, st.randoms(use_true_random=False))
def test_the_order_of_rows_and_samples_changes_nothing(
    day: Day, window: TimeRange, chance: random.Random
) -> None:
    samples, requests, serving = day
    mixed = (chance.sample(samples, len(samples)), chance.sample(requests, len(requests)), serving)
    one, other, bill = split(day, window), split(mixed, window), bill_of(window)
    assert other.requests.keys() == one.requests.keys()
    for key, usd in one.requests.items():
        assert other.requests[key] == close(usd, bill)
    for part in ("idle", "unknown", "unseen", "aborted"):
        assert getattr(other.cost, part) == close(getattr(one.cost, part), bill)


def test_streams_that_end_at_once_leave_nothing_to_one_that_lasts_for_days() -> None:
    unknown = dict.fromkeys(("queue_s", "prefill_s", "decode_s", "input_tokens", "cached_tokens"))

    def stream(number: int, tokens: int, ended_at: float) -> RequestRecord:
        given = {"ended_at": ended_at, "ttft_s": ended_at, "output_tokens": tokens}
        return record(number, **{**unknown, **given, "started_at": 0.0})

    streams = [stream(1, 264, 0.0), stream(2, 263, 0.0), stream(3, 256, 770597.0)]
    prompt = {**unknown, "input_tokens": 1, "output_tokens": None}
    other = record(4, **{**prompt, "started_at": 0.0, "ended_at": 9.0, "ttft_s": 9.0})
    ways = [
        split(([], [*mixed, other], Serving()), TimeRange(0.0, 1.0)).requests
        for mixed in permutations(streams)
    ]
    for requests in ways:
        assert requests == pytest.approx(ways[0], rel=1e-9)


@given(DAYS, WINDOWS, st.floats(0.05, 0.95))
def test_two_parts_of_a_minute_have_the_same_idle_unknown_and_busy_time(
    day: Day, window: TimeRange, at: float
) -> None:
    cut = window.from_at + at * window.length_s
    one = times_of(day, TimeRange(window.from_at, cut))
    two = times_of(day, TimeRange(cut, window.until))
    for first, second, both in zip(one, two, times_of(day, window), strict=True):
        assert first + second == close(both, window.length_s)


def times_of(day: Day, window: TimeRange) -> TimeParts:
    samples, requests, _ = day
    observed = observe(samples, window, max_gap_s=15)
    return time_parts(observed, active(requests))


def test_a_rest_of_a_sum_of_loads_is_charged_to_nobody_and_is_not_lost() -> None:
    """The prompts that ended before leave a rest beside one that is wholly cached."""
    unknown = dict.fromkeys(("queue_s", "prefill_s", "decode_s", "output_tokens", "finish_reason"))
    prompts: list[dict[str, Any]] = [
        {"ttft_s": None, "cached_tokens": None},
        {"ttft_s": 3.0, "cached_tokens": None},
        {"ttft_s": 4.0, "cached_tokens": 1},
    ]
    rows = [
        record(1, started_at=0.0, ended_at=0.0, input_tokens=1, **unknown, **prompt)
        for prompt in prompts
    ]
    day: Day = ([], rows, Serving(model=LLAMA_ON_H100.model))
    assert whole(split(day, TimeRange(3.0, 4.0), 1.0)) == close(1.0, 1.0)


# 20 loads of an engine whose every step is known: what each request is charged, and the sums

MINUTES = 3
# By the data sheets of NVIDIA.
MACHINES = {
    "L4": Machine(flops_per_s=121e12, bytes_per_s=300e9),
    "A100-80GB-SXM": Machine(flops_per_s=312e12, bytes_per_s=2039e9),
    "H100-SXM": H100,
}
# When a request comes, its prompt tokens, its output tokens, and how much of the prompt is cached.
Arrival = tuple[float, int, int, int]


def _steady(chance: random.Random, speed: float) -> Iterator[Arrival]:
    rate, at = chance.uniform(0.1, 3.0) * speed, 0.0
    while (at := at + chance.expovariate(rate)) < 60.0 * MINUTES:
        yield at, chance.choice((100, 500, 2000)), chance.randint(1, 300), 0


def _bursts(chance: random.Random, _speed: float) -> Iterator[Arrival]:
    for _ in range(chance.randint(1, 4)):
        at, prompt = chance.uniform(1.0, 150.0), chance.choice((50, 400, 1500))
        for _ in range(chance.randint(5, 100)):
            yield at + chance.uniform(0.0, 0.2), prompt, chance.randint(1, 150), 0


def _lone(chance: random.Random, speed: float) -> Iterator[Arrival]:
    output = int(chance.randint(500, 2500) * speed)
    yield chance.uniform(0.0, 30.0), chance.randint(50, 4000), output, 0


def _long(chance: random.Random, _speed: float) -> Iterator[Arrival]:
    for _ in range(chance.randint(1, 6)):
        yield chance.uniform(0.0, 160.0), chance.randint(8000, 32_000), chance.randint(1, 60), 0


def _tiny(chance: random.Random, _speed: float) -> Iterator[Arrival]:
    for _ in range(chance.randint(50, 400)):
        yield chance.uniform(0.0, 160.0), chance.randint(5, 60), chance.randint(1, 4), 0


def _cached(chance: random.Random, _speed: float) -> Iterator[Arrival]:
    for _ in range(chance.randint(5, 80)):
        prompt = chance.randint(1000, 16_000)
        cached = prompt - chance.choice((1, 16, prompt // 10))
        yield chance.uniform(0.0, 160.0), prompt, chance.randint(1, 80), cached


TRAFFIC = (_steady, _bursts, _lone, _long, _tiny, _cached)


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine served, and the serving as an agent knows it."""

    engine: SteppedEngine
    serving: Serving

    @property
    def ended(self) -> list[Job]:
        """The requests with a row that ended in the minutes."""
        ended = [job for job in self.engine.ended if job.ended_at <= 60.0 * MINUTES]
        return [job for job in ended if job.has_row]

    def minutes(self, serving: Serving) -> list[SplitMinute]:
        """The cost of each minute at a dollar a second."""
        rows = [job.row() for job in self.engine.ended if job.has_row]
        return [
            cost(self.engine.samples, rows, TimeRange(60.0 * n, 60.0 * (n + 1)), serving)
            for n in range(MINUTES)
        ]


def load(seed: int) -> Load:
    """The load of a seed: one to three kinds of traffic at once, on one of the machines."""
    chance = random.Random(seed)
    name = chance.choice(sorted(MACHINES))
    machine = replace(
        MACHINES[name],
        budget=chance.choice((2048, 8192)),
        most_running=chance.choice((16, 64, 256)),
        slowness=chance.uniform(1.0, 2.0),
        overhead_s=chance.uniform(0.0, 0.004),
    )
    speed = machine.bytes_per_s / H100.bytes_per_s
    kinds = chance.sample(TRAFFIC, chance.randint(1, 3))
    arrivals = [arrival for kind in kinds for arrival in kind(chance, speed)]
    aborts, proxied = chance.choice((0.0, 0.0, 0.2)), chance.random() < 0.5
    jobs = [
        _job(number, arrival, chance.random() < aborts, proxied, chance)
        for number, arrival in enumerate(arrivals, 1)
    ]
    engine = SteppedEngine(machine, jobs, late_s=0.02, seed=seed).run(60.0 * MINUTES + 40)
    return Load(engine, replace(LLAMA_ON_H100, gpu=find_gpu(name)))


def _job(number: int, arrival: Arrival, leaves: bool, proxied: bool, chance: random.Random) -> Job:
    """A request; one whose client leaves has a row only if it came by the proxy."""
    at, prompt, output, cached = arrival
    return Job(
        number=number,
        at=at,
        prompt=prompt,
        output=output,
        cached=cached,
        leaves_at=chance.randint(1, output) if leaves else None,
        has_row=proxied or not leaves,
    )


# The figures of docs/cost.md are of 200.
LOADS = 20
BILL_S = 60.0 * MINUTES


@pytest.fixture(scope="module")
def loads() -> list[Load]:
    return [load(seed) for seed in range(LOADS)]


Computed = list[tuple[Load, list[SplitMinute]]]


@pytest.fixture(scope="module", params=[True, False], ids=["roofline", "tokens"])
def computed(loads: list[Load], request: pytest.FixtureRequest) -> Computed:
    """Each load with the cost of its minutes."""
    return [(load, load.minutes(load.serving if request.param else UNKNOWN)) for load in loads]


def charges(served: Load, minutes: list[SplitMinute]) -> Iterator[tuple[float, float]]:
    """True and charged seconds of each request."""
    for job in served.ended:
        yield job.gpu_s, sum(minute.requests.get(job.key, 0.0) for minute in minutes)


def share(good: list[bool]) -> float:
    return sum(good) / len(good) if good else 1.0


@pytest.mark.slow
def test_each_request_is_charged_its_own_time(computed: Computed) -> None:
    near, nearly = [], []
    for served, minutes in computed:
        pairs = list(charges(served, minutes))
        near += [abs(paid - true) <= 0.25 * true for true, paid in pairs]
        nearly.append(
            share([abs(paid - true) <= max(0.25 * true, 0.01 * BILL_S) for true, paid in pairs])
        )
    # Of every load, 95 of 100 requests are within 25 % or 1 % of the bill; of all, within 25 %.
    assert min(nearly) >= 0.95
    assert share(near) >= 0.95


@pytest.mark.slow
def test_the_parts_of_each_minute_add_up_to_its_bill(computed: Computed) -> None:
    for _, minutes in computed:
        for minute in minutes:
            assert whole(minute) == pytest.approx(60.0, rel=1e-9)


@pytest.mark.slow
def test_unseen_work_is_that_of_requests_without_a_row(computed: Computed) -> None:
    """Its place in an interval is unknown, so that it is an estimate, and rather too much."""
    times = []
    for served, minutes in computed:
        gone = [job for job in served.engine.ended if not job.has_row and job.ended_at < BILL_S]
        if gone:
            true = sum(job.gpu_s for job in gone)
            times.append(sum(minute.cost.unseen for minute in minutes) / true)
    assert times
    assert share([0.9 <= each <= 1.5 for each in times]) >= 0.85
    assert max(times) < 2.5


@pytest.mark.slow
def test_the_requests_of_the_engine_have_all_its_steps(loads: list[Load]) -> None:
    for served in loads:
        engine = served.engine
        everyone = [*engine.ended, *engine.running, *engine.waiting]
        assert sum(job.gpu_s for job in everyone) == pytest.approx(engine.busy_s, rel=1e-9)
