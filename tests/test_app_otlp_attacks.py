"""Exports that would hurt the running agent: it stays small and takes others."""

import gzip
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
import pytest
import requests
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.trace.export import SpanExportResult

from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.metric_pages import total
from tests.real_parts.waiting import eventually
from tests.sources.otlp.exports import export, part, span, vllm_span
from tests.sources.otlp.test_transports import sdk_span
from tests.sources.otlp.transports import (
    JSON,
    OK,
    PROTOBUF,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    Reply,
    call,
    post,
)

pytestmark = pytest.mark.slow

MIB = 1024 * 1024
WITHIN_S = 120.0
EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"

# The Kubernetes files give the agent 512 MiB.
MAX_MIB = 400


class RunningAgent:
    """An agent with both receivers."""

    def __init__(self, folder: Path) -> None:
        ports = AgentPorts.free()
        self.grpc_port, self.http_port = ports.grpc, ports.http
        settings = {"engines": [{"name": "chat-0", "url": "http://127.0.0.1:9"}]}
        self.process = AgentProcess.with_settings(folder, ports, settings)

    def stored(self) -> float:
        """How many spans were stored."""
        return total(self.process.api.exposition(), "llm_agent_spans_total", outcome="stored")


@pytest.fixture(scope="module")
def _agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    running = RunningAgent(tmp_path_factory.mktemp("attacked"))
    with running.process:
        yield running


@pytest.fixture
def agent(_agent: RunningAgent) -> Iterator[RunningAgent]:
    """The agent that all attacks share, and a check that it stayed small and took other exports."""
    with Bystander(_agent) as bystander:
        yield _agent
    assert bystander.failed == Counter()
    assert _agent.process.peak_mib < MAX_MIB


class Bystander:
    """An engine that exports spans while others attack, by OpenTelemetry's own exporters."""

    def __init__(self, agent: RunningAgent) -> None:
        # vLLM's exporter tries again until 10 s are over, too.
        self._exporters = (
            GrpcExporter(f"http://127.0.0.1:{agent.grpc_port}", insecure=True, timeout=10),
            HttpExporter(f"http://127.0.0.1:{agent.http_port}/v1/traces", timeout=10),
        )
        self.failed: Counter[str] = Counter()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while True:
            for exporter in self._exporters:
                if exporter.export([sdk_span()]) is not SpanExportResult.SUCCESS:
                    self.failed[type(exporter).__module__] += 1
            if self._end.wait(0.1):
                return

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end.set()
        self._thread.join()
        for exporter in self._exporters:
            exporter.shutdown()


def many_empty_spans() -> bytes:
    """Four megabytes that would be two million spans."""
    return part(1, part(2, b"\x12\x00" * 2_000_000))


# Work


def numbers_without_end() -> bytes:
    """A number of a million bytes, before what makes the body look large."""
    return b"\xff" * 1_000_000 + b"\x0a" * 3_000_000


def json_of_empty_attributes() -> bytes:
    """Four megabytes that would be five million attributes."""
    values = ",".join(["{}"] * 1_300_000)
    return f'{{"resourceSpans":[{{"resource":{{"attributes":[{values}]}}}}]}}'.encode()


@pytest.mark.parametrize(
    ("make", "content_type", "status", "message"),
    [
        (numbers_without_end, PROTOBUF, 413, "when they are read; send smaller batches"),
        (json_of_empty_attributes, JSON, 413, "JSON values; send smaller batches"),
        (many_empty_spans, PROTOBUF, 413, "when they are read; send smaller batches"),
        (lambda: bytes(80 * MIB), PROTOBUF, 413, "after decompression; send smaller batches"),
    ],
    ids=["numbers", "json", "spans", "zeros"],
)
def test_a_few_kilobytes_that_would_be_much_work_are_refused(
    agent: RunningAgent, make: Callable[[], bytes], content_type: str, status: int, message: str
) -> None:
    body = gzip.compress(make())
    assert len(body) < 150_000

    def send(_: int) -> Reply:
        return post(agent, body, content_type=content_type, encoding="gzip")

    with ThreadPoolExecutor(4) as threads:
        replies = list(threads.map(send, range(4)))
    # A body for which there was no room would be sent again.
    assert {reply.http_status for reply in replies} <= {status, 503}
    (refused,) = {reply.message for reply in replies if reply.http_status == status}
    assert refused.endswith(message)


# Memory


def at_once(send: Callable[[bytes], Reply], body: bytes, count: int) -> Counter[int]:
    """The codes of so many exports of one body; each has room or is told when to come again."""
    with ThreadPoolExecutor(count) as threads:
        replies = list(threads.map(send, [body] * count))
    answers = {(reply.code, reply.retry_after_s) for reply in replies}
    # UNAVAILABLE where a busy machine was too slow to send it while others waited.
    assert answers <= {(OK, None), (RESOURCE_EXHAUSTED, 1), (UNAVAILABLE, 1)}
    return Counter(reply.code for reply in replies)


