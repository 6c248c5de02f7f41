"""Time until an export is acknowledged, by the whole agent under the load of twenty engines."""

import http.client
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub

from benchmarks.exports import export_body
from tests.real_parts.agent_process import AgentOfUser, AgentPorts
from tests.real_parts.ports import free_port
from tests.real_parts.postgres import PostgresServer
from tests.real_parts.waiting import eventually

TARGET_MS = 50.0
ENGINES, PER_S = 20, 50
# As the batch span processor of OpenTelemetry's SDK does, or when 512 spans wait.
EVERY_S = 5.0
EXPORTS_OF_EACH = 24
_SPANS = int(PER_S * EVERY_S)
# So that exports meet the agent's jobs, which run each second, at twenty moments of a second.
_APART_S = 1.05 * EVERY_S / ENGINES
_PLACES = range(EXPORTS_OF_EACH)
_MADE_WITHIN_S = 20.0
_PROTOBUF = {"Content-Type": "application/x-protobuf"}

Send = Callable[[bytes], None]


def run() -> bool:
    """Print the times of both protocols; return whether the target is met."""
    with _postgres() as url:
        return all([_measured("SQLite", None), _measured("SQLite, published to PostgreSQL", url)])


def _measured(name: str, url: str | None) -> bool:
    sent = ENGINES * EXPORTS_OF_EACH * _SPANS
    with tempfile.TemporaryDirectory() as folder:
        ports = AgentPorts.free()
        settings: dict[str, Any] = {"storage": {"publish_to": url}} if url else {}
        settings["engines"] = [{"name": "chat-0", "url": f"http://127.0.0.1:{free_port()}"}]
        with AgentOfUser.with_settings(Path(folder), ports, settings) as agent:
            over = (partial(_over_http, ports.http), partial(_over_grpc, ports.grpc))
            taken_ms = sorted(_times_ms([over[number % 2] for number in range(ENGINES)]))
            eventually(lambda: _requests(agent) == sent, within_s=60, what=f"{sent} requests")
    p50, p99 = (taken_ms[int(share * len(taken_ms))] for share in (0.5, 0.99))
    print(
        f"acknowledgement with {name}, {ENGINES} engines of {PER_S} requests/s, half over gRPC, "
        f"{len(taken_ms)} exports of {_SPANS} spans: median {p50:.1f} ms, 99th percentile "
        f"{p99:.1f} ms (target under {TARGET_MS:.0f}), longest {taken_ms[-1]:.1f} ms"
    )
    return p99 < TARGET_MS


def _requests(agent: AgentOfUser) -> int:
    requests: int = agent.api.summary(window="15m")["requests"]
    return requests


def _times_ms(connects: Sequence[Callable[[], Send]]) -> list[float]:
    """The milliseconds of each export; each of `connects` opens the connection of one engine."""
    taken_ms: list[float] = []
    first_at = time.time() + _MADE_WITHIN_S
    begins = [first_at + _APART_S * number for number in range(len(connects))]
    # Made before, so that no measured export waits for another thread of this process.
    bodies = [
        [
            export_body(number * EXPORTS_OF_EACH + place, begin + EVERY_S * place, _SPANS)
            for place in _PLACES
        ]
        for number, begin in enumerate(begins)
    ]
    assert time.time() < first_at, "this machine is too slow to make the exports in time"
    threads = [
        threading.Thread(target=_engine, args=(connect, each, begin, taken_ms.append))
        for connect, each, begin in zip(connects, bodies, begins, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return taken_ms


def _engine(
    connect: Callable[[], Send],
    bodies: Sequence[bytes],
    begin: float,
    on_ms: Callable[[float], None],
) -> None:
    """Send one body every EVERY_S from the Unix time `begin` on."""
    send = connect()
    for place, body in enumerate(bodies):
        time.sleep(max(begin + EVERY_S * place - time.time(), 0.0))
        began_s = time.perf_counter()
        send(body)
        on_ms(1000 * (time.perf_counter() - began_s))


def _over_http(port: int) -> Send:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def send(body: bytes) -> None:
        connection.request("POST", "/v1/traces", body, _PROTOBUF)
        response = connection.getresponse()
        response.read()
        assert response.status == 200, response.status

    return send


def _over_grpc(port: int) -> Send:
    channel = grpc.insecure_channel(f"127.0.0.1:{port}")
    stub = TraceServiceStub(channel)  # type: ignore[no-untyped-call]

    def send(body: bytes) -> None:
        stub.Export(ExportTraceServiceRequest.FromString(body), timeout=60)

    return send


@contextmanager
def _postgres() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        server = PostgresServer(Path(folder))
        try:
            with server.new_database() as url:
                yield url
        finally:
            server.stop()
