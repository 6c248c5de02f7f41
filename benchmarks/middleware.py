"""The middleware in vLLM's front: what it costs an engine, and how true its times are.

One engine of the real vLLM, with the agent and its store beside it. The middleware is switched on
and off in turns: each turn with it lies between two without, so that a drift affects both alike.
The clients have real-time priority: beside vLLM on two cores they would starve, and measure that.
"""

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from goodput_agent_vllm.sending import PAUSE_S

from benchmarks.proxy_load import LoadConnection, connections
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.engine_server import MODEL
from tests.real_parts.ports import free_port
from tests.real_parts.vllm import PROMPT, Vllm, plugin_environment, switched_environment
from tests.real_parts.waiting import eventually

TARGET_TTFT_MS = 0.05
TARGET_RATE = 0.02
TARGET_CLIENT_MS, TARGET_BURST_MS = 0.3, 4.0
_PRIORITY = 5
_ROWS_WITHIN_S = 60.0
_SWITCHED = Path(__file__).with_name("middleware_switch.py")
_SWITCH_VARIABLE = "GOODPUT_BENCHMARK_SWITCH"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """So many clients at once; each sends so many streams of so many tokens in a turn."""

    at_once: int
    streams: int
    tokens: int
    # Turns with the middleware; there is one more without.
    rounds: int


# A turn takes about a second; all together take five minutes.
LOADS = (
    Load(at_once=1, streams=32, tokens=16, rounds=40),
    Load(at_once=16, streams=2, tokens=48, rounds=30),
    Load(at_once=64, streams=1, tokens=24, rounds=30),
)


@dataclass(slots=True)
class Turn:
    """The time to the first event of each request as its client saw it, by the request's id."""

    measured: bool
    tokens: int
    took_s: float = 0.0
    ttfts_s: dict[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.took_s

    @property
    def ttft_ms(self) -> float:
        """The median."""
        return 1e3 * median(self.ttfts_s.values())


def run() -> bool:
    """Print the figures; return whether all targets are met."""
    with (
        tempfile.TemporaryDirectory() as name,
        _engine(Path(name)) as (engine, agent, switch),
        _real_time(),
    ):
        turns = [asyncio.run(_turns(engine, switch, load)) for load in LOADS]
        rows_s = _rows_s(agent, {key for load in turns for turn in load for key in _ids(turn)})
    met = [_costs_little(load, of_load) for load, of_load in zip(LOADS, turns, strict=True)]
    met.append(_agree("at 1", turns[0], rows_s, typical_ms=TARGET_CLIENT_MS))
    burst = f"in bursts of {LOADS[-1].at_once}"
    met.append(
        _agree(burst, turns[-1], rows_s, typical_ms=TARGET_CLIENT_MS, late_ms=TARGET_BURST_MS)
    )
    return all(met)


@contextmanager
def _engine(folder: Path) -> Iterator[tuple[Vllm, AgentProcess, Path]]:
    """An engine, its agent, and the file of the switch."""
    (switch := folder / "switch").write_bytes(b"\0")
    port, socket = free_port(), folder / "vllm.sock"
    environment = plugin_environment(folder / "installed", socket)
    environment |= switched_environment(
        folder / "switched", environment, _SWITCHED, "SwitchedStatLogger"
    )
    environment[_SWITCH_VARIABLE] = str(switch)
    engine = Vllm(folder, port=port, spans=None, environment=environment)
    settings = {"engines": [{"name": "chat-0", "url": engine.url, "plugin_socket": str(socket)}]}
    with AgentProcess.with_settings(folder, AgentPorts.free(), settings) as agent, engine:
        yield engine, agent, switch


@contextmanager
def _real_time() -> Iterator[None]:
    """This process comes before all others, its children excepted."""
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        policy = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
        os.sched_setscheduler(0, policy, os.sched_param(_PRIORITY))
    except PermissionError:
        print("middleware: clients without real-time priority, so times may be theirs")
    try:
        yield
    finally:
        os.sched_setscheduler(0, *before)


async def _turns(engine: Vllm, switch: Path, load: Load) -> list[Turn]:
    async with connections(engine.port, load.at_once) as opened:
        await _turn(engine, opened, load, Turn(False, 1), "warm")
        turns = []
        for number in range(2 * load.rounds + 1):
            measured = number % 2 == 1
            with switch.open("r+b") as file:
                file.write(bytes([measured]))
            # What the plugin still keeps of the turn before is not sent in this one.
            await asyncio.sleep(1.5 * PAUSE_S)
            turn = Turn(measured, load.at_once * load.streams * load.tokens)
            await _turn(engine, opened, load, turn, f"{load.at_once}-{number}")
            turns.append(turn)
        return turns


async def _turn(
    engine: Vllm, opened: Sequence[LoadConnection], load: Load, turn: Turn, name: str
) -> None:
    async def client(place: int) -> None:
        for number in range(load.streams):
            request_id = f"{name}-{place}-{number}"
            request = _request(engine.port, load.tokens, request_id)
            turn.ttfts_s[request_id] = await opened[place].ttft_s(request)

    began_s = time.perf_counter()
    await asyncio.gather(*map(client, range(load.at_once)))
    turn.took_s = time.perf_counter() - began_s


def _request(port: int, tokens: int, request_id: str) -> bytes:
    """A request for a completion: each event of its stream is a token, also the first."""
    body: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "stream": True}
    data = json.dumps({**body, "max_tokens": tokens, "ignore_eos": True}).encode()
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nX-Request-Id: {request_id}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    ).encode() + data


