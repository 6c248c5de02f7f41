"""What the running agent charges, and its ledger, before an engine of known steps."""

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import fsum
from pathlib import Path
from typing import Any, cast

import pytest
import requests
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from agent.app import engines
from agent.app.jobs import Jobs
from agent.app.parts import build_parts
from agent.app.running import Agent
from agent.catalog import engine_facts as fact
from agent.catalog.engine_facts import REQUESTS_RUNNING
from agent.records.engine import EngineSample
from agent.settings import Settings
from agent.sources.engines.engine_source import EngineSource
from tests.analysis.cost.stepped_engine import H100, Job, Machine, SteppedEngine
from tests.analysis.cost.test_minute_cost import unseen_beside_cached
from tests.real_parts.agent_process import AgentApi, AgentPorts
from tests.real_parts.metric_pages import total
from tests.real_parts.span_sender import SpanSender
from tests.real_parts.waiting import eventually
from tests.simulated import WITHIN_S
from tests.sources.engines.wire import EngineServer
from tests.sources.model_config.published import PUBLISHED
from tests.store.making import NOON

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


# Buckets of other histograms say nothing here, and the agent reads them at each poll.
_LEFT_OUT = re.compile(r"(?!vllm:time_to_first_token_seconds)\S+_bucket[{]")


@cache
def _lines() -> list[str]:
    lines = _PAGE.read_text().split("\n")
    return [line for line in lines if not _LEFT_OUT.match(line)]


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


# A GPU-second costs a dollar.
A_DOLLAR_A_SECOND = 3600.0
# Until the first and the second minute are computed.
FIRST_COMPUTED_S, SECOND_COMPUTED_S = 121.0, 181.0


class SimulatedTime:
    """The agent's clock and scheduler: each job runs when its time has come, and no time passes."""

    def __init__(self) -> None:
        self.at = float(NOON)
        self._jobs: list[tuple[float, Callable[[float], object]]] = []
        self._due: list[float] = []

    def now(self) -> float:
        return self.at

    def every(
        self,
        interval_s: float,
        _name: str,
        job: Callable[[float], object],
        *,
        first_in_s: float | None = None,
    ) -> None:
        """As `Jobs.every`, with all polls at multiples of their interval."""
        self._jobs.append((interval_s, job))
        self._due.append(self.at if first_in_s == 0 else self.at + interval_s)

    def start(self) -> None:
        """Run nothing yet."""

    async def stop(self) -> None:
        """Nothing runs."""

    def late_s(self) -> dict[str, float]:
        """Each job runs when it is due."""
        return {}

    def next_due(self) -> float:
        """When the next job is due."""
        return min(self._due)

    def run_next(self) -> None:
        """Run the job that is due next."""
        self.at = self.next_due()
        place = self._due.index(self.at)
        interval_s, job = self._jobs[place]
        self._due[place] += interval_s
        job(self.at)


