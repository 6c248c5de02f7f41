"""A simulated engine's past: its steps without a clock, in frames that a demo stores.

The engine goes on in real time from its end, with the same batch and the same counters.
"""

import asyncio
import json
import math
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields, replace
from typing import Any
from uuid import uuid4

from aiohttp import web
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agent.errors import SettingsInvalid
from agent.simulator.batching import Batch, EngineRequest, Finished, Step
from agent.simulator.openai_server import DRAIN_S, OpenAiRoutes, listen
from agent.simulator.plugin_sender import PluginSender, ended_record, step_record
from agent.simulator.scenario import Faults, Scenario, SimulatedGpu
from agent.simulator.simulated_engine import Clock, Engine
from agent.simulator.simulated_metrics import MetricsPage
from agent.simulator.span_sender import SpanSender, SpanTarget, provider_for, record_span
from agent.simulator.traffic import Clients, planned_requests

# Time between two frames.
FRAME_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxiedRequest:
    """One request as a proxy in front of the engine saw it; times in seconds from its arrival.

    `waits` are those for its tokens after the first: a time, and how many equal ones in a row.
    Without a first token it failed.
    """

    trace_id: str
    span_id: str
    request_id: str
    tenant: str | None
    started_at: float
    first_s: float | None
    ended_s: float
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reason: str | None
    waits: tuple[tuple[float, int], ...] = ()

    @property
    def ended_at(self) -> float:
        """When its client had all of the response, in Unix time."""
        return self.started_at + self.ended_s


_PROXIED = tuple(each.name for each in fields(ProxiedRequest))


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One moment of the past, and the requests that ended since the frame before.

    `exposition` is None while the engine is dead. `spans` is an OTLP export in base64. `steps` and
    `ended` are what the engine's plugin reports, without the engine's name: of each step, before
    the figures of `EngineStep`, how many equal ones ended with it; and `EndedRequest`.
    """

    at: float
    exposition: str | None
    gpu: Mapping[str, Any]
    spans: str | None
    proxied: tuple[ProxiedRequest, ...]
    steps: tuple[tuple[Any, ...], ...]
    ended: tuple[tuple[Any, ...], ...]

    def plain(self) -> dict[str, Any]:
        """The same as JSON takes it."""
        proxied = [{name: getattr(each, name) for name in _PROXIED} for each in self.proxied]
        whole = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**whole, "proxied": proxied}


def frame_of(plain: Mapping[str, Any]) -> Frame:
    """The frame that `plain` was made of."""
    proxied = tuple(ProxiedRequest(**each) for each in plain["proxied"])
    return Frame(**{**plain, "proxied": proxied})


# Tensor cores are busy for longer than the work at their peak takes.
_TENSOR_EFFICIENCY = 0.9
# A mean over less time says nothing.
_SHORTEST_S = 0.1
_IDLE_CELSIUS = 38.0
_HOT_CELSIUS = 74.0
_SM_HERTZ = 1.98e9
# A GPU that heat throttles.
_THROTTLED_CELSIUS = 91.0


@dataclass(frozen=True, slots=True)
class _GpuWork:
    """What all steps so far added up to."""

    at_s: float = 0.0
    flops: float = 0.0
    bytes_: float = 0.0
    busy_s: float = 0.0


class GpuFigures:
    """Adds up the work of steps; each `read` gives the figures of the time since the last one."""

    def __init__(self, gpu: SimulatedGpu, faults: Faults) -> None:
        self._gpu = gpu
        self._faults = faults
        self._now = self._read = _GpuWork()
        self._joules = self._throttled_s = 0.0
        self._figures: Mapping[str, float | str] | None = None

    def observe(self, step: Step) -> None:
        """Add one step of the engine."""
        now = self._now
        self._now = _GpuWork(
            now.at_s,
            now.flops + step.flops,
            now.bytes_ + step.read_bytes + step.written_bytes,
            now.busy_s + (step.ended_s - step.began_s) * step.times,
        )

    def read(self, at_s: float) -> Mapping[str, float | str]:
        """The GPU's figures at a time of the engine; those read before if no time has passed."""
        gpu, now, before = self._gpu, self._now, self._read
        passed_s = at_s - before.at_s
        if self._figures is not None and passed_s < _SHORTEST_S:
            return self._figures
        passed_s = max(passed_s, _SHORTEST_S)
        tensor = (now.flops - before.flops) / gpu.flops_per_s / _TENSOR_EFFICIENCY / passed_s
        dram = (now.bytes_ - before.bytes_) / gpu.bytes_per_s / passed_s
        busy = min(1.0, (now.busy_s - before.busy_s) / passed_s)
        load = min(1.0, 0.25 * busy + 0.45 * dram + 0.3 * tensor)
        watts = gpu.idle_watts + load * (gpu.limit_watts - gpu.idle_watts)
        # At both ends of this time: a fault may have begun or ended in it.
        moments = before.at_s, math.nextafter(at_s, 0.0)
        slowdown = max(self._faults.at(each).gpu_slowdown for each in moments)
        celsius = _IDLE_CELSIUS + load * (_HOT_CELSIUS - _IDLE_CELSIUS)
        self._joules += watts * passed_s
        self._throttled_s += self._faults.throttled_s(before.at_s, at_s)
        self._read = _GpuWork(at_s, now.flops, now.bytes_, now.busy_s)
        self._figures = {
            "uuid": gpu.uuid,
            "name": gpu.name,
            "memory_bytes": gpu.memory_bytes,
            "memory_used_bytes": gpu.memory_used_bytes,
            "busy": busy,
            "tensor": min(1.0, tensor),
            "dram": min(1.0, dram),
            "watts": watts,
            "limit_watts": gpu.limit_watts,
            "joules": self._joules,
            "celsius": _THROTTLED_CELSIUS if slowdown > 1 else celsius,
            "clock_hertz": _SM_HERTZ / slowdown,
            "clock_max_hertz": _SM_HERTZ,
            "throttled_s": self._throttled_s,
        }
        return self._figures


