"""A simulator on a free port, an engine that a test steps, their expositions, OTLP receivers."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import grpc
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from agent.simulator.batching import Batch, EngineRequest, Finished, Step
from agent.simulator.openai_server import run_simulator
from agent.simulator.scenario import Decode, KvCache, Prefill, Scenario, TokenLengths
from agent.simulator.simulated_engine import Clock
from agent.simulator.span_sender import SpanProtocol, SpanTarget
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


class SetClock(Clock):
    """Wakes its sleepers at once, as if it were later by `late_s` than they asked for."""

    def __init__(self, now_s: float = 0.0, *, late_s: float = 0.0) -> None:
        super().__init__()
        self._now_s = now_s
        self._late_s = late_s

    def now_s(self) -> float:
        return self._now_s

    async def sleep_until(self, at_s: float) -> None:
        self._now_s = max(self._now_s, at_s + self._late_s)
        await asyncio.sleep(0)


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


@dataclass(frozen=True, slots=True)
class Received:
    """The exports so far, and the target to send to."""

    target: SpanTarget
    exports: list[ExportTraceServiceRequest] = field(default_factory=list)

    def spans(self) -> list[Span]:
        """Every span so far."""
        return [span for _, _, span in self._parts()]

    def scopes(self) -> set[str]:
        """The names of all instrumentation scopes."""
        return {scope for _, scope, _ in self._parts()}

    def resources(self) -> list[dict[str, Any]]:
        """The attributes of the resource of each span."""
        return [resource for resource, _, _ in self._parts()]

    def _parts(self) -> Iterator[tuple[dict[str, Any], str, Span]]:
        for export in self.exports:
            for resource in export.resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        yield values(resource.resource.attributes), scope.scope.name, span


def values(attributes: Any) -> dict[str, Any]:
    """Attributes as Python values."""

    def value(pair: KeyValue) -> Any:
        return getattr(pair.value, pair.value.WhichOneof("value") or "string_value")

    return {pair.key: value(pair) for pair in attributes}


class _Servicer(TraceServiceServicer):
    def __init__(self, exports: list[ExportTraceServiceRequest]) -> None:
        self._exports = exports

    def Export(  # noqa: N802 - the name is OTLP's
        self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        self._exports.append(request)
        return ExportTraceServiceResponse()


@asynccontextmanager
async def grpc_receiver() -> AsyncIterator[Received]:
    """A receiver of OTLP over gRPC."""
    server = grpc.server(ThreadPoolExecutor(max_workers=1))
    port = server.add_insecure_port("127.0.0.1:0")
    received = Received(SpanTarget(endpoint=f"http://127.0.0.1:{port}", service_name="sim-0"))
    add_TraceServiceServicer_to_server(_Servicer(received.exports), server)  # type: ignore[no-untyped-call]
    server.start()
    try:
        yield received
    finally:
        server.stop(grace=None).wait()


@asynccontextmanager
async def http_receiver() -> AsyncIterator[Received]:
    """A receiver of OTLP over HTTP."""
    exports: list[ExportTraceServiceRequest] = []

    async def export(request: web.Request) -> web.Response:
        exports.append(ExportTraceServiceRequest.FromString(await request.read()))
        body = ExportTraceServiceResponse().SerializeToString()
        return web.Response(body=body, content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post("/v1/traces", export)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    try:
        yield Received(
            SpanTarget(endpoint=endpoint, protocol=SpanProtocol.HTTP, service_name="sim-0"), exports
        )
    finally:
        await runner.cleanup()


RECEIVERS: Mapping[str, Callable[[], AbstractAsyncContextManager[Received]]] = {
    "grpc": grpc_receiver,
    "http/protobuf": http_receiver,
}
