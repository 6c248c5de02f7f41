"""Processor time of the plugin's middleware, around an application that does nothing.

The streams are recorded from vLLM 0.32 and made longer by repeating their events with text. The
requests have a real connection, and the engine's figures come before their end. What the middleware
does later counts, too.
"""

import asyncio
import os
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import accumulate, count, cycle
from pathlib import Path
from types import SimpleNamespace

from goodput_agent_vllm import watched_request
from goodput_agent_vllm.datagrams import RequestFigures, request_record
from goodput_agent_vllm.front import shared_front
from goodput_agent_vllm.middleware import App, GoodputMiddleware, Message, Receive, Scope, Send
from goodput_agent_vllm.reporting import shared_reporter
from goodput_agent_vllm.sending import PATH_VARIABLE
from uvloop import new_event_loop

from agent.sources.proxy.exchange import RawHeaders
from benchmarks.proxy_measuring import CASES, HEAD, HEADERS, body_of, path_of, stream_of

TARGET_EVENT_US, TARGET_REQUEST_US = 0.6, 25.0
# The fastest round counts: other load on the machine only makes a round slower.
ROUNDS, IN_ROUND = 60, 10
_SHORT, _LONG = 64, 1088
# vLLM's id of each request.
_ENGINE_IDS = map("chatcmpl-{:032x}".format, count(1))
# Seconds between two reads of the clock: events of an engine do not come within a microsecond.
_GAPS_S = (0.0068, 0.0071, 0.0069, 0.0083, 0.0070, 0.0067, 0.0072)
# What a client of OpenAI's library sends, most of it.
_CLIENT: RawHeaders = (
    (b"host", b"127.0.0.1:8000"),
    (b"accept-encoding", b"gzip, deflate"),
    (b"connection", b"keep-alive"),
    (b"accept", b"application/json"),
    (b"content-type", b"application/json"),
    (b"user-agent", b"OpenAI/Python 2.8.1"),
    (b"x-stainless-lang", b"python"),
    (b"x-stainless-package-version", b"2.8.1"),
    (b"x-stainless-os", b"Linux"),
    (b"x-stainless-arch", b"x64"),
    (b"x-stainless-runtime", b"CPython"),
    (b"x-stainless-async", b"false"),
    (b"content-length", b"300"),
)


def run() -> bool:
    """Print the costs; return whether the targets are met."""
    set_clock()
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(_reader(folder)) as reader,
        _Connection() as connection,
        # The loop of vLLM's front.
        asyncio.Runner(loop_factory=new_event_loop) as runner,
    ):
        met = [runner.run(_is_cheap(reader, connection, *case)) for case in CASES]
        errors = shared_front()._errors
    print(f"middleware, errors while it measured: {errors} (target 0)")
    # Only streams of chat have targets.
    return met[0] and not errors


def set_clock() -> None:
    """Give the middleware a clock by which events are as far apart as an engine's."""
    steps_s = accumulate(cycle(_GAPS_S), initial=time.monotonic())
    watched_request.monotonic = steps_s.__next__  # type: ignore[attr-defined]


def _reader(folder: str) -> socket.socket:
    """The agent's end of the plugin's socket."""
    path = os.environ[PATH_VARIABLE] = str(Path(folder, "vllm.sock"))
    reader = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    reader.bind(path)
    return reader


class _Connection:
    """What uvicorn has of a request: its connection, and a message with its body."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self._client = socket.create_connection(listening.getsockname())
            self._server = listening.accept()[0]
        self.transport = SimpleNamespace(get_extra_info=lambda _: self._server)
        self.body = b""

    async def receive(self) -> Message:
        """Return the whole request."""
        return {"type": "http.request", "body": self.body, "more_body": False}

    def __enter__(self) -> "_Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._server.close()


async def _sent(message: Message) -> None:
    """Do nothing, as the client is not there."""


# When an application had sent the first event of each response.
_first_sent_ns: list[int] = []


def _app(events: Sequence[bytes], ended: Callable[[str], object]) -> App:
    start = {"type": "http.response.start", "status": 200, "headers": HEAD}
    first, *bodies = [
        {"type": "http.response.body", "body": event, "more_body": True} for event in events
    ]
    end = {"type": "http.response.body", "body": b"", "more_body": False}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        # vLLM waits for its engine here.
        await asyncio.sleep(0)
        await send(start)
        await send(first)
        _first_sent_ns.append(time.perf_counter_ns())
        for body in bodies:
            await send(body)
        # vLLM's front has the figures before it sends the end.
        ended(scope["state"]["request_metadata"].request_id)
        await send(end)

    return app


def _make_figures(engine_id: str) -> bytes:
    """What the stat logger does also without the middleware."""
    times = (0.0,) * 5
    return request_record(RequestFigures(time.time(), 9, 9, 0, 0, *times, "length", engine_id))


def _take_figures(engine_id: str) -> None:
    take = shared_reporter().take_figures
    assert take is not None, "the front takes the engine's figures"
    take(engine_id, _make_figures(engine_id))


def _scope(path: str) -> Scope:
    return {
        **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST"},
        **{"path": path, "root_path": "", "query_string": b"", "headers": [*_CLIENT, *HEADERS]},
        "state": {"request_metadata": SimpleNamespace(request_id=next(_ENGINE_IDS))},
    }


async def _is_cheap(reader: socket.socket, connection: _Connection, name: str, mark: bytes) -> bool:
    connection.body = body_of(name)
    # By the number of events.
    costs_us: dict[int, float] = {}
    for tokens in (_SHORT, _LONG):
        events = stream_of(name, mark, tokens)
        alone, watched = _app(events, _make_figures), GoodputMiddleware(_app(events, _take_figures))
        times_us: dict[App, list[float]] = {alone: [], watched: []}
        for _ in range(ROUNDS):
            for app, of_app in times_us.items():
                of_app.append(await _round_us(app, connection, path_of(name)))
            _drain(reader)
        without_us, with_us = (min(of_app) for of_app in times_us.values())
        costs_us[len(events)] = with_us - without_us
    (short, short_us), (long, long_us) = costs_us.items()
    event_us = (long_us - short_us) / (long - short)
    request_us = short_us - short * event_us
    with_us, without_us = [
        await _first_event_us(app, connection, path_of(name)) for app in (watched, alone)
    ]
    print(
        f"middleware, {name}: {event_us:.2f} us an event (target at most {TARGET_EVENT_US}), "
        f"{request_us:.1f} us a request (target at most {TARGET_REQUEST_US:.0f}), "
        f"{with_us - without_us:.1f} of them before the first event is sent"
    )
    return event_us <= TARGET_EVENT_US and request_us <= TARGET_REQUEST_US


async def _round_us(app: App, connection: _Connection, path: str) -> float:
    """Processor time of a request and its report, the mean of some."""
    scopes = [_scope(path) for _ in range(IN_ROUND)]
    before_s = time.thread_time()
    for scope in scopes:
        await app(scope, connection.receive, _sent)
    shared_front().deferred.finish()
    return 1e6 * (time.thread_time() - before_s) / IN_ROUND


async def _first_event_us(app: App, connection: _Connection, path: str) -> float:
    """Time until the first event of a response is sent, the least of many."""
    times_ns = []
    for _ in range(ROUNDS):
        scope, began_ns = _scope(path), time.perf_counter_ns()
        await app(scope, connection.receive, _sent)
        times_ns.append(_first_sent_ns[-1] - began_ns)
        shared_front().deferred.finish()
    return min(times_ns) / 1000


def _drain(reader: socket.socket) -> None:
    try:
        while reader.recv(1 << 20):
            pass
    except BlockingIOError:
        pass
