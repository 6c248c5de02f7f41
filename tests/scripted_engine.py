"""An engine whose every step is known, as a running agent sees it: expositions and spans."""

import re
from functools import cache
from pathlib import Path

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from agent.catalog import engine_facts as fact
from agent.records.engine import EngineSample
from tests.analysis.cost.stepped_engine import Job

# A page of a real vLLM, whose values are replaced.
_PAGE = Path(__file__).parent / "sources/engines/pages/vllm-0.32.0.txt"


def exposition(sample: EngineSample) -> bytes:
    """The real engine's page with the numbers of a sample."""
    prompts = sample.fact(fact.INPUT_TOKENS.name) or 0.0
    cached = sample.fact(fact.CACHED_INPUT_TOKENS.name) or 0.0
    # The real engine had 15 requests.
    first = 15.0 + (sample.fact(fact.FIRST_TOKENS) or 0.0)
    finished = sample.facts.get((fact.REQUESTS_FINISHED.name, ("stop",)), 0.0)
    values = {
        "vllm:num_requests_running{": sample.fact(fact.REQUESTS_RUNNING.name) or 0.0,
        "vllm:num_requests_waiting{": sample.fact(fact.REQUESTS_WAITING.name) or 0.0,
        "vllm:iteration_tokens_total_count{": sample.fact(fact.STEPS.name) or 0.0,
        "vllm:prompt_tokens_total{": prompts,
        "vllm:prompt_tokens_cached_total{": cached,
        "vllm:generation_tokens_total{": sample.fact(fact.OUTPUT_TOKENS.name) or 0.0,
        'vllm:prompt_tokens_by_source_total{.*source="local_compute"': prompts - cached,
        'vllm:prompt_tokens_by_source_total{.*source="local_cache_hit"': cached,
        "vllm:prefix_cache_hits_total{": cached,
        'vllm:time_to_first_token_seconds_bucket{.*le="[+]Inf"': first,
        "vllm:time_to_first_token_seconds_count{": first,
        'vllm:request_success_total{.*finished_reason="stop"': finished,
    }
    lines = _lines().copy()
    for series, value in values.items():
        place = _place(series)
        lines[place] = f"{lines[place].rpartition(' ')[0]} {value}"
    return "\n".join(lines).encode()


@cache
def _lines() -> list[str]:
    return _PAGE.read_text().split("\n")


@cache
def _place(series: str) -> int:
    """The place of the page's only line with this beginning."""
    line = re.compile(rf"{series.replace('{', '[{]')}.*[}}] \S+")
    (place,) = [place for place, text in enumerate(_lines()) if line.fullmatch(text)]
    return place


def span(job: Job, start: float) -> Span:
    """The span that vLLM 0.32 sends of a request; the engine began at the Unix time `start`."""
    seconds = {
        "gen_ai.latency.time_to_first_token": job.first_at - job.at,
        "gen_ai.latency.e2e": job.ended_at - job.at,
        "gen_ai.latency.time_in_queue": job.begun_at - job.at,
        "gen_ai.latency.time_in_model_prefill": job.first_at - job.begun_at,
        "gen_ai.latency.time_in_model_decode": job.ended_at - job.first_at,
        "gen_ai.latency.time_in_model_inference": job.ended_at - job.begun_at,
    }
    counts = {
        "gen_ai.usage.prompt_tokens": job.prompt,
        "gen_ai.usage.cached_tokens": job.cached,
        "gen_ai.usage.completion_tokens": job.generated,
    }
    trace_id, span_id = job.key
    return Span(
        trace_id=bytes.fromhex(trace_id),
        span_id=bytes.fromhex(span_id),
        name="llm_request",
        kind=Span.SPAN_KIND_SERVER,
        start_time_unix_nano=int((start + job.at) * 1e9),
        end_time_unix_nano=int((start + job.ended_at) * 1e9),
        attributes=[
            KeyValue(key="gen_ai.request.id", value=AnyValue(string_value=f"r-{job.number}")),
            *(KeyValue(key=key, value=AnyValue(double_value=v)) for key, v in seconds.items()),
            *(KeyValue(key=key, value=AnyValue(int_value=v)) for key, v in counts.items()),
        ],
    )
