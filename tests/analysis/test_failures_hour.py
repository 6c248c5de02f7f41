"""An hour of traffic that overfills the KV cache: nothing but pressure on the cache."""

from collections.abc import Iterator
from random import Random

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from agent.analysis.failures import Poll, Watching, classify
from agent.catalog import engine_facts as fact
from agent.records.engine import EngineSample
from agent.records.event import Event, EventKind
from agent.records.host import HostSighting, LogSighting, ProcessRole
from agent.simulator.batching import Batch
from agent.simulator.scenario import Decode, KvCache, Prefill, Scenario, TokenLengths
from agent.simulator.steps import Step
from agent.simulator.traffic import planned_requests
from tests.analysis.failure_polls import CORE, FRONT, cgroup, process

HOUR_S = 3600.0
STARTED_AT = 1_795_000_000.0

# Twice as much as the cache holds, in steps that are slow, so that an hour has few of them.
OVERFULL = Scenario(
    max_model_len=1000,
    arrival_rate=2.0,
    input_tokens=TokenLengths(median=60, sigma=0.6, min=10, max=600),
    output_tokens=TokenLengths(median=120, sigma=0.4, min=20, max=300),
    prefill=Prefill(tokens_per_s=2000.0, floor_s=0.1),
    decode=Decode(base_s=0.25, per_running_s=0.01),
    max_num_seqs=16,
    max_num_batched_tokens=800,
    kv_cache=KvCache(blocks=100, block_tokens=10),
    abort_ratio=0.1,
)


class Counted:
    """What the engine's page counts, from its steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.tokens = 0
        self.preemptions = 0

    def add(self, step: Step) -> None:
        self.steps += 1
        self.tokens += len(step.tokens)
        self.preemptions += step.preemptions

    def facts(self, batch: Batch) -> dict[tuple[str, tuple[str, ...]], float]:
        load = batch.load
        return {
            (fact.STEPS.name, ()): self.steps,
            (fact.OUTPUT_TOKENS.name, ()): self.tokens,
            (fact.PREEMPTIONS.name, ()): self.preemptions,
            (fact.REQUESTS_RUNNING.name, ()): load.running,
            (fact.REQUESTS_WAITING.name, ()): load.waiting,
            (fact.KV_CACHE_USAGE.name, ()): load.kv_usage,
            (fact.AWAKE.name, ()): 1,
        }


def hour(random: Random, interval_s: float) -> Iterator[Poll]:
    """The polls of an hour, with the small troubles that every hour has."""
    scenario = OVERFULL.model_copy(update={"seed": random.randrange(1000)})
    batch = Batch(scenario, planned_requests(scenario, lambda: "chatcmpl-hour"))
    counted = Counted()
    at_s = 0.0
    while at_s < HOUR_S:
        while (start_s := batch.next_start_s()) <= at_s:
            counted.add(batch.end(batch.begin(start_s)))
        now = STARTED_AT + at_s
        if random.random() < 0.02:
            yield Poll(engine="chat", at=now, failure="cut_off", health=200, host=machine(random))
        else:
            yield Poll(
                engine="chat",
                at=now,
                sample=EngineSample(
                    engine="chat",
                    at=now,
                    dialect="vllm",
                    model="m",
                    facts=counted.facts(batch),
                    process_started_at=STARTED_AT - 60,
                ),
                health=random.choice([200, 200, 200, None]),
                host=machine(random),
            )
        at_s += interval_s * random.uniform(0.8, 1.5) * (10 if random.random() < 0.01 else 1)


def machine(random: Random) -> HostSighting | None:
    """A look at a machine on which all is well and not all can always be seen."""
    if random.random() < 0.05:
        return None
    worker = process(ProcessRole.WORKER, 12, state=random.choice("RSD"))
    return HostSighting(
        at=0.0,
        processes=None if random.random() < 0.1 else (FRONT, CORE, worker),
        cgroup=None if random.random() < 0.1 else cgroup(0),
        node_oom_kills=3,
        log=LogSighting(lines=random.choice([0, 3])),
    )


# Each example is an hour long, so a failing one is shown as it is.
@settings(max_examples=4, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(st.integers(0, 10_000), st.sampled_from([1.0, 5.0, 15.0]))
def test_an_hour_of_heavy_preemption_is_pressure_on_the_cache_and_nothing_else(
    seed: int, interval_s: float
) -> None:
    watching, events, last = Watching(), list[Event](), None
    for poll in hour(Random(seed), interval_s):
        told, watching = classify(poll, watching)
        events += told
        last = poll.sample or last
    assert last is not None
    assert (last.fact(fact.PREEMPTIONS.name) or 0) > 300
    assert {event.kind for event in events} == {EventKind.KV_PRESSURE}
