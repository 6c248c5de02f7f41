"""What strangers can make the receiver take of the machine's memory."""

import gzip
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.sources.otlp.alone import UNSTORABLE
from tests.sources.otlp.doors import (
    INVALID_ARGUMENT,
    OK,
    PROTOBUF_DOORS,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    Door,
    post,
)
from tests.sources.otlp.exports import export, gzip_bomb, part, vllm_span

pytestmark = pytest.mark.slow

MIB = 1024 * 1024

BOMB = gzip_bomb(4 * MIB + 1)
LONG_TEXTS = {"gen_ai.request.id": "x" * MIB, "gen_ai.prompt": "y" * MIB}
LONG = export(vllm_span(LONG_TEXTS), resource={"service.name": "z" * MIB})
UNSTORABLE_LONG = export(vllm_span({**LONG_TEXTS, "gen_ai.request.id": UNSTORABLE}))


@dataclass(frozen=True, slots=True)
class Alone:
    """A receiver in a process of its own."""

    grpc_port: int
    http_port: int
    process: psutil.Process

    def resident_mib(self) -> float:
        """The memory that it has now."""
        return float(self.process.memory_info().rss / MIB)

    def peak_mib(self) -> float:
        """The most memory that it ever had."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
        return int(line.split()[1]) / 1024


@pytest.fixture
def alone() -> Iterator[Alone]:
    command = [sys.executable, "-m", "tests.sources.otlp.alone"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as started:
        assert started.stdout is not None
        grpc_port, http_port = map(int, started.stdout.readline().split())
        yield Alone(grpc_port, http_port, psutil.Process(started.pid))
        assert started.stdin is not None
        started.stdin.close()


def hostile_round(alone: Alone) -> None:
    """Bodies of which each takes megabytes, refused and taken."""
    assert post(alone, BOMB, encoding="gzip").http_status == 413
    for door in PROTOBUF_DOORS:
        assert door.send(alone, LONG).is_full_success
        assert door.send(alone, UNSTORABLE_LONG).code == UNAVAILABLE
        assert door.send_bytes(alone, door.encode(LONG)[:-1]).code == INVALID_ARGUMENT


def test_hostile_bodies_leave_nothing_behind(alone: Alone) -> None:
    for _ in range(3):
        hostile_round(alone)
    early_mib = alone.resident_mib()
    for _ in range(12):
        hostile_round(alone)
    # One bomb that stays would be 64 MiB, the refused texts of one transport 40 MiB.
    assert alone.resident_mib() < early_mib + 32


@pytest.mark.parametrize(
    ("door", "mib"), [(PROTOBUF_DOORS[0], 3), (PROTOBUF_DOORS[2], 3)], ids=["grpc", "http"]
)
def test_large_bodies_at_once_are_taken_or_reported_to_come_back(
    alone: Alone, door: Door, mib: int
) -> None:
    spans = [vllm_span({"prompt": "x" * MIB}) for _ in range(mib)]
    body = export(*spans).SerializeToString()
    with ThreadPoolExecutor(48) as threads:
        replies = list(threads.map(lambda _: door.send_bytes(alone, body), range(48)))
    assert {(reply.code, reply.retry_after_s) for reply in replies} <= {
        (OK, None),
        (RESOURCE_EXHAUSTED, 1),
    }
    assert any(reply.is_full_success for reply in replies)
    # All of them would be 144 MiB as they come, and as much again as messages.
    assert alone.peak_mib() < 400


def test_a_small_body_does_not_become_gigabytes(alone: Alone) -> None:
    spans = b"\x12\x00" * (MIB)
    body = gzip.compress(part(1, part(2, spans)))
    assert len(body) < 20_000
    before_mib = alone.peak_mib()
    reply = post(alone, body, encoding="gzip")
    assert (reply.http_status, reply.code) == (413, RESOURCE_EXHAUSTED)
    assert reply.message.startswith("the spans take over")
    assert alone.peak_mib() < before_mib + 256