class Watched:
    """An agent that watches the engine over its wire, with all its jobs, in simulated time."""

    def __init__(
        self, folder: Path, served: SteppedEngine, *, model: bool, every_s: float, until_s: float
    ) -> None:
        self._folder = folder
        self._served = served
        self._model = model
        self._every_s = every_s
        self._until_s = until_s
        self._time = SimulatedTime()
        self._ports = AgentPorts.free()
        self._api = AgentApi(f"http://127.0.0.1:{self._ports.listen}")

    def costs(self, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, float], dict[str, Any]]:
        """Return what each request is charged, by its id, and the summary's cost."""
        seen = self.watch(monkeypatch)
        return {row["trace_id"]: row["cost_usd"] for row in seen.rows}, seen.summary["cost"]

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> "Seen":
        """Return what the agent says when all is over."""
        # However busy the machine is, no sample is missing.
        patient = partial(EngineSource, timeout_s=WITHIN_S)
        monkeypatch.setattr(engines, "EngineSource", patient)
        with EngineServer() as engine:
            return asyncio.run(self._watch(engine))

    def _settings(self, url: str) -> Settings:
        config = self._folder / "config.json"
        config.write_text(json.dumps(PUBLISHED["llama-3.1-8b"]["config"]))
        known = {"model_config": str(config), "peak_tflops": 989.4, "bandwidth_gb_per_s": 3350}
        return Settings.model_validate(
            {
                "name": "agent-0",
                "engines": [
                    {
                        "name": "chat",
                        "url": url,
                        "gpus": [0],
                        "gpu_hour_usd": A_DOLLAR_A_SECOND,
                        "scrape_interval": f"{self._every_s}s",
                        **(known if self._model else {}),
                    }
                ],
                "nvml": {"enabled": False},
                "listen": {"host": "127.0.0.1", "port": self._ports.listen},
                "otlp": {
                    "grpc": f"127.0.0.1:{self._ports.grpc}",
                    "http": f"127.0.0.1:{self._ports.http}",
                },
                "storage": {"file": str(self._folder / "goodput.db")},
            }
        )

    async def _watch(self, engine: EngineServer) -> "Seen":
        self._show(engine, 0.0)
        parts = build_parts(self._settings(engine.url), simulated=False, now=self._time.now)
        agent = Agent(replace(parts, jobs=cast(Jobs, self._time)))
        await agent.start()
        try:
            await asyncio.to_thread(self._run, engine)
            return await asyncio.to_thread(self._read)
        finally:
            await agent.stop()

    def _run(self, engine: EngineServer) -> None:
        """Jobs in the order of their times; spans are sent when their requests have ended."""
        eventually(self._store_is_open, within_s=WITHIN_S, what="an open store")
        sender, waiting = SpanSender(self._ports.grpc), sorted(self._served.ended, key=_ended)
        while self._time.next_due() < NOON + self._until_s:
            passed = self._time.next_due() - NOON
            ended = [job for job in waiting if job.ended_at <= passed]
            if ended:
                spans = [span(job, NOON) for job in ended if job.has_row]
                send = partial(sender.export, spans)
                eventually(send, within_s=WITHIN_S, what="an acknowledged export")
                waiting = waiting[len(ended) :]
            self._show(engine, passed)
            self._time.run_next()

    def _store_is_open(self) -> bool:
        return requests.get(self._api.url + "/api/v1/requests", timeout=WITHIN_S).ok

    def _show(self, engine: EngineServer, passed: float) -> None:
        """The engine's page after so many seconds."""
        newest = [sample for sample in self._served.samples if sample.at <= passed][-1]
        engine.answers("/metrics", exposition(newest))

    def _read(self) -> "Seen":
        summary = self._api.summary(window="10m")
        return Seen(self._api.requests(), summary, self._api.exposition())


@dataclass(frozen=True, slots=True)
class Seen:
    """The rows of an agent, its summary and its exposition."""

    rows: list[dict[str, Any]]
    summary: dict[str, Any]
    exposition: str


def _ended(job: Job) -> float:
    return job.ended_at


def group(first: int, count: int, at: float, prompt: int, output: int) -> list[Job]:
    return [
        Job(number=number, at=at, prompt=prompt, output=output)
        for number in range(first, first + count)
    ]


def test_a_lone_stream_pays_its_50_seconds_and_a_burst_after_it_its_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work of a pooled minute charges them 17.5 and 33.5 GPU-seconds."""
    lone, burst = group(1, 1, 2.0, 100, 10_600), group(2, 100, 54.0, 350, 90)
    served = SteppedEngine(H100, [*lone, *burst], every_s=1.0).run(FIRST_COMPUTED_S)
    assert true_s(lone) == pytest.approx(50, abs=0.5)
    assert true_s(burst) == pytest.approx(1, abs=0.1)
    watched = Watched(tmp_path, served, model=True, every_s=1.0, until_s=FIRST_COMPUTED_S)
    charged, cost = watched.costs(monkeypatch)
    assert charged_s(charged, lone) == pytest.approx(true_s(lone), rel=0.02)
    assert charged_s(charged, burst) == pytest.approx(true_s(burst), rel=0.02)
    of_requests = fsum(charged.values())
    rest = cost["idle_usd"] + cost["unknown_usd"] + cost["unseen_usd"]
    assert of_requests + rest == pytest.approx(cost["bill_usd"], rel=1e-9)


def test_a_request_that_begins_while_a_minute_s_last_sample_is_read_leaves_the_minute_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = group(1, 1, 60.002, 100, 4)
    served = SteppedEngine(H100, short, late_s=0.02).run(SECOND_COMPUTED_S)
    watched = Watched(tmp_path, served, model=True, every_s=5.0, until_s=FIRST_COMPUTED_S)
    charged, cost = watched.costs(monkeypatch)
    assert list(charged.values()) == [None], "its minute is not computed"
    assert cost["idle_usd"] == cost["bill_usd"] == 60.0


def test_a_request_that_begins_while_a_minute_s_last_sample_is_read_pays_only_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sample is stamped before, so that the idle 5 s before it seem busy."""
    short = group(1, 1, 60.002, 100, 4)
    served = SteppedEngine(H100, short, late_s=0.02).run(SECOND_COMPUTED_S)
    assert served.samples[12].fact(REQUESTS_RUNNING.name) == 1
    watched = Watched(tmp_path, served, model=False, every_s=5.0, until_s=SECOND_COMPUTED_S)
    charged, cost = watched.costs(monkeypatch)
    assert charged_s(charged, short) == pytest.approx(true_s(short))
    assert cost["unseen_usd"] == 0
    assert cost["idle_usd"] == pytest.approx(cost["bill_usd"] - true_s(short))