def _ids(turn: Turn) -> Sequence[str]:
    return [*turn.ttfts_s] if turn.measured else []


def _rows_s(agent: AgentProcess, asked: set[str]) -> dict[str, float]:
    """The time to the first token in the row of each request."""

    def found() -> dict[str, float] | None:
        rows = agent.api.requests(limit="1000")
        rows_s = {row["request_id"]: row["ttft_s"] for row in rows if row["request_id"] in asked}
        return rows_s if len(rows_s) == len(asked) else None

    rows_s = eventually(found, within_s=_ROWS_WITHIN_S, what=f"{len(asked)} rows")
    assert rows_s is not None
    return rows_s


# Figures


def _costs_little(load: Load, turns: Sequence[Turn]) -> bool:
    rounds = [turns[place - 1 : place + 2] for place in range(1, len(turns), 2)]
    rates = [2 * on.rate / (before.rate + after.rate) for before, on, after in rounds]
    without = median(turn.rate for turn in turns if not turn.measured)
    rate = median(rates)
    print(
        f"middleware, tokens/s at {load.at_once}: {rate:.3f} of those without (target at most "
        f"{TARGET_RATE} apart), {_spread(rates, '.3f')}; {without:.0f} tokens/s without"
    )
    if load.at_once > 1:
        return abs(1 - rate) <= TARGET_RATE
    added_ms = [on.ttft_ms - (off.ttft_ms + next_off.ttft_ms) / 2 for off, on, next_off in rounds]
    base_ms = median(turn.ttft_ms for turn in turns if not turn.measured)
    print(
        f"middleware, TTFT p50 at 1: {median(added_ms):+.3f} ms (target at most "
        f"+{TARGET_TTFT_MS}), {_spread(added_ms, '+.3f')}; {base_ms:.2f} ms without"
    )
    return abs(1 - rate) <= TARGET_RATE and median(added_ms) <= TARGET_TTFT_MS


def _spread(rounds: Sequence[float], form: str) -> str:
    low, _, high = quantiles(rounds, n=4)
    return f"quartiles of {len(rounds)} rounds {low:{form}} to {high:{form}}"


def _agree(
    name: str,
    turns: Sequence[Turn],
    rows_s: dict[str, float],
    *,
    typical_ms: float,
    late_ms: float | None = None,
) -> bool:
    apart_ms = sorted(
        1e3 * (client_s - rows_s[request_id])
        for turn in turns
        if turn.measured
        for request_id, client_s in turn.ttfts_s.items()
    )
    at_median_ms = median(apart_ms)
    at_p99_ms = sorted(map(abs, apart_ms))[int(0.99 * len(apart_ms))]
    late = "" if late_ms is None else f" (target at most {late_ms:.0f})"
    print(
        f"middleware, TTFT of the client minus that of the row, {name}: median {at_median_ms:+.2f} "
        f"ms (target at most {typical_ms} apart), apart at p99 {at_p99_ms:.2f} ms{late}, "
        f"{len(apart_ms)} requests"
    )
    return abs(at_median_ms) <= typical_ms and (late_ms is None or at_p99_ms <= late_ms)