def traced(requests: Iterator[EngineRequest]) -> Iterator[EngineRequest]:
    """The requests with the headers of a proxy that traces them."""
    for request in requests:
        header = f"00-{uuid4().hex}-{uuid4().hex[:16]}-01"
        yield replace(request, trace_headers={"traceparent": header})


class PastEngine:
    """One engine before it is live, from the start of its scenario on.

    `unix_ns` converts its seconds to Unix time.
    """

    def __init__(self, scenario: Scenario, service: str, unix_ns: Callable[[float], int]) -> None:
        if scenario.gpu is None:
            raise SettingsInvalid(["scenario: gpu: an engine with a past needs one"])
        self.faults = Faults(scenario.faults)
        planned = traced(planned_requests(scenario, lambda: f"chatcmpl-{uuid4().hex}", self.faults))
        self.batch = Batch(scenario, planned, self.faults)
        self._scenario = scenario
        self._unix_ns = unix_ns
        self._gpu = GpuFigures(scenario.gpu, self.faults)
        self._spans = InMemorySpanExporter()
        provider = provider_for(service)
        provider.add_span_processor(SimpleSpanProcessor(self._spans))
        self._tracer = provider.get_tracer(__name__)
        self._proxied: list[ProxiedRequest] = []
        self._service = service
        self._steps: list[tuple[Any, ...]] = []
        self._ended: list[tuple[Any, ...]] = []
        self._dead = False
        self.start(0.0)

    def start(self, at_s: float) -> None:
        """Start at a time of its scenario: what came before never was."""
        self._page = MetricsPage(self._scenario, started_at=self._unix(at_s))
        self._at_s = at_s
        self.batch.skip_planned(at_s)

    def observe(self, step: Step) -> None:
        """Add a step to the exposition and the GPU's figures."""
        self._page.observe(step)
        self._gpu.observe(step)

    def render(self) -> bytes:
        """The exposition now."""
        return self._page.render()

    def gpu(self, at_s: float) -> Mapping[str, float | str]:
        """The GPU's figures since they were last read."""
        return self._gpu.read(at_s)

    def frames(self, until_s: float) -> Iterator[Frame]:
        """The frames after the last one, up to a time of the engine."""
        while self._at_s < until_s:
            self._run_until(min(self._at_s + FRAME_S, until_s))
            yield self._frame()

    def end(self) -> Frame:
        """The last frame: clients send the requests from now on. Open ones go on in real time."""
        self.batch.end_plan(self._at_s)
        return self._frame()

    def _run_until(self, end_s: float) -> None:
        while self._at_s < end_s:
            self._die_or_return()
            edge_s = min(end_s, self.faults.next_change_s(self._at_s))
            while not self._dead and (start_s := self.batch.next_start_s()) < edge_s:
                self._take(self.batch.run(start_s, edge_s))
            self._at_s = edge_s

    def _die_or_return(self) -> None:
        dead = self.faults.at(self._at_s).dead
        if dead and not self._dead:
            lost = self.batch.drop_all()
            self._proxied += [self._failed(request, self._at_s) for request in lost]
        if self._dead and not dead:
            self.start(self._at_s)
        self._dead = dead

    def _take(self, step: Step) -> None:
        self.observe(step)
        self._steps.append((step.times, *step_record(step, self._service, self._unix_ns)[1:]))
        self._proxied += [self._failed(request, request.arrived_s) for request in step.lost]
        for done in step.finished:
            record_span(self._tracer, done, self._unix_ns)
            self._proxied.append(self._done(done))
            self._ended.append(ended_record(done, self._service, self._unix_ns)[1:])

    def _frame(self) -> Frame:
        spans = self._spans.get_finished_spans()
        self._spans.clear()
        encoded = b64encode(encode_spans(spans).SerializeToString()).decode() if spans else None
        at = self._unix(self._at_s)
        proxied = tuple(each for each in self._proxied if each.ended_at <= at)
        self._proxied = [each for each in self._proxied if each.ended_at > at]
        steps, self._steps = tuple(self._steps), []
        ended, self._ended = tuple(self._ended), []
        return Frame(
            at=at,
            exposition=None if self._dead else self.render().decode(),
            gpu=self.gpu(self._at_s),
            spans=encoded,
            proxied=proxied,
            steps=steps,
            ended=ended,
        )

    def _unix(self, at_s: float) -> float:
        return self._unix_ns(at_s) / 1e9

    def _done(self, done: Finished) -> ProxiedRequest:
        request = done.request
        # What the client did not read yet comes as soon as it reads again.
        paused_until_s = request.arrived_s + (done.ttft_s or 0.0) + request.client_pause_s
        failed = self._failed(request, max(done.last_token_s, paused_until_s))
        return replace(
            failed,
            first_s=done.ttft_s,
            cached_tokens=request.cached_tokens,
            output_tokens=request.output_tokens,
            finish_reason=request.finish_reason,
            waits=done.waits,
        )

    def _failed(self, request: EngineRequest, ended_s: float) -> ProxiedRequest:
        _, trace_id, span_id, _ = request.trace_headers["traceparent"].split("-")
        return ProxiedRequest(
            trace_id=trace_id,
            span_id=span_id,
            request_id=request.request_id.removeprefix("chatcmpl-"),
            tenant=request.tenant,
            started_at=self._unix(request.arrived_s),
            first_s=None,
            ended_s=ended_s - request.arrived_s,
            input_tokens=request.prompt_tokens,
            cached_tokens=0,
            output_tokens=0,
            finish_reason=None,
        )


