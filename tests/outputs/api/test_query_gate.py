"""The gate of the API's queries, before an application that responds when the test lets it."""

import asyncio
import json
from typing import Any

import pytest

from agent.outputs.api.middleware import Message, QueryGate

PATH = "/api/v1/summary"


class Application:
    """An ASGI application whose response has two parts and waits for the test."""

    def __init__(self, *, begins: bool = False) -> None:
        self.go_on = asyncio.Event()
        self.calls = self.ended = 0
        self._begins = begins

    async def __call__(self, _scope: Any, _receive: Any, send: Any) -> None:
        self.calls += 1
        if not self._begins:
            await self.go_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await self.go_on.wait()
        await send({"type": "http.response.body", "body": b"there"})
        self.ended += 1


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


async def asked(gate: QueryGate, path: str = PATH) -> tuple[int, str]:
    """The status of a response, and the text or the sentence of it."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await gate({"type": "http", "path": path}, _nothing, send)
    start, *parts = sent
    assert [message["type"] for message in sent].count("http.response.start") == 1
    body = b"".join(part["body"] for part in parts).decode()
    return start["status"], json.loads(body)["detail"] if start["status"] == 503 else body


def test_a_query_that_is_too_late_is_refused_once_but_no_response_that_has_begun() -> None:
    async def scenario() -> None:
        application = Application()
        late = await asked(QueryGate(application, within_s=0.01))
        assert late == (503, "the database did not answer in time; ask again in a moment")
        # The query ends later, without a second response.
        application.go_on.set()
        while not application.ended:
            await asyncio.sleep(0)
        begun = Application(begins=True)
        asyncio.get_running_loop().call_later(0.05, begun.go_on.set)
        assert await asked(QueryGate(begun, within_s=0.01)) == (200, "there")

    asyncio.run(scenario())


def test_no_more_queries_run_than_may_and_other_paths_have_no_limit() -> None:
    async def scenario() -> None:
        application = Application()
        gate = QueryGate(application, within_s=60, most=2)
        running = [asyncio.create_task(asked(gate)) for _ in range(2)]
        while application.calls < 2:
            await asyncio.sleep(0)
        status, sentence = await asked(gate)
        assert (status, application.calls) == (503, 2)
        assert "ask again" in sentence
        health = asyncio.create_task(asked(gate, "/healthz"))
        while application.calls < 3:
            await asyncio.sleep(0)
        application.go_on.set()
        assert await asyncio.gather(*running, health) == [(200, "there")] * 3
        assert await asked(gate) == (200, "there")

    asyncio.run(scenario())


def test_a_failure_of_a_query_goes_on_to_the_server() -> None:
    async def failing(_scope: Any, _receive: Any, _send: Any) -> None:
        raise LookupError

    with pytest.raises(LookupError):
        asyncio.run(asked(QueryGate(failing, within_s=60)))
