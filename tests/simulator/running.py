"""A simulator on a free port, an engine that a test steps, and what their expositions hold."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from itertools import count

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from agent.simulator.batching import Batch
from agent.simulator.engine_steps import EngineRequest, Finished, Step
from agent.simulator.openai_server import run_simulator
from agent.simulator.scenario import Decode, KvCache, Prefill, Scenario, TokenLengths
from agent.simulator.span_sender import SpanTarget
from agent.simulator.traffic import planned_requests

# Fifty times as fast as the default: a token every 0.2 ms.
QUICK = Scenario(time_scale=50.0)


@asynccontextmanager
async def running(
    scenario: Scenario = QUICK, *, traffic: bool = False, spans: SpanTarget | None = None
) -> AsyncIterator[str]:
    """The URL of a simulator; on exit it is stopped and its spans are flushed."""
    listening = asyncio.get_running_loop().create_future()
    simulator = asyncio.create_task(
        run_simulator(scenario, announce=listening.set_result, port=0, traffic=traffic, spans=spans)
    )
    await asyncio.wait({simulator, listening}, return_when=asyncio.FIRST_COMPLETED)
    try:
        yield simulator.result() or "" if simulator.done() else listening.result()
    finally:
        simulator.cancel()
        with suppress(asyncio.CancelledError):
            await simulator


# Round figures, so that times can be computed by hand.
PLAIN = Scenario(
    max_model_len=1000,
    arrival_rate=20.0,
    input_tokens=TokenLengths(median=100, sigma=0.8, min=1, max=700),
    output_tokens=TokenLengths(median=20, sigma=0.8, min=1, max=200),
    prefill=Prefill(tokens_per_s=1000.0, floor_s=0.05),
    decode=Decode(base_s=0.01, per_running_s=0.001),
    max_num_seqs=8,
    max_num_batched_tokens=400,
    kv_cache=KvCache(blocks=100, block_tokens=10),
    abort_ratio=0.2,
)


def engine_request(
    prompt_tokens: int = 100,
    output_tokens: int = 5,
    *,
    arrived_s: float = 0.0,
    max_tokens: int = 200,
    leaves_after_tokens: int | None = None,
) -> EngineRequest:
    """A request of which only its lengths matter."""
    return EngineRequest(
        request_id="chatcmpl-test",
        arrived_s=arrived_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        max_tokens=max_tokens,
        leaves_after_tokens=leaves_after_tokens,
    )


def numbered_requests(scenario: Scenario) -> Iterator[EngineRequest]:
    """The planned requests of a scenario, with ids that can be compared between runs."""
    numbers = count()
    return planned_requests(scenario, lambda: f"chatcmpl-{next(numbers)}")


def steps(batch: Batch, until_s: float = 1e9) -> Iterator[Step]:
    """All steps that start by `until_s`, or until nothing is left to do."""
    while (start_s := batch.next_start_s()) <= until_s:
        yield batch.end(batch.begin(start_s))


def finished(run: Iterable[Step]) -> list[Finished]:
    """The requests that finished in a run, in their order."""
    return [done for step in run for done in step.finished]


def families(exposition: str) -> list[Metric]:
    """All metric families."""
    return list(text_string_to_metric_families(exposition))


def totals(exposition: str) -> Mapping[str, float]:
    """The sum of each series over its labels; 0 for a missing series."""
    sums: defaultdict[str, float] = defaultdict(float)
    for family in families(exposition):
        for sample in family.samples:
            sums[sample.name] += sample.value
    return sums


def labelled(exposition: str, name: str, label: str) -> dict[str, float]:
    """The values of one series by one of its labels."""
    samples = (sample for family in families(exposition) for sample in family.samples)
    return {sample.labels[label]: sample.value for sample in samples if sample.name == name}