class PastRoutes:
    """The routes by which a demo reads the past, and makes the engine live."""

    def __init__(self, past: PastEngine, clock: Clock, origin: float) -> None:
        self._past = past
        self._origin = origin
        self._clock = clock
        self.live: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def add_to(self, app: web.Application) -> None:
        """Add the routes to an application."""
        app.router.add_get("/simulator/past", self._frames)
        app.router.add_get("/simulator/gpu", self._gpu)
        app.router.add_post("/simulator/live", self._live)

    async def _frames(self, request: web.Request) -> web.StreamResponse:
        """The frames up to now, a line of JSON each; with `last` those that end the past.

        With `since`, a Unix time, the engine starts then.
        """
        if "since" in request.query:
            self._past.start(float(request.query["since"]) - self._origin)
        response = web.StreamResponse(headers={"Content-Type": "application/jsonl"})
        await response.prepare(request)
        for frame in self._past.frames(self._clock.now_s()):
            await response.write(_line(frame))
        if "last" in request.query:
            await response.write(_line(self._past.end()))
        await response.write_eof()
        return response

    async def _gpu(self, request: web.Request) -> web.Response:
        return web.json_response(self._past.gpu(self._clock.now_s()))

    async def _live(self, request: web.Request) -> web.Response:
        """Run in real time from now on; the body is the URL of the proxy."""
        if not self.live.done():
            self.live.set_result(await request.text())
        return web.Response(status=204)


def _line(frame: Frame) -> bytes:
    return json.dumps(frame.plain()).encode() + b"\n"


async def run_with_past(
    scenario: Scenario,
    origin: float,
    *,
    announce: Callable[[str], None],
    host: str,
    port: int,
    spans: SpanTarget,
) -> None:
    """Serve an engine until cancelled, then flush its spans.

    Its scenario starts at `origin`, in Unix time.
    """
    clock = Clock(lead_s=time.time() - origin)
    past = PastEngine(scenario, spans.service_name or "", clock.unix_ns)
    sender = SpanSender(spans, clock.unix_ns)
    plugin = PluginSender(spans.service_name or "", clock.unix_ns)
    observers = [past.observe, sender.observe, plugin.observe]
    engine = Engine(past.batch, clock, observers, past.faults)
    routes = PastRoutes(past, clock, origin)
    app = OpenAiRoutes(scenario, engine, past, past.faults).app()
    routes.add_to(app)
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=DRAIN_S
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(sender.close)
        stack.push_async_callback(runner.cleanup)
        announce(await listen(runner, host, port))
        proxy = await routes.live
        clients = Clients(proxy, scenario.model, clock)
        planned = planned_requests(scenario, lambda: f"chatcmpl-{uuid4().hex}", past.faults)
        # Spans of open requests need the agent, too.
        await clients.wait_for_proxy()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(engine.run())
            tasks.create_task(engine.die_and_return(lambda: past.start(clock.now_s())))
            tasks.create_task(plugin.run())
            tasks.create_task(clients.send(planned))
