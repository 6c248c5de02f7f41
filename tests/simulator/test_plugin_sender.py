"""What the simulator reports as the engine's plugin, read by the agent's own reader."""

import asyncio
import socket
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from agent.simulator.batching import Batch
from agent.simulator.plugin_sender import PATH_VARIABLE, PluginSender
from agent.sources.plugin_records import PluginRecords, read_datagram
from tests.simulator.kit import PLAIN, engine_request, steps

AT = 1_800_000_000.0
REQUEST = replace(engine_request(100, 5), cached_tokens=40)


def unix_ns(at_s: float) -> int:
    return round((AT + at_s) * 1e9)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(PATH_VARIABLE, str(tmp_path / "plugin.sock"))
    return tmp_path / "plugin.sock"


async def _sent(sender: PluginSender, listener: socket.socket, steps_: int) -> list[PluginRecords]:
    """What the agent reads until it has this many steps."""
    running = asyncio.create_task(sender.run())
    read: list[PluginRecords] = []
    try:
        while sum(len(each.steps) for each in read) < steps_:
            with suppress(BlockingIOError):
                found = read_datagram(listener.recv(65536), "engine-0", AT)
                assert found is not None
                read.append(found)
            await asyncio.sleep(0)
    finally:
        running.cancel()
    return read


def _received(sender: PluginSender, path: Path, steps_: int) -> list[PluginRecords]:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as listener:
        listener.bind(str(path))
        listener.setblocking(False)
        return asyncio.run(asyncio.wait_for(_sent(sender, listener, steps_), 30))


def test_the_agent_reads_each_step_and_each_request_that_ended(path: Path) -> None:
    sender = PluginSender("engine-0", unix_ns)
    made = list(steps(Batch(PLAIN, [REQUEST])))
    for step in made:
        sender.observe(step)
    read = _received(sender, path, len(made))
    reported = [step for each in read for step in each.steps]
    assert [step.ended_at for step in reported] == [AT + step.ended_s for step in made]
    assert [step.prefill_tokens for step in reported] == [60, 0, 0, 0, 0]
    assert [step.decode_tokens for step in reported] == [1] * 5
    assert all(step.tokens_of_step for step in reported)
    (ended,) = (each for content in read for each in content.ended)
    assert (ended.request_id, ended.cached_tokens) == (REQUEST.request_id, 40)
    assert ended.ttft_s == pytest.approx(made[0].ended_s)
    assert [content.refused for content in read] == [{}] * len(read)


def test_without_a_socket_in_the_environment_it_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PATH_VARIABLE, raising=False)
    sender = PluginSender("engine-0", unix_ns)
    asyncio.run(asyncio.wait_for(sender.run(), 30))


def test_records_wait_for_an_agent_that_is_away_and_their_numbers_go_on(path: Path) -> None:
    sender = PluginSender("engine-0", unix_ns)
    made = list(steps(Batch(PLAIN, [engine_request(100, 100)])))
    for step in made:
        sender.observe(step)
    first, *others = _received(sender, path, len(made))
    assert (first.first, first.dropped) == (0, 0)
    assert others[0].first == first.records
    assert {content.run for content in others} == {first.run}
