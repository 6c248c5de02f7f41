"""The planned requests of a scenario, and the clients that send them through a proxy.

Arrivals, token counts and clients that leave early are drawn from the seed. Only the arrival rate
and the lengths change the arrivals: another abort ratio changes which clients leave, not which
requests arrive."""

import asyncio
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import cycle
from random import Random
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from agent.simulator.batching import EngineRequest
from agent.simulator.scenario import Fault, Faults, Scenario, TrafficPhase
from agent.simulator.simulated_engine import Clock


def planned_requests(
    scenario: Scenario, new_id: Callable[[], str], faults: Faults | None = None
) -> Iterator[EngineRequest]:
    """Requests without end, in the order of their arrival. Ids come from `new_id`, not from the
    seed, because two simulators with one scenario must not send the same ids."""
    random = Random(f"{scenario.seed}: traffic")
    # Separate, so that tenants change no other figure. The first are the largest.
    whom = Random(f"{scenario.seed}: tenants")
    weights = [1 / (index + 1) for index in range(len(scenario.tenants))]
    deferring, failing, lengthening, answering, pausing = (EvenShare() for _ in range(5))
    faults = faults or Faults(scenario.faults)
    for arrived_s in _arrivals_s(scenario.phases, random):
        fault = faults.at(arrived_s)
        planned = _planned(scenario, arrived_s, random)
        if lengthening.strikes(fault.long_ratio):
            planned = replace(planned, prompt_tokens=fault.long_tokens)
        if answering.strikes(fault.long_output_ratio):
            tokens = fault.long_output_tokens
            planned = replace(planned, output_tokens=tokens, max_tokens=tokens)
        if pausing.strikes(fault.slow_client_ratio):
            planned = replace(planned, client_pause_s=fault.client_pause_s)
        cached = cached_tokens(scenario, fault, planned.prompt_tokens)
        for _ in range(fault.surge):
            yield replace(
                planned,
                request_id=new_id(),
                tenant=whom.choices(scenario.tenants, weights)[0] if weights else None,
                cached_tokens=cached,
                front_s=fault.front_s,
                deferred_s=fault.defer_s if deferring.strikes(fault.defer_ratio) else 0.0,
                fails=failing.strikes(fault.error_ratio),
            )


class EvenShare:
    """Selects a share of requests at even distances."""

    def __init__(self) -> None:
        self._owed = 0.0

    def strikes(self, ratio: float) -> bool:
        """Whether the next request is one of them."""
        self._owed += ratio
        struck = self._owed >= 1
        self._owed -= struck
        return struck


def cached_tokens(scenario: Scenario, fault: Fault, prompt_tokens: int) -> int:
    """The tokens of a prompt in the prefix cache: whole blocks, and never the last token.

    The cache has nothing of a prompt that is longer than those of the scenario.
    """
    if fault.cache_lost or prompt_tokens > scenario.input_tokens.max:
        return 0
    block = scenario.kv_cache.block_tokens
    return int(min(prompt_tokens - 1, scenario.cached_ratio * prompt_tokens)) // block * block


def _planned(scenario: Scenario, arrived_s: float, random: Random) -> EngineRequest:
    output_tokens = scenario.output_tokens.draw(random)
    return EngineRequest(
        request_id="",
        arrived_s=arrived_s,
        prompt_tokens=scenario.input_tokens.draw(random),
        output_tokens=output_tokens,
        max_tokens=scenario.output_tokens.max,
        leaves_after_tokens=_leaves_after(scenario.abort_ratio, output_tokens, random),
    )


def _arrivals_s(phases: Sequence[TrafficPhase], random: Random) -> Iterator[float]:
    """A Poisson process: gaps at the rate 1, scaled by the rate of each phase."""
    phase_starts_s = 0.0
    expected_arrivals = random.expovariate(1.0)
    for phase in cycle(phases):
        while expected_arrivals < phase.duration_s * phase.rate_per_s:
            yield phase_starts_s + expected_arrivals / phase.rate_per_s
            expected_arrivals += random.expovariate(1.0)
        expected_arrivals -= phase.duration_s * phase.rate_per_s
        phase_starts_s += phase.duration_s


