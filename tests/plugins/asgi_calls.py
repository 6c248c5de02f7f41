"""The middleware between a server and an application, both made by hand."""

import asyncio
import json
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from goodput_agent_vllm import front as fronts
from goodput_agent_vllm.front import Front
from goodput_agent_vllm.middleware import App, GoodputMiddleware, Message, Receive, Scope, Send
from goodput_agent_vllm.reporting import Reporter
from goodput_agent_vllm.sending import Sender

from agent.records.engine import ServedRequest
from agent.records.request import ProxyView
from agent.sources.plugin_records import PluginRecords, read_datagram
from tests.plugins.vllm_counts import finished, iteration

ENGINE = "chat-0"
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
WITHIN_S = 20.0

Pieces = Sequence[bytes]
STREAM_BODY = json.dumps({"model": "m", "stream": True, "messages": []}).encode()
WHOLE_BODY = json.dumps({"model": "m", "messages": []}).encode()
WHOLE_ANSWER = json.dumps(
    {
        "id": "chatcmpl-x",
        "model": "m",
        "choices": [{"index": 0, "message": {"content": "ab"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    }
).encode()


def event(text: str | None, reason: str | None = None) -> bytes:
    """An event of a stream."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
    payload = {"id": "chatcmpl-x", "model": "m", "choices": [choice]}
    return b"data: %s\n\n" % json.dumps(payload).encode()


STREAM = (event("a"), event("b"), event("c", "stop"), b"data: [DONE]\n\n")


class Agent:
    """The socket of an agent, and what arrives there."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "vllm.sock")
        self.records: list[PluginRecords] = []
        self._socket: socket.socket | None = None

    def listen(self) -> None:
        """Begin to listen."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(self.path)

    def stop(self) -> None:
        """Stop like an agent that is killed, but for the file of its socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            Path(self.path).unlink()

    def read(self) -> None:
        """Read what has come."""
        assert self._socket is not None
        while True:
            try:
                sent = self._socket.recv(1 << 20)
            except BlockingIOError:
                return
            content = read_datagram(sent, ENGINE, time.time())
            assert content is not None
            assert not content.refused
            self.records.append(content)

    @property
    def served(self) -> list[ServedRequest]:
        """The HTTP requests that have come."""
        return [each for content in self.records for each in content.served]

    @property
    def figures(self) -> list[str]:
        """The engine's ids of figures that came by themselves."""
        return [each.request_id for content in self.records for each in content.ended]

    @property
    def counts(self) -> dict[tuple[str, int], int]:
        """The sum of all counts by route and class of status."""
        counts: Counter[tuple[str, int]] = Counter()
        for each in (each for content in self.records for each in content.counts):
            counts[each.name, each.status_class] += each.count
        return dict(counts)

    async def until(self, found: Callable[[], Any]) -> Any:
        """Read until this is found."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                self.read()
                if value := found():
                    return value
                assert self._socket is not None
                readable = asyncio.Event()
                loop = asyncio.get_running_loop()
                loop.add_reader(self._socket, readable.set)
                try:
                    await readable.wait()
                finally:
                    loop.remove_reader(self._socket)

    async def until_served(self, count: int) -> None:
        """Read until there are so many HTTP requests."""
        await self.until(lambda: len(self.served) >= count)

    async def until_alone(self, engine_id: str) -> None:
        """Read until figures with this id came by themselves."""
        await self.until(lambda: engine_id in self.figures)

    async def only_served(self) -> ServedRequest:
        """The one HTTP request, once it is there."""
        await self.until(lambda: self.served)
        (served,) = self.served
        return served


class Call:
    """One call as uvicorn makes it, and what was sent to its client."""

    def __init__(
        self,
        pieces: Pieces = (STREAM_BODY,),
        *,
        path: str = CHAT,
        method: str = "POST",
        headers: Sequence[tuple[str, str]] = (),
        **scope: Any,
    ) -> None:
        self.scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers],
            "state": {},
            **scope,
        }
        self.sent: list[Message] = []
        self.gone = asyncio.Event()
        self._left = list(pieces)

    async def receive(self) -> Message:
        """The next piece of the body, then that the client left, once it has."""
        if self._left:
            piece = self._left.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(self._left)}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Send to the client."""
        self.sent.append(message)

    async def through(self, app: App) -> None:
        """Serve the call, and return when it was reported."""
        try:
            await app(self.scope, self.receive, self.send)
        finally:
            if fronts._front is not None:
                fronts._front.deferred.finish()

    @property
    def body(self) -> bytes:
        """The body that the client got."""
        return b"".join(message.get("body", b"") for message in self.sent)


async def whole_body(receive: Receive) -> bytes:
    """Read a request's body, as Starlette does."""
    pieces: list[bytes] = []
    while True:
        message = await receive()
        assert message["type"] == "http.request", "the client left"
        pieces.append(message["body"])
        if not message["more_body"]:
            return b"".join(pieces)


def named(scope: Scope, engine_id: str, **usage: Any) -> None:
    """Note a request's id where vLLM does."""
    counts = SimpleNamespace(**usage) if usage else None
    metadata = SimpleNamespace(request_id=engine_id, final_usage_info=counts)
    scope.setdefault("state", {})["request_metadata"] = metadata


async def respond(
    send: Send, body: Pieces, *, status: int = 200, kind: str = "text/event-stream"
) -> None:
    """Send a response in pieces, as Starlette does."""
    headers = [(b"content-type", kind.encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    for piece in body:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class Engine:
    """An application that responds as vLLM does, and its stat logger."""

    def __init__(self, reporter: Reporter, **responses: Any) -> None:
        self.reporter = reporter
        self.seen: list[Scope] = []
        self.bodies: list[bytes] = []
        self.ids = iter(responses.pop("ids", ()))
        self._responses = {"body": STREAM, **responses}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, whose figures come before its last event."""
        began_at = time.time()
        self.seen.append(scope)
        self.bodies.append(await whole_body(receive))
        engine_id = next(self.ids, "chatcmpl-x")
        named(scope, engine_id)
        await asyncio.sleep(0)
        self.end(engine_id, began_at)
        await respond(send, **self._responses)

    def end(self, engine_id: str, began_at: float, **values: Any) -> None:
        """The stat logger gets the figures of a choice."""
        now = time.time()
        ended = finished(request_id=engine_id, e2e_latency=now - began_at, **values)
        self.reporter.step(None, iteration(ended, at=now), 0)


Test = Callable[[Agent, Engine, App], Awaitable[None]]


def play(folder: Path, test: Test, **engine: Any) -> Front:
    """Run a test of one engine and its middleware; return the front of it."""
    agent = Agent(folder)
    agent.listen()
    with closing(Sender(agent.path, pause_s=0.0)) as sender:
        reporter = Reporter(sender)
        front = fronts._front = Front(reporter)
        played = Engine(reporter, **engine)
        try:
            asyncio.run(_played(test(agent, played, GoodputMiddleware(played))))
        finally:
            fronts._front = None
            agent.stop()
            if front._open_requests is not None:
                front._open_requests.close()
    return front


async def _played(test: Awaitable[None]) -> None:
    await test


def view(served: ServedRequest) -> ProxyView:
    """The client's view of a request."""
    assert served.record.proxied is not None
    return served.record.proxied
