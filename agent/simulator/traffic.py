"""The planned requests of a scenario, and the clients that send them through a proxy.

Arrivals, token counts and clients that leave early are drawn from the seed. Only the arrival rate
and the lengths change the arrivals: another abort ratio changes which clients leave, not which
requests arrive."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import cycle
from random import Random

import aiohttp

from agent.simulator.batching import EngineRequest
from agent.simulator.scenario import Faults, Scenario, TrafficPhase
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
    deferring, failing, lengthening = _EvenShare(), _EvenShare(), _EvenShare()
    faults = faults or Faults(scenario.faults)
    for arrived_s in _arrivals_s(scenario.phases, random):
        fault = faults.at(arrived_s)
        planned = _planned(scenario, arrived_s, random)
        cached_tokens = 0 if fault.cache_lost else _cached(scenario, planned.prompt_tokens)
        if lengthening.strikes(fault.long_ratio):
            planned, cached_tokens = replace(planned, prompt_tokens=fault.long_tokens), 0
        for _ in range(fault.surge):
            yield replace(
                planned,
                request_id=new_id(),
                tenant=whom.choices(scenario.tenants, weights)[0] if weights else None,
                cached_tokens=cached_tokens,
                front_s=fault.front_s,
                deferred_s=fault.defer_s if deferring.strikes(fault.defer_ratio) else 0.0,
                fails=failing.strikes(fault.error_ratio),
            )


class _EvenShare:
    """Selects a share of requests at even distances."""

    def __init__(self) -> None:
        self._owed = 0.0

    def strikes(self, ratio: float) -> bool:
        """Whether the next request is one of them."""
        self._owed += ratio
        struck = self._owed >= 1
        self._owed -= struck
        return struck


def _cached(scenario: Scenario, prompt_tokens: int) -> int:
    """The tokens of a prompt in the prefix cache: whole blocks, and never the last token."""
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


class Clients:
    """Sends each request when it arrives."""

    def __init__(self, proxy: str, model: str, clock: Clock) -> None:
        self._url = f"{proxy}/v1/chat/completions"
        self._model = model
        self._clock = clock

    async def send(self, planned: Iterator[EngineRequest]) -> None:
        """Send the requests that are still to come, until cancelled."""
        timeout = aiohttp.ClientTimeout(total=None)
        connections = aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=connections) as session,
            asyncio.TaskGroup() as tasks,
        ):
            for request in planned:
                if request.arrived_s >= self._clock.now_s():
                    await self._clock.sleep_until(request.arrived_s)
                    tasks.create_task(self._send(session, request))

    async def _send(self, session: aiohttp.ClientSession, request: EngineRequest) -> None:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": _TOKEN * request.prompt_tokens}],
            "max_tokens": request.output_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        headers = {TENANT_HEADER: request.tenant or ""}
        try:
            async with session.post(self._url, json=body, headers=headers) as response:
                await self._read(response, request.leaves_after_tokens)
        except aiohttp.ClientConnectorError:
            # The proxy does not listen yet.
            await asyncio.sleep(_RETRY_S)
            await self._send(session, request)
        except aiohttp.ClientError:
            # The proxy or the engine is stopping.
            return

    async def _read(self, response: aiohttp.ClientResponse, tokens: int | None) -> None:
        """Read the stream to its end, or leave after `tokens`."""
        with suppress(ValueError):
            async for line in response.content:
                if tokens is not None and line.startswith(b"data: "):
                    tokens -= 1
                    if tokens <= 0:
                        return
