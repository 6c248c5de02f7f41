"""Clients of a live demo: they send an engine's planned requests through the agent's proxy."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress

import aiohttp

from agent.simulator.engine_steps import EngineRequest
from agent.simulator.simulated_engine import Clock

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
