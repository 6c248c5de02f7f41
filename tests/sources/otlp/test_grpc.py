"""OTLP over gRPC: what is asked of statuses, sizes and addresses."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from agent.errors import SettingsInvalid, StoreUnavailable
from agent.sources.otlp.grpc import OtlpGrpc
from agent.sources.otlp.limits import MAX_BODY_BYTES, MAX_GRPC_READING
from tests.sources.otlp.exports import export, vllm_span
from tests.sources.otlp.serving import WITHIN_S, LoopThread, Serving
from tests.sources.otlp.transports import INVALID_ARGUMENT, RESOURCE_EXHAUSTED, UNAVAILABLE, call

GOOD = export(vllm_span()).SerializeToString()
SERVICE = "/opentelemetry.proto.collector.trace.v1.TraceService"


def test_a_status_says_when_to_come_back(served: Serving) -> None:
    served.accepted.failure = StoreUnavailable("the disk is full")
    reply = call(served, GOOD)
    status, info = Status.FromString(reply.headers["grpc-status-details-bin"]), RetryInfo()
    assert (status.code, status.message) == (UNAVAILABLE, "the disk is full")
    (detail,) = status.details
    assert detail.Unpack(info)
    assert info.retry_delay.ToTimedelta().total_seconds() == 1


def test_what_no_retry_can_repair_carries_no_delay(served: Serving) -> None:
    reply = call(served, b"\xff\xff")
    assert reply.code == INVALID_ARGUMENT
    assert "grpc-status-details-bin" not in reply.headers


@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip])
def test_messages_over_the_limit_are_refused_however_small_they_were_made(
    served: Serving, compression: grpc.Compression | None
) -> None:
    reply = call(served, bytes(MAX_BODY_BYTES + 1), compression=compression)
    assert reply.code == RESOURCE_EXHAUSTED
    assert reply.retry_after_s is None
    assert call(served, GOOD).is_full_success


@pytest.mark.parametrize("method", [f"{SERVICE}/Import", "/opentelemetry.LogsService/Export"])
def test_other_calls_are_not_implemented(served: Serving, method: str) -> None:
    address = f"127.0.0.1:{served.grpc_port}"
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as failure:
        channel.unary_unary(method)(GOOD, timeout=WITHIN_S)
    assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_sender_that_leaves_while_its_rows_are_stored_is_counted_once(
    loop: LoopThread, served: Serving
) -> None:
    served.accepted.gate = asyncio.Event()
    with grpc.insecure_channel(f"127.0.0.1:{served.grpc_port}") as channel:
        sending = channel.unary_unary(f"{SERVICE}/Export").future(GOOD, timeout=WITHIN_S)
        assert served.accepted.entered.wait(WITHIN_S)
        sending.cancel()
    # Another exchange on the same server, so that the agent has heard of the cancelling.
    assert call(served, b"\xff").code == INVALID_ARGUMENT
    loop.call(served.accepted.gate.set)
    served.counts.wait(lambda counts: counts.contents)
    assert len(served.accepted.records) == len(served.counts.contents) == len(served.forwarded) == 1


@contextmanager
def stalled(port: int, senders: int) -> Iterator[list[grpc.Future]]:
    """Calls whose message does not come, each on a connection of its own."""
    never = threading.Event()

    def message() -> Iterator[bytes]:
        never.wait(WITHIN_S)
        yield from ()

    options = [("grpc.use_local_subchannel_pool", 1)]
    with ExitStack() as stack:
        calls = []
        for _ in range(senders):
            channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}", options))
            calls.append(
                channel.stream_unary(f"{SERVICE}/Export").future(message(), timeout=WITHIN_S)
            )
        try:
            yield calls
        finally:
            for begun in calls:
                begun.cancel()
            never.set()


def test_a_call_without_a_message_is_bad_data(served: Serving) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{served.grpc_port}") as channel:
        failure = channel.stream_unary(f"{SERVICE}/Export").future(iter(())).exception()
    assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert failure.details() == "the call holds no message"


def test_senders_that_leave_before_their_message_give_way(served: Serving) -> None:
    for _ in range(3):
        with stalled(served.grpc_port, MAX_GRPC_READING) as calls:
            for sending in calls:
                sending.cancel()
    assert call(served, GOOD).is_full_success


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_an_address_that_cannot_be_had_is_reported_in_a_sentence(
    loop: LoopThread, served: Serving, host: str
) -> None:
    taken = served.grpc_port
    with pytest.raises(SettingsInvalid) as failure:
        loop.run(OtlpGrpc(served.receiver, f"{host}:{taken}").start())
    assert failure.value.problems == (
        f"otlp.grpc: cannot listen on {host}:{taken}; choose another address",
    )


def test_stopping_what_never_started_is_no_fault(loop: LoopThread, served: Serving) -> None:
    loop.run(OtlpGrpc(served.receiver, "127.0.0.1:0").stop(0.0))