def test_unseen_prompts_beside_cached_ones_cost_what_they_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine counts their first tokens, which take no steps of their own."""
    served, gone = unseen_beside_cached()
    watched = Watched(tmp_path, served, model=True, every_s=5.0, until_s=FIRST_COMPUTED_S)
    _, cost = watched.costs(monkeypatch)
    assert true_s(gone) < cost["unseen_usd"] < 1.5 * true_s(gone)


def true_s(jobs: Sequence[Job]) -> float:
    return fsum(job.gpu_s for job in jobs)


def charged_s(charged: dict[str, float], jobs: Sequence[Job]) -> float:
    return fsum(charged[job.key[0]] for job in jobs)


# The ledger

# A request of 100 tokens takes 5 s.
SLOW = Machine(flops_per_s=989.4e12, bytes_per_s=3.35e12, overhead_s=0.05)
LEDGER_COMPUTED_S = 241.0


def left_and_lost() -> SteppedEngine:
    """Five streams are left at 602 prompt tokens (vllm#55634); another one spans two minutes."""
    left = [
        Job(number=n, at=10.0 * n, prompt=602, output=800, leaves_at=20, has_row=False)
        for n in range(1, 6)
    ]
    lost = Job(number=6, at=70.0, prompt=50, output=30, has_row=False)
    stream = Job(number=7, at=5.0, prompt=1000, output=1500)
    others = [Job(number=n, at=4.0 * n, prompt=200, output=50) for n in range(8, 28)]
    engine = SteppedEngine(SLOW, [*left, lost, stream, *others], every_s=5.0).run(LEDGER_COMPUTED_S)
    assert 75 < stream.ended_at < 115
    return engine


def test_what_vanishes_is_on_the_api_and_on_metrics_and_a_long_stream_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = left_and_lost()
    watched = Watched(tmp_path, engine, model=False, every_s=5.0, until_s=LEDGER_COMPUTED_S)
    seen = watched.watch(monkeypatch)
    ledger = seen.summary["ledger"]
    assert ledger["counted"] == {
        "input_tokens": sum(job.prompt for job in engine.ended),
        "output_tokens": sum(job.generated for job in engine.ended),
        "requests": len(engine.ended),
    }
    vanished = {"input_tokens": 5 * 602 + 50, "output_tokens": 5 * 20 + 30, "requests": 6}
    assert ledger["unaccounted"] == pytest.approx(vanished, abs=1e-6)
    by_reason = {"aborted": 5, "finished": 1, "died": 0, "refused": 0}
    assert ledger["unaccounted_requests"] == pytest.approx(by_reason, abs=1e-6)
    assert ledger["open"] == pytest.approx(dict.fromkeys(ledger["open"], 0.0), abs=1e-6)
    assert 0 < ledger["unaccounted_usd"] == seen.summary["cost"]["unseen_usd"]
    assert_published(seen.exposition, ledger)


def assert_published(exposition: str, ledger: dict[str, Any]) -> None:
    """The counters are the figures of the API; they never go down, so that some come later."""
    expected = {**ledger["unaccounted"], "cost_usd": ledger["unaccounted_usd"]}
    published = {name: total(exposition, f"llm_unaccounted_{name}_total") for name in expected}
    assert published == pytest.approx(expected, rel=0.02)
    for reason, count in ledger["unaccounted_requests"].items():
        counted = total(exposition, "llm_unaccounted_requests_total", reason=reason)
        assert counted == pytest.approx(count, abs=1e-6)
    assert total(exposition, "llm_rows_without_tokens_total") == 0