def test_large_exports_over_grpc_at_once(agent: RunningAgent) -> None:
    body = export(*[vllm_span({"prompt": "x" * MIB}) for _ in range(3)]).SerializeToString()
    assert at_once(lambda sent: call(agent, sent), body, 50)[OK] >= 1


def test_large_exports_over_http_at_once(agent: RunningAgent) -> None:
    body = export(*[vllm_span({"prompt": "x" * MIB}) for _ in range(3)]).SerializeToString()
    compressed = gzip.compress(body, 1)
    assert at_once(lambda sent: post(agent, sent), body, 50)[OK] >= 1
    gzipped = at_once(lambda sent: post(agent, sent, encoding="gzip"), compressed, 50)
    assert gzipped[OK] >= 1


# Slots


@contextmanager
def stalled_calls(agent: RunningAgent, count: int) -> Iterator[None]:
    """Senders that begin calls whose message never comes, and begin again when they are ended."""
    over = threading.Event()

    def message() -> Iterator[bytes]:
        over.wait(WITHIN_S)
        yield from ()

    def stall(channel: grpc.Channel) -> None:
        ended = False
        while not ended:
            channel.stream_unary(EXPORT).future(message(), timeout=WITHIN_S).exception()
            # An agent that has stopped refuses the next call at once.
            ended = over.wait(0.1)

    with ExitStack() as stack, ThreadPoolExecutor(count) as threads:
        for _ in range(count):
            options = [("grpc.use_local_subchannel_pool", 1)]
            address = f"127.0.0.1:{agent.grpc_port}"
            threads.submit(stall, stack.enter_context(grpc.insecure_channel(address, options)))
        try:
            yield
        finally:
            over.set()


def test_calls_that_stall_take_no_slots_from_others(agent: RunningAgent) -> None:
    exporter = GrpcExporter(f"http://127.0.0.1:{agent.grpc_port}", insecure=True, timeout=10)
    with stalled_calls(agent, 16):
        assert [exporter.export([sdk_span()]) for _ in range(5)] == [SpanExportResult.SUCCESS] * 5
    exporter.shutdown()


@contextmanager
def stalled_bodies(agent: RunningAgent, sizes_bytes: Sequence[int]) -> Iterator[None]:
    """Senders of bodies that lack their last byte; one may be refused before."""
    with ExitStack() as stack:
        for size_bytes in sizes_bytes:
            head = (
                "POST /v1/traces HTTP/1.1\r\nHost: agent\r\n"
                f"Content-Type: {PROTOBUF}\r\nContent-Length: {size_bytes + 1}\r\n\r\n"
            )
            address = ("127.0.0.1", agent.http_port)
            connection = stack.enter_context(socket.create_connection(address, timeout=WITHIN_S))
            with suppress(ConnectionError):
                connection.sendall(head.encode() + bytes(size_bytes))
        yield


def test_bodies_that_stall_take_no_room_from_others(agent: RunningAgent) -> None:
    small = export(vllm_span()).SerializeToString()
    large = export(vllm_span(), vllm_span({"prompt": "x" * (3 * MIB)})).SerializeToString()
    # More than have room.
    with stalled_bodies(agent, [int(3.9 * MIB)] * 100):
        for _ in range(20):
            assert post(agent, small).is_full_success
        # Before the 30 s are over that a body has where nobody else needs its memory.
        eventually(lambda: post(agent, large).is_full_success, within_s=20, what="a large export")


# The end


def test_sigterm_ends_the_agent_while_a_large_body_is_stored(tmp_path: Path) -> None:
    agent = RunningAgent(tmp_path)
    body = gzip.compress(b"".join(many_spans_with_ids(50_000)))
    with agent.process, ThreadPoolExecutor(1) as threads:
        sending = threads.submit(post, agent, body, encoding="gzip")
        eventually(agent.stored, within_s=WITHIN_S, what="the first spans of the body")
        assert not sending.done()
        # It must end within the 30 s that the agent has in Kubernetes; else it is killed.
        agent.process.stop()
        # The agent may close the connection before its answer can be read.
        with suppress(requests.ConnectionError):
            assert sending.result().http_status == 503


def many_spans_with_ids(count: int) -> Iterator[bytes]:
    """Exports of one span each, which together are one export."""
    one = span({}, span_id=bytes(8)).SerializeToString()
    for number in range(1, count + 1):
        yield part(1, part(2, part(2, one + part(2, number.to_bytes(8, "big")))))


def test_sigterm_ends_the_agent_while_senders_stall(tmp_path: Path) -> None:
    agent = RunningAgent(tmp_path)
    with agent.process, stalled_calls(agent, 8), stalled_bodies(agent, (MIB, 3 * MIB)):
        agent.process.stop()
    # Nothing had to be cut off in the middle.
    assert "Traceback" not in agent.process.log()
