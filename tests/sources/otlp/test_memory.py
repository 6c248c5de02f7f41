"""What bodies that are refused leave in the receiver's memory."""

import subprocess
import sys
from dataclasses import dataclass

import psutil
import pytest

from tests.sources.otlp.doors import INVALID_ARGUMENT, PROTOBUF_DOORS, UNAVAILABLE, post
from tests.sources.otlp.exports import export, gzip_bomb, vllm_span
from tests.sources.otlp.serving import UNSTORABLE

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


def hostile_round(alone: Alone) -> None:
    """Bodies of which each takes megabytes, refused and taken."""
    assert post(alone, BOMB, encoding="gzip").http_status == 413
    for door in PROTOBUF_DOORS:
        assert door.send(alone, LONG).is_full_success
        assert door.send(alone, UNSTORABLE_LONG).code == UNAVAILABLE
        assert door.send_bytes(alone, door.encode(LONG)[:-1]).code == INVALID_ARGUMENT


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
        for _ in range(12):
            hostile_round(alone)
        # The bombs that stay would be 48 MiB, the refused texts of one transport 40 MiB.
        assert memory().rss < early_bytes + 32 * MIB
        # It ends when its standard input does.
        started.communicate()
