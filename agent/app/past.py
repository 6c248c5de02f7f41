"""Stores the past of simulated engines, by the parts of a running agent and in simulated time."""

import asyncio
import logging
from base64 import b64decode
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import requests

from agent.analysis.quantiles import bin_of
from agent.app.engines import EngineSources
from agent.app.parts import build_parts
from agent.app.running import Agent
from agent.catalog import gpu_facts
from agent.catalog.failure_lines import LineMeaning
from agent.catalog.reasons import FetchFailed
from agent.errors import EngineUnreachable
from agent.http_client import http_session
from agent.records.engine import (
    EndedRequest,
    EngineProcess,
    EngineSample,
    EngineStep,
    HostSample,
    LogFinding,
    LogSample,
    ProcessRole,
)
from agent.records.gpu import FactKey, GpuSample, GpuSamples
from agent.records.request import ProxyView, RequestRecord, Status, Vantage
from agent.settings import EngineSettings, Settings
from agent.simulator.past_engine import Frame, ProxiedRequest
from agent.sources.engines.engine_source import EngineSource
from agent.sources.otlp.payload import Body
from agent.store.sqlite_connection import without_disk_waits

_LOG = logging.getLogger(__name__)
_TIMEOUT_S = 2.0


class SimulatedGpus:
    """Reads the GPU of each simulator at its URL; one that does not answer has no sample."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        self._session = http_session()

    def read(self, now: float) -> GpuSamples:
        """Read all GPUs once; `now` is Unix time."""
        samples: list[GpuSample] = []
        for index, url in enumerate(self._urls):
            try:
                response = self._session.get(f"{url}/simulator/gpu", timeout=_TIMEOUT_S)
                samples.append(gpu_sample(response.json(), index, now))
            except (requests.RequestException, ValueError) as error:
                _LOG.debug("the simulator at %s gives no GPU: %s", url, error)
        return GpuSamples(tuple(samples))

    def close(self) -> None:
        """Close its connections."""
        self._session.close()


def gpu_sample(figures: Mapping[str, Any], index: int, at: float) -> GpuSample:
    """The sample of a simulated GPU."""
    ratios = {
        gpu_facts.UTILIZATION: "busy",
        gpu_facts.GRAPHICS_ACTIVE: "busy",
        gpu_facts.SM_ACTIVE: "busy",
        gpu_facts.TENSOR_ACTIVE: "tensor",
        gpu_facts.DRAM_ACTIVE: "dram",
        gpu_facts.MEMORY_TOTAL: "memory_bytes",
        gpu_facts.MEMORY_USED: "memory_used_bytes",
        gpu_facts.POWER: "watts",
        gpu_facts.POWER_LIMIT: "limit_watts",
        gpu_facts.ENERGY: "joules",
    }
    facts: dict[FactKey, float] = {(fact.name, ()): figures[key] for fact, key in ratios.items()}
    facts |= {
        (gpu_facts.UP.name, ()): 1.0,
        (gpu_facts.MEMORY_FREE.name, ()): figures["memory_bytes"] - figures["memory_used_bytes"],
        (gpu_facts.TEMPERATURE.name, ("gpu",)): figures["celsius"],
        (gpu_facts.CLOCK.name, ("sm",)): figures["clock_hertz"],
        (gpu_facts.CLOCK_MAX.name, ("sm",)): figures["clock_max_hertz"],
        (gpu_facts.THROTTLED_TIME.name, ("hw_thermal",)): figures["throttled_s"],
    }
    return GpuSample(gpu=figures["uuid"], index=index, name=figures["name"], at=at, facts=facts)


_ROUTE = "/v1/chat/completions"
# The way from the engine through the proxy to the client.
_WAY_S = 0.0015
ACCEPT_EVERY_S = 60.0
_BYTES_PER_TOKEN = 4
_CHUNK_BYTES = 250
_OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory (simulated)"


class PastMoment:
    """The frames of one moment by engine, which all sources read."""

    def __init__(self) -> None:
        self.at = 0.0
        self.frames: Mapping[str, Frame] = {}

    def now(self) -> float:
        """Its Unix time."""
        return self.at

    def read(self, now: float) -> GpuSamples:
        """The GPUs of all engines."""
        figures = [frame.gpu for _, frame in sorted(self.frames.items())]
        return GpuSamples(tuple(gpu_sample(each, i, now) for i, each in enumerate(figures)))

    def close(self) -> None:
        """Nothing is held."""


def _past_sources(
    moment: PastMoment, engine: EngineSettings, before: EngineSample | None
) -> EngineSources:
    name = engine.name

    def exposition(_path: str) -> bytes:
        text = moment.frames[name].exposition
        if text is None:
            raise EngineUnreachable(FetchFailed.CONNECTION, f"{name} does not answer")
        return text.encode()

    def health() -> int | None:
        return None if moment.frames[name].exposition is None else requests.codes.ok

    source = EngineSource(name=name, url=engine.url, before=before, read_path=exposition)
    return EngineSources(
        read_engine=source.read,
        read_health=health,
        read_host=lambda now: _host(moment.frames[name], now),
        monotonic=moment.now,
    )


def _host(frame: Frame, at: float) -> HostSample:
    """A machine whose engine has a process while it lives, and logs why it dies."""
    if frame.exposition is None:
        died = LogFinding(meaning=LineMeaning.CUDA_OOM, line=_OUT_OF_MEMORY)
        return HostSample(at=at, processes=(), log=LogSample(lines=1, findings=(died,)))
    core = EngineProcess(
        pid=1, started_after_boot_s=0.0, role=ProcessRole.CORE, name="simulated", state="S", cpu_s=0
    )
    return HostSample(at=at, processes=(core,), log=LogSample())


class PastAgent:
    """The parts of an agent, without listeners and jobs: its caller gives it each moment."""

    def __init__(self, settings: Settings) -> None:
        self._moment = PastMoment()
        self._waiting: list[tuple[str, Frame]] = []
        self._accepted_at = 0.0
        # The agent that runs next publishes the file.
        storage = settings.storage.model_copy(update={"publish_to": None})
        self._parts = build_parts(
            settings.model_copy(update={"storage": storage}),
            simulated=True,
            now=self._moment.now,
            gpus=self._moment,
            sources=partial(_past_sources, self._moment),
        )
        # What a power cut takes can be simulated again.
        without_disk_waits(self._parts.base.store.database)

    def newest_at(self, since: float) -> float:
        """When an earlier run stored its last sample; `since` without a later one."""
        samples = [monitor.before for monitor in self._parts.engines.monitors]
        return max([since, *(sample.at for sample in samples if sample is not None)])

    async def take(self, frames: Mapping[str, Frame]) -> None:
        """Store the samples and spans of one moment."""
        self._moment.frames = {**self._moment.frames, **frames}
        self._moment.at = now = max(frame.at for frame in frames.values())
        self._parts.engines.gpus.poll(now)
        for monitor in self._parts.engines.monitors:
            monitor.poll(now)
        self._parts.engines.gpus.store(now)
        self._report_steps(frames)
        self._parts.engines.missed.run(now)
        self._waiting += frames.items()
        if now >= self._accepted_at + ACCEPT_EVERY_S:
            await self._accept(now)

    def _report_steps(self, frames: Mapping[str, Frame]) -> None:
        """Hand over what the engines' plugins report."""
        missed = self._parts.engines.missed
        for engine, frame in frames.items():
            for times, *figures in frame.steps:
                last = EngineStep(engine, *figures)
                for step in reversed(range(times)):
                    ended_at = last.ended_at - step * (last.duration_s or 0.0)
                    missed.on_step(last._replace(ended_at=ended_at))
            for ended in frame.ended:
                missed.on_ended(EndedRequest(engine, *ended))

    async def _accept(self, now: float) -> None:
        """Store the requests that ended, explain those that missed, and settle the others."""
        waiting, self._waiting, self._accepted_at = self._waiting, [], now
        bodies = [Body(b64decode(frame.spans)) for _, frame in waiting if frame.spans is not None]
        # What waits together is stored by one commit.
        await asyncio.gather(*map(self._parts.requests.receiver.take, bodies))
        records = [
            self._record(engine, each) for engine, frame in waiting for each in frame.proxied
        ]
        await self._parts.requests.pipeline.accept(records)
        self._parts.requests.pipeline.settle(now)
        self._parts.engines.missed.run(now)

    async def finish(self) -> None:
        """Store the last requests, and close; the agent that runs next computes the minutes."""
        await self._accept(self._moment.at)
        await Agent(self._parts).stop()

    def _record(self, engine: str, seen: ProxiedRequest) -> RequestRecord:
        ended_at, first_s = seen.ended_at, seen.first_s
        later = seen.output_tokens - 1
        return RequestRecord(
            trace_id=seen.trace_id,
            span_id=seen.span_id,
            vantage=Vantage.PROXY,
            status=_status(seen),
            started_at=seen.started_at,
            ended_at=ended_at,
            received_at=ended_at,
            request_id=seen.request_id,
            agent=self._parts.base.settings.name,
            engine=engine,
            model=self._parts.base.directory.model_of(engine),
            tenant=seen.tenant,
            route=_ROUTE,
            ttft_s=None if first_s is None else first_s + _WAY_S,
            tpot_s=None if first_s is None or later < 1 else (seen.ended_s - first_s) / later,
            e2e_s=seen.ended_s + _WAY_S,
            max_gap_s=max((wait_s for wait_s, _ in seen.waits), default=None),
            input_tokens=seen.input_tokens,
            cached_tokens=seen.cached_tokens,
            output_tokens=seen.output_tokens,
            finish_reason=seen.finish_reason,
            http_status=500 if first_s is None else 200,
            proxied=_view(seen),
        )


def _status(seen: ProxiedRequest) -> Status:
    return Status.ERROR if seen.first_s is None else Status.OK


def _view(seen: ProxiedRequest) -> ProxyView:
    gaps: Counter[int] = Counter()
    for wait_s, count in seen.waits:
        gaps[bin_of(wait_s)] += count
    first_s = None if seen.first_s is None else seen.first_s + _WAY_S
    return ProxyView(
        first_byte_s=first_s,
        first_visible_s=first_s,
        gaps=dict(gaps) or None,
        gap_tokens=1 if gaps else None,
        input_bytes=_BYTES_PER_TOKEN * seen.input_tokens,
        output_bytes=_CHUNK_BYTES * seen.output_tokens,
        error="http_500" if seen.first_s is None else None,
        streamed=True,
        response_id=f"chatcmpl-{seen.request_id}",
    )
