"""How a vLLM with open requests ends at SIGTERM, with the plugin's middleware and without it.

vLLM may wait for its clients' connections for ever: vllm#36964. Many starts, in random order, show
whether the middleware makes that more likely. The plugin and its agent are the same in both cases.
"""

import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import comb
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import requests

from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.ports import free_port
from tests.real_parts.vllm import PROMPT, Vllm, plugin_environment

STOPS = 40
# Engines at a time: one computes while another starts.
_ENGINES = 2
_ENDS_WITHIN_S = 15.0
_SIGNIFICANT = 0.05
_STREAMED = (False, True, True)
_CHOICES, _TOKENS = 4, 1900
_BEGINS_WITHIN_S = 120.0
# After the first events, so that the signal comes at any point of a step.
_LATEST_S = 0.5


@dataclass(frozen=True, slots=True)
class Place:
    """Where an engine of the agent may run; its environment with the middleware, and without it."""

    port: int
    environments: Mapping[bool, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Stop:
    """How a front ended: its exit code, or None while it waits; and what its clients got."""

    middleware: bool
    exit_code: int | None
    took_s: float
    clients: tuple[str, ...]


def run() -> bool:
    """Print the figures; return whether the middleware does not make a hanging end more likely."""
    turns = [True] * STOPS + [False] * STOPS
    random.shuffle(turns)
    with (
        tempfile.TemporaryDirectory() as name,
        _agent(Path(name)) as places,
        ThreadPoolExecutor(_ENGINES) as pool,
    ):
        folders = (Path(name, f"stop-{number}") for number in range(len(turns)))
        stops = list(pool.map(lambda *turn: _stop(places, *turn), folders, turns))
    hung = [[each.exit_code is None for each in _of(stops, on)] for on in (True, False)]
    likely = fisher(*(count for way in hung for count in (sum(way), len(way) - sum(way))))
    for on in (True, False):
        print(_described(_of(stops, on), middleware=on))
    print(f"stops, Fisher's exact test, two-sided: p = {likely:.3f}")
    return sum(hung[0]) <= sum(hung[1]) or likely >= _SIGNIFICANT


@contextmanager
def _agent(folder: Path) -> Iterator[SimpleQueue[Place]]:
    """An agent, and the places of its engines that are free."""
    free: SimpleQueue[Place] = SimpleQueue()
    engines = []
    for number in range(_ENGINES):
        socket, port = folder / f"{number}.sock", free_port()
        url = f"http://127.0.0.1:{port}"
        engines.append({"name": f"chat-{number}", "url": url, "plugin_socket": str(socket)})
        environments = {
            on: plugin_environment(folder / f"plugin-{number}-{on}", socket, middleware=on)
            for on in (True, False)
        }
        free.put(Place(port, environments))
    with AgentProcess.with_settings(folder, AgentPorts.free(), {"engines": engines}):
        yield free


def _of(stops: Sequence[Stop], middleware: bool) -> list[Stop]:
    return [each for each in stops if each.middleware is middleware]


def _described(stops: Sequence[Stop], *, middleware: bool) -> str:
    hanging = [each for each in stops if each.exit_code is None]
    lines = [
        f"stops, middleware {'on' if middleware else 'off'}: {len(hanging)} of {len(stops)} fronts "
        f"still there {_ENDS_WITHIN_S:.0f} s after SIGTERM; exit codes of the others: "
        f"{_counted(str(each.exit_code) for each in stops if each not in hanging)}"
    ]
    for ending, those in (
        ("are still there", hanging),
        ("ended", [x for x in stops if x not in hanging]),
    ):
        if those:
            clients = _counted(client for each in those for client in each.clients)
            lines.append(f"  clients of fronts that {ending}: {clients}")
    return "\n".join(lines)


def _counted(names: Iterator[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in Counter(names).most_common())


def _stop(places: SimpleQueue[Place], folder: Path, middleware: bool) -> Stop:
    folder.mkdir()
    place = places.get()
    environment = place.environments[middleware]
    try:
        with Vllm(folder, port=place.port, spans=None, environment=environment) as engine:
            stop = _stopped(engine, middleware)
    finally:
        places.put(place)
    print(f"  {stop}", flush=True)
    return stop


def _stopped(engine: Vllm, middleware: bool) -> Stop:
    clients = [_Client(engine, streamed=streamed) for streamed in _STREAMED]
    for client in clients:
        client.thread.start()
    for client in clients:
        assert client.began.wait(_BEGINS_WITHIN_S), engine.log.read_text()
    time.sleep(random.uniform(0, _LATEST_S))
    began_s = time.monotonic()
    exit_code = engine.terminated(within_s=_ENDS_WITHIN_S)
    took_s = time.monotonic() - began_s
    # What came until now; those that still wait are cut off after this.
    got = tuple(client.got for client in clients)
    engine.kill()
    for client in clients:
        client.thread.join()
    return Stop(middleware, exit_code, took_s, got)


@dataclass
class _Client:
    """A request of several choices, in a thread of its own, and what it got so far."""

    engine: Vllm
    streamed: bool
    got: str = "nothing"
    began: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        body: dict[str, Any] = {
            **{
                "model": self.engine.model,
                "prompt": PROMPT,
                "n": _CHOICES,
                "stream": self.streamed,
            },
            **{"max_tokens": _TOKENS, "ignore_eos": True},
        }
        kind = "stream" if self.streamed else "whole response"
        self.got = f"{kind} open"
        if not self.streamed:
            # It is sent before the streams, whose first events come after the engine has it.
            self.began.set()
        try:
            with requests.post(
                f"{self.engine.url}/v1/completions", json=body, stream=True, timeout=300
            ) as response:
                self.got = f"{kind} {self._read(response)}"
        except requests.RequestException as error:
            self.got = f"{kind} cut ({type(error).__name__})"

    def _read(self, response: requests.Response) -> str:
        last = b""
        for line in response.iter_lines():
            self.began.set()
            last = line if line and line != b"data: [DONE]" else last
        reason = "abort" if b'"abort"' in last else "error" if b'"error"' in last else "complete"
        return f"{response.status_code} {reason}"


def fisher(*table: int) -> float:
    """Probability of a table of 2 by 2 (row by row) at least as unlikely as this one by chance."""
    row, column, whole = table[0] + table[1], table[0] + table[2], sum(table)

    def ways(first: int) -> int:
        return comb(row, first) * comb(whole - row, column - first)

    possible = [ways(n) for n in range(max(0, row + column - whole), min(row, column) + 1)]
    return sum(n for n in possible if n <= ways(table[0])) / sum(possible)
