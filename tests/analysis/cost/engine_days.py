"""Makers of engine samples, requests and minutes; times are seconds from 0."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from agent.analysis.cost.minute_cost import minute_cost
from agent.analysis.cost.weights import Method
from agent.analysis.efficiency.engine_observation import EngineObservation, observe
from agent.analysis.efficiency.minute_efficiency import MinuteEfficiency, minute_efficiency
from agent.analysis.efficiency.request_activity import TimeRange
from agent.analysis.efficiency.window_efficiency import WindowEfficiency, window_efficiency
from agent.analysis.efficiency.work import RequestWorks, Serving, whole_works
from agent.catalog import engine_facts as fact
from agent.catalog.hardware import find_gpu
from agent.catalog.metric import Metric
from agent.records.engine import EngineSample
from agent.records.gpu import GpuSample
from agent.records.minute import Cost, EngineWork, MinuteRow
from agent.records.model import Work
from agent.records.request import RequestRecord
from tests.records.columns import active
from tests.records.making import record
from tests.sources.model_config.published import published

MINUTE = TimeRange(0.0, 60.0)
MAX_GAP_S = 15.0

COUNTS = {
    "running": fact.REQUESTS_RUNNING,
    "waiting": fact.REQUESTS_WAITING,
    "steps": fact.STEPS,
    "input": fact.INPUT_TOKENS,
    "cached": fact.CACHED_INPUT_TOKENS,
    "output": fact.OUTPUT_TOKENS,
    "preemptions": fact.PREEMPTIONS,
    "drafts": fact.SPEC_DECODE_DRAFT_TOKENS,
    "accepted": fact.SPEC_DECODE_ACCEPTED_TOKENS,
    "flops": fact.ESTIMATED_GPU_FLOPS,
    "read": fact.ESTIMATED_GPU_READ_BYTES,
    "written": fact.ESTIMATED_GPU_WRITE_BYTES,
    "kv": fact.KV_CACHE_USAGE,
    "ranks": fact.DATA_PARALLEL_RANKS,
    "prefix_hits": fact.PREFIX_CACHE_HIT_TOKENS,
    "prefix_queries": fact.PREFIX_CACHE_QUERY_TOKENS,
    "draft_runs": fact.SPEC_DECODE_DRAFTS,
    "scrape": fact.SCRAPE_DURATION,
    "places": fact.MAX_RUNNING_REQUESTS,
    "step_tokens": fact.STEP_TOKENS,
    "step_budget": fact.MAX_STEP_TOKENS,
}

LLAMA_ON_H100 = Serving(model=published("llama-3.1-8b"), gpu=find_gpu("H100-SXM"))
UNKNOWN = Serving()


def engine_sample(at: float, started: float | None = None, /, **counts: float) -> EngineSample:
    """A sample of the engine with these counts; other facts are unknown."""
    more: dict[tuple[str, tuple[str, ...]], float] = {}
    if "first" in counts:
        more[fact.FIRST_TOKENS, ()] = counts.pop("first")
    if "finished" in counts:
        more[key(fact.REQUESTS_FINISHED, "stop")] = counts.pop("finished")
    return EngineSample(
        engine="chat-0",
        at=at,
        dialect="vllm",
        model="llama",
        facts={key(COUNTS[name]): value for name, value in counts.items()} | more,
        process_started_at=started,
    )


def key(metric: Metric, *labels: str) -> tuple[str, tuple[str, ...]]:
    """The key of a fact in a sample."""
    return metric.name, labels


def request(number: int, started_at: float, /, **given: Any) -> RequestRecord:
    """A request without a queue: 100 tokens in 1 s of prefill, 21 tokens out, 20 of them in 4 s."""
    facts: dict[str, Any] = {
        "queue_s": 0.0,
        "prefill_s": 1.0,
        "decode_s": 4.0,
        "ttft_s": 1.0,
        "e2e_s": 5.0,
        "input_tokens": 100,
        "cached_tokens": 0,
        "output_tokens": 21,
    }
    return record(number, started_at=started_at, ended_at=started_at + 5.0, **(facts | given))


def observation(samples: Sequence[EngineSample], window: TimeRange = MINUTE) -> EngineObservation:
    """The minute as observed from these samples."""
    return observe(samples, window, max_gap_s=MAX_GAP_S)


def works_of(
    observed: EngineObservation, rows: Sequence[RequestRecord], serving: Serving
) -> RequestWorks:
    """The whole work of requests, as a minute is computed from it."""
    return whole_works(active(rows, observed.increase.cached_share), serving)


@dataclass(frozen=True, kw_only=True)
class SplitMinute:
    """The cost of a minute, and the part of each request by its ids."""

    cost: Cost
    requests: Mapping[tuple[str, str], float]
    method: Method

    def times(self, factor: float) -> "SplitMinute":
        """The same parts of another bill."""
        requests = {key: part * factor for key, part in self.requests.items()}
        return SplitMinute(cost=self.cost.times(factor), requests=requests, method=self.method)


def split_minute(
    observed: EngineObservation, rows: Sequence[RequestRecord], serving: Serving
) -> SplitMinute:
    """Who pays for a bill of 1."""
    found = minute_cost(observed, works_of(observed, rows, serving), serving)
    parts: defaultdict[tuple[str, str], float] = defaultdict(float)
    for place, part in zip(found.rows.tolist(), found.parts.tolist(), strict=True):
        parts[rows[place].trace_id, rows[place].span_id] += part
    return SplitMinute(cost=found.cost, requests=dict(parts), method=found.method)


def cost(
    samples: Sequence[EngineSample],
    rows: Sequence[RequestRecord] = (),
    window: TimeRange = MINUTE,
    serving: Serving = UNKNOWN,
) -> SplitMinute:
    """The cost of the minute at a dollar a second."""
    return split_minute(observation(samples, window), rows, serving).times(window.length_s)


def efficiency_in(
    observed: EngineObservation,
    rows: Sequence[RequestRecord],
    serving: Serving,
    gpu_samples: Sequence[GpuSample] = (),
) -> MinuteEfficiency:
    """The efficiency of the minute."""
    works = works_of(observed, rows, serving)
    return minute_efficiency(observed, works, serving, gpu_samples)


def work(
    samples: Sequence[EngineSample], rows: Sequence[RequestRecord] = (), window: TimeRange = MINUTE
) -> EngineWork:
    """What the engine did in the minute."""
    return efficiency_in(observation(samples, window), rows, UNKNOWN).work


def needed(work: EngineWork) -> Work:
    """What the requests needed in both phases."""
    assert work.needed is not None
    return work.needed


def minute_row(
    samples: Sequence[EngineSample],
    rows: Sequence[RequestRecord] = (),
    serving: Serving = UNKNOWN,
    time: TimeRange = MINUTE,
    **known: Any,
) -> MinuteRow:
    """The computed minute at a dollar a second; `known` replaces fields."""
    found = efficiency_in(observation(samples, time), rows, serving)
    split = cost(samples, rows, time, serving)
    row = MinuteRow(
        engine="chat-0",
        model="llama",
        starts_at=int(time.from_at),
        from_at=time.from_at,
        until=time.until,
        gpus=1,
        requests=len(rows),
        good_tokens=0.0,
        method=split.method.value,
        work=found.work,
        cost=split.cost,
        steps=found.steps,
        peak_flops_per_s=serving.peak_flops_per_s,
        peak_bytes_per_s=serving.bandwidth_bytes_per_s,
        engine_mfu=found.engine.mfu,
        engine_mbu=found.engine.mbu,
        hardware_mfu=found.hardware.mfu,
        hardware_mbu=found.hardware.mbu,
        gpus_usd=time.length_s,
        disagreements=tuple(asdict(each) for each in found.disagreements),
    )
    return replace(row, **known)


def window_of(*minutes: MinuteRow) -> WindowEfficiency:
    """The efficiency of these minutes."""
    found = window_efficiency(minutes)
    assert found is not None
    return found


def whole(found: SplitMinute) -> float:
    """The sum of all parts."""
    parts = (found.cost.idle, found.cost.unknown, found.cost.unseen, *found.requests.values())
    return sum(parts)


def samples_of(
    *rows: RequestRecord, every_s: float = 5.0, until: float = 60.0
) -> list[EngineSample]:
    """Samples of an engine that served these requests; tokens come evenly."""
    return [_sample_of(rows, every_s * step) for step in range(int(until / every_s) + 1)]


def _sample_of(rows: Sequence[RequestRecord], at: float) -> EngineSample:
    counts = dict.fromkeys(("running", "input", "cached", "output"), 0.0)
    for row in rows:
        begun = row.started_at + (row.queue_s or 0.0)
        first = begun + (row.prefill_s or 0.0)
        counts["running"] += begun < at < row.ended_at
        if at >= first:
            decoded = min((at - first) / max(row.ended_at - first, 1e-9), 1.0)
            counts["input"] += row.input_tokens or 0
            counts["cached"] += row.cached_tokens or 0
            counts["output"] += 1 + ((row.output_tokens or 1) - 1) * decoded
    return engine_sample(at, **counts)


def busy_samples(**ends: float) -> list[EngineSample]:
    """A minute in which requests ran at every sample; counters grow to the given values."""
    return [
        engine_sample(at, running=1.0, **{name: end * at / 60 for name, end in ends.items()})
        for at in (5.0 * step for step in range(13))
    ]