def _leaves_after(abort_ratio: float, output_tokens: int, random: Random) -> int | None:
    """The token count after which the client leaves; before the last token, or None."""
    leaves, share = random.random() < abort_ratio, random.random()
    if not leaves or output_tokens == 1:
        return None
    return 1 + int(share * (output_tokens - 1))


_RETRY_S = 0.2
TENANT_HEADER = "X-Tenant"
# The completions' estimate: four characters are a token.
_TOKEN = "word"
# Kernels keep megabytes between two processes of one machine, unless the segments and the
# receiver's buffer are small. As many alternatives for each token as OpenAI's API allows make a
# response larger than these buffers.
_SLOW_SEGMENT_BYTES, _SLOW_BUFFER_BYTES, _ALTERNATIVES = 1400, 4096, 20


def _slow_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, *_ = address
    created = socket.socket(family, kind, protocol)
    created.setblocking(False)
    created.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SLOW_SEGMENT_BYTES)
    created.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SLOW_BUFFER_BYTES)
    return created


class Clients:
    """Sends each request when it arrives."""

    def __init__(self, proxy: str, model: str, clock: Clock) -> None:
        self._url = f"{proxy}/v1/chat/completions"
        self._model = model
        self._clock = clock

    async def send(self, planned: Iterator[EngineRequest]) -> None:
        """Send the requests that are still to come, until cancelled."""
        begun_s = self._clock.now_s()
        timeout = aiohttp.ClientTimeout(total=None)
        connections = aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=connections) as session,
            asyncio.TaskGroup() as tasks,
        ):
            for request in planned:
                # Those of a surge arrive at one time: the first is sent when it is over.
                if request.arrived_s >= begun_s:
                    await self._clock.sleep_until(request.arrived_s)
                    tasks.create_task(self._send(session, request))

    async def wait_for_proxy(self) -> None:
        """Return when the proxy listens: requests from before would all come to it at once."""
        to = urlsplit(self._url)
        while True:
            try:
                _, writer = await asyncio.open_connection(to.hostname, to.port)
            except OSError:
                await asyncio.sleep(_RETRY_S)
            else:
                writer.close()
                return

    async def _send(self, session: aiohttp.ClientSession, request: EngineRequest) -> None:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": _TOKEN * request.prompt_tokens}],
            "max_tokens": request.output_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        headers = {TENANT_HEADER: request.tenant or ""}
        # The engine died, or the proxy is stopping.
        with suppress(aiohttp.ClientError):
            if request.client_pause_s > 0:
                await self._send_slowly(body, headers, request)
                return
            async with session.post(self._url, json=body, headers=headers) as response:
                await self._read(response, request.leaves_after_tokens)

    async def _send_slowly(
        self, body: Mapping[str, Any], headers: Mapping[str, str], request: EngineRequest
    ) -> None:
        body = {**body, "logprobs": True, "top_logprobs": _ALTERNATIVES}
        connections = aiohttp.TCPConnector(socket_factory=_slow_socket)
        timeout = aiohttp.ClientTimeout(total=None)
        async with (
            aiohttp.ClientSession(
                timeout=timeout, connector=connections, read_bufsize=_SLOW_BUFFER_BYTES
            ) as session,
            session.post(self._url, json=body, headers=headers) as response,
        ):
            await response.content.readany()
            if response.ok:
                await asyncio.sleep(request.client_pause_s)
            async for _ in response.content.iter_any():
                pass

    async def _read(self, response: aiohttp.ClientResponse, tokens: int | None) -> None:
        """Read the stream to its end, or leave after `tokens`."""
        with suppress(ValueError):
            async for line in response.content:
                if tokens is not None and line.startswith(b"data: "):
                    tokens -= 1
                    if tokens <= 0:
                        return
