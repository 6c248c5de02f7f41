"""The last log lines of a real vLLM 0.32 and the events that they give."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.analysis.failures import FailureDetection, Poll
from agent.records.engine import EngineSample
from agent.records.event import Event
from agent.sources.host.source import HostSource
from tests.sources.host.machine import PaperMachine

LOGS = Path(__file__).parent / "logs"
CHATTER = b'INFO:     127.0.0.1:50150 - "GET /metrics HTTP/1.1" 200 OK\n'


def words(log: str) -> list[bytes]:
    return (LOGS / f"{log}.txt").read_bytes().splitlines(keepends=True)


def polls(machine: PaperMachine, path: Path, pieces: list[bytes], *, up: bool) -> Iterator[Event]:
    """An engine that is `up` at first, and at whose next polls these pieces of log were there."""
    path.touch()
    watch = HostSource(
        url="http://127.0.0.1:8000", log=path, proc=machine.proc, cgroups=machine.cgroups
    )
    detection = FailureDetection()
    watch.read(0.0)
    for number, piece in enumerate([CHATTER, *pieces, b"", b""]):
        with path.open("ab") as file:
            file.write(piece)
        at = 5.0 * number
        answers = up and number == 0
        sample = EngineSample(engine="chat", at=at, dialect="vllm", model="m", facts={})
        poll = Poll(
            engine="chat",
            at=at,
            clock_s=at,
            sample=sample if answers else None,
            failure=None if answers else "connection",
            host=watch.read(at),
        )
        yield from detection.observe(poll)
    watch.close()


@pytest.mark.parametrize(
    ("log", "up", "expected"),
    [
        ("vllm-0.32.0-stopped", True, ["UNREACHABLE"]),
        ("vllm-0.32.0-core-killed", True, ["UNREACHABLE", "ENGINE_DEAD"]),
        ("vllm-0.32.0-cache-too-small", False, ["SIZING_ERROR"]),
    ],
)
@pytest.mark.parametrize("first_lines", [0, 1, 2, 3, 10, 1000])
def test_a_recorded_end_is_judged_alike_wherever_a_poll_cuts_the_log(
    machine: PaperMachine, tmp_path: Path, log: str, up: bool, expected: list[str], first_lines: int
) -> None:
    said = words(log)
    pieces = [b"".join(said[:first_lines]), b"".join(said[first_lines:])]
    events = polls(machine, tmp_path / "engine.log", pieces, up=up)
    assert [event.kind.value for event in events] == expected
