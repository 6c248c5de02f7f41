"""The memory that all exports share."""

import subprocess
import sys
import time
import tracemalloc
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import psutil
import pytest

from agent.sources.otlp.limits import (
    KEPT_FOR_SMALL_BYTES,
    MAX_BODY_BYTES,
    MAX_BYTES_HELD,
    MIB,
    RECORD_BYTES,
    SMALL_BYTES,
    MemoryBudget,
    NoRoom,
)
from agent.sources.otlp.span_reader import SpanReader
from tests.sources.otlp.exports import export, gzip_bomb, span, vllm_span
from tests.sources.otlp.serving import UNSTORABLE, by_service_name
from tests.sources.otlp.transports import INVALID_ARGUMENT, PROTOBUF_TRANSPORTS, UNAVAILABLE, post


def test_memory_is_held_until_there_is_no_more_and_given_back() -> None:
    budget = MemoryBudget(10 * MIB, 2 * MIB)
    with budget.reserve() as first:
        first.add(5 * MIB)
        first.add(3 * MIB)
        with budget.reserve() as second, pytest.raises(NoRoom, match="8388608 bytes of spans"):
            second.add(2 * MIB)
        assert budget.fill == 0.8
    assert budget.fill == 0


def test_large_exports_leave_memory_for_eight_small_ones() -> None:
    budget = MemoryBudget()
    with ExitStack() as stack:
        with suppress(NoRoom):
            while True:
                stack.enter_context(budget.reserve()).add(2 * MIB)
        for _ in range(8):
            stack.enter_context(budget.reserve()).add(SMALL_BYTES)
        with budget.reserve() as late, pytest.raises(NoRoom):
            late.add(1)


def test_the_records_of_an_export_take_what_the_budget_counts() -> None:
    request = export(*(span({}) for _ in range(1000)))
    tracemalloc.start()
    try:
        read = SpanReader(by_service_name, "tester").read(request, time.time())
        taken_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken_bytes / len(read.records) == pytest.approx(RECORD_BYTES, rel=0.1)


def test_the_most_spans_of_one_body_have_memory() -> None:
    # Two ids and two times, with their tags.
    most_spans = MAX_BODY_BYTES // (2 + 18 + 10 + 9 + 9)
    needed_bytes = 2 * MAX_BODY_BYTES + most_spans * RECORD_BYTES
    assert needed_bytes <= MAX_BYTES_HELD - KEPT_FOR_SMALL_BYTES


BOMB = gzip_bomb(4 * MIB + 1)
LONG_TEXTS = {"gen_ai.request.id": "x" * MIB, "gen_ai.prompt": "y" * MIB}
LONG = export(vllm_span(LONG_TEXTS), resource={"service.name": "z" * MIB})
UNSTORABLE_LONG = export(vllm_span({**LONG_TEXTS, "gen_ai.request.id": UNSTORABLE}))


@dataclass(frozen=True, slots=True)
class Alone:
    """A receiver in a process of its own."""

    grpc_port: int
    http_port: int


def hostile_round(alone: Alone) -> None:
    """Bodies of which each takes megabytes, refused and taken."""
    assert post(alone, BOMB, encoding="gzip").http_status == 413
    for transport in PROTOBUF_TRANSPORTS:
        assert transport.send(alone, LONG).is_full_success
        assert transport.send(alone, UNSTORABLE_LONG).code == UNAVAILABLE
        assert transport.send_bytes(alone, transport.encode(LONG)[:-1]).code == INVALID_ARGUMENT


@pytest.mark.slow
def test_hostile_bodies_leave_nothing_behind() -> None:
    command = [sys.executable, "-m", "tests.sources.otlp.serving"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as started:
        assert started.stdout is not None
        alone = Alone(*map(int, started.stdout.readline().split()))
        memory = psutil.Process(started.pid).memory_info
        for _ in range(3):
            hostile_round(alone)
        early_bytes = memory().rss
        for _ in range(8):
            hostile_round(alone)
        # The bombs that stay would be 32 MiB, the refused texts of one transport 26 MiB.
        assert memory().rss < early_bytes + 20 * MIB
        # It ends when its standard input does.
        started.communicate()
