"""A load that doubles in five minutes on a simulated vLLM, and when each signal asks for a replica.

`python -m tests.analysis.scaling_ramp` prints the table of docs/autoscaling.md. Time is simulated.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, product

from agent.analysis.scaling import EngineSignals, Signals
from agent.analysis.verdicts import MISSED, Judge
from agent.catalog import engine_facts as fact
from agent.catalog.metric import Metric
from agent.records.engine import EngineSample
from agent.records.objective import JudgedRequest
from agent.records.request import RequestRecord
from agent.simulator.batching import Batch, Finished
from agent.simulator.scenario import KvCache, Scenario, TrafficPhase
from agent.simulator.simulated_metrics import MetricsPage
from agent.simulator.traffic import planned_requests
from tests.records.making import NOON, objective, record
from tests.sources.engines.fixture_pages import translated_body

POLL_S = 5.0
OBJECTIVE = objective("chat", ttft_s=0.5, tpot_s=0.05)
# Each for two minutes: a morning in which the replica was once too busy.
MORNING = tuple(
    TrafficPhase(duration_s=120.0, rate_per_s=rate) for rate in (2, 3, 4, 5, 6, 7, 8, 4)
)
BASE_PER_S = 3.5
CALM = TrafficPhase(duration_s=420.0, rate_per_s=BASE_PER_S)
RAMP_S = 300.0
RAMP = tuple(
    TrafficPhase(duration_s=RAMP_S / 60, rate_per_s=BASE_PER_S * (1 + (step + 0.5) / 60))
    for step in range(60)
)
AFTER = TrafficPhase(duration_s=300.0, rate_per_s=2 * BASE_PER_S)


@dataclass(frozen=True, slots=True)
class Moment:
    """One poll: the engine's sample, the requests that ended since the last, and the signals."""

    at_s: float
    sample: EngineSample
    ended: Sequence[JudgedRequest]
    signals: Signals


@dataclass(frozen=True, slots=True)
class Ramp:
    """The polls of a run; `begins_s` is the begin of the ramp."""

    begins_s: float
    moments: Sequence[Moment]

    def first_s(self, is_on: Callable[[Moment], bool]) -> float | None:
        """The time from the begin of the ramp to the first poll at which a signal is on."""
        later = (each.at_s - self.begins_s for each in self.moments if each.at_s > self.begins_s)
        ons = (is_on(each) for each in self.moments if each.at_s > self.begins_s)
        return next((at_s for at_s, on in zip(later, ons, strict=True) if on), None)

    def first_miss_s(self) -> float | None:
        """When the requests that came in the last minute first fell below the objective."""
        requests = [each for moment in self.moments for each in moment.ended]
        requests.sort(key=lambda each: each.record.started_at)
        first = missed = 0
        for index, newest in enumerate(requests):
            missed += newest.judgement.verdict == MISSED
            while requests[first].record.started_at <= newest.record.started_at - 60.0:
                missed -= requests[first].judgement.verdict == MISSED
                first += 1
            since_s = newest.record.started_at - NOON - self.begins_s
            if since_s > 0 and missed > (1 - OBJECTIVE.target) * (index + 1 - first):
                return since_s
        return None


def ramp(
    *, seen_before: bool = True, with_rows: bool = True, seed: int = 7, kv_blocks: int = 4096
) -> Ramp:
    """A run; `seen_before` is of a replica that has served a morning, else it has just started.

    Without rows the signals have the engine's metrics alone.
    """
    before = (*MORNING, CALM) if seen_before else (replace_length(CALM, 30.0),)
    phases = (*before, *RAMP, AFTER)
    begins_s = sum(each.duration_s for each in before)
    scenario = Scenario(
        arrival_rate=phases, abort_ratio=0.0, seed=seed, kv_cache=KvCache(blocks=kv_blocks)
    )
    until_s = sum(each.duration_s for each in phases)
    return Ramp(begins_s, [*_moments(scenario, until_s, with_rows=with_rows)])


def replace_length(phase: TrafficPhase, duration_s: float) -> TrafficPhase:
    """The phase with another length."""
    return phase.model_copy(update={"duration_s": duration_s})


def _moments(scenario: Scenario, until_s: float, *, with_rows: bool) -> Iterator[Moment]:
    numbers = count(1)
    batch = Batch(scenario, planned_requests(scenario, lambda: str(next(numbers))))
    page = MetricsPage(scenario, started_at=NOON)
    signals, judge = EngineSignals([OBJECTIVE]), Judge([OBJECTIVE])
    ended: list[JudgedRequest] = []
    at_s = 0.0
    while at_s < until_s:
        at_s += POLL_S
        while (start_s := batch.next_start_s()) < at_s:
            step = batch.run(start_s, at_s)
            page.observe(step)
            ended += [judge.judged(_record(done)) for done in step.finished]
        # A step may end after the poll, and with it requests.
        past = [each for each in ended if each.record.ended_at <= NOON + at_s]
        ended = [each for each in ended if each.record.ended_at > NOON + at_s]
        sample = _sample(page, NOON + at_s, scenario.max_num_seqs)
        signals.sample(sample)
        if with_rows and past:
            signals.ended(past)
        yield Moment(at_s, sample, past, signals.signals(NOON + at_s))


def _sample(page: MetricsPage, at: float, places: int) -> EngineSample:
    found = translated_body(page.render())
    return EngineSample(
        engine="chat-0",
        at=at,
        dialect="vllm",
        model=found.model,
        # As of the engine's command line.
        facts={**found.facts, (fact.MAX_RUNNING_REQUESTS.name, ()): float(places)},
        histograms=found.histograms,
        process_started_at=NOON,
        families=found.families,
    )


def _record(done: Finished) -> RequestRecord:
    started_at = NOON + done.request.arrived_s
    ended_at = NOON + done.last_token_s
    return record(
        int(done.request.request_id),
        started_at=started_at,
        ended_at=ended_at,
        received_at=ended_at,
        ttft_s=done.ttft_s,
        tpot_s=done.tpot_s if done.request.output_tokens > 1 else None,
        e2e_s=done.e2e_s,
        output_tokens=done.request.output_tokens,
    )


def _needed(moment: Moment) -> float:
    return moment.signals.by_objective[OBJECTIVE.name].needed or 0.0


def _ratio(moment: Moment) -> float:
    return moment.signals.by_objective[OBJECTIVE.name].ratios.get("1m", 0.0)


def _fact(metric: Metric, moment: Moment) -> float:
    return moment.sample.fact(metric.name) or 0.0


SIGNALS: Mapping[str, Callable[[Moment], bool]] = {
    "replicas needed > 0.8": lambda moment: _needed(moment) > 0.8,
    "p90 over its limit > 0.8": lambda moment: _ratio(moment) > 0.8,
    "requests waiting > 10": lambda moment: _fact(fact.REQUESTS_WAITING, moment) > 10,
    "KV cache usage > 80 %": lambda moment: _fact(fact.KV_CACHE_USAGE, moment) > 0.8,
}
SMALL_CACHE, LARGE_CACHE = 4096, 16384


def row(name: str, run: Ramp) -> str:
    """A line of the table: seconds from the begin of the ramp."""
    times = [run.first_miss_s(), *map(run.first_s, SIGNALS.values())]
    cells = ["never" if each is None else f"{each:.0f} s" for each in times]
    return f"| {name} | {' | '.join(cells)} |"


def table() -> Iterator[str]:
    """The table of docs/autoscaling.md."""
    yield f"| replica | first miss | {' | '.join(SIGNALS)} |"
    yield f"|{'---|' * (len(SIGNALS) + 2)}"
    for cache, blocks in (("KV cache full first", SMALL_CACHE), ("batch full first", LARGE_CACHE)):
        for seen, rows in product((True, False), (True, False)):
            known = "has served a morning" if seen else "just started"
            source = "requests and metrics" if rows else "metrics alone"
            run = ramp(seen_before=seen, with_rows=rows, kv_blocks=blocks)
            yield row(f"{cache}, {known}, {source}", run)


if __name__ == "__main__":
    for line in table():
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
