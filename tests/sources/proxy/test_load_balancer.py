"""The load balancer, and engines that cannot be reached."""

import json
import os
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from agent.catalog.reasons import EjectionReason
from agent.sources.listening import open_socket
from agent.sources.proxy.exchange import Ending
from agent.sources.proxy.load_balancer import (
    Attempt,
    EngineLookup,
    LoadBalancer,
    OpenRequests,
    ProxiedEngine,
)
from agent.sources.proxy.outlier_detection import OutlierDetection, OutlierLimits
from agent.sources.proxy.relay_context import ProxyLimits
from tests.sources.proxy.wire import (
    ALL_HEALTHY,
    CHUNKED,
    GET,
    LIMITS,
    OK,
    Engine,
    Proxied,
    Recorder,
    Script,
    Visit,
    chunk,
    closing_after,
    hanging_after,
    post,
    proxying,
    responding,
)

ASK = post(b"{}")

A, B, C = (ProxiedEngine(name, f"http://{name}") for name in "abc")


def balancing(
    models: dict[str, set[str] | None] | None = None, unhealthy: str = ""
) -> tuple[LoadBalancer, OpenRequests]:
    def models_of(name: str) -> frozenset[str] | None:
        known = (models or {}).get(name)
        return None if known is None else frozenset(known)

    balancer = LoadBalancer((A, B, C), EngineLookup(models_of, lambda name: name not in unhealthy))
    return balancer, balancer.open_requests


def names(engines: Sequence[ProxiedEngine]) -> str:
    return "".join(engine.name for engine in engines)


def test_the_engine_with_the_fewest_open_requests_comes_first_and_equal_ones_take_turns() -> None:
    balancer, open_requests = balancing()
    assert [names(balancer.candidates(None))[0] for _ in range(6)] == list("abcabc")
    open_requests.add("a", 2)
    open_requests.add("c", 1)
    assert names(balancer.candidates(None)) == "bca"


@pytest.mark.parametrize(
    ("models", "unhealthy", "model", "tried"),
    [
        ({"a": {"x"}, "b": {"y", "z"}, "c": None}, "", "y", "b"),
        ({"a": {"x"}, "b": None, "c": None}, "", "unheard", "abc"),
        ({"a": {"x"}, "b": {"x"}}, "a", "x", "b"),
        # An engine without the model would say 404, as if the client had made a mistake.
        ({"a": {"x"}, "b": {"y"}, "c": None}, "a", "x", "a"),
        ({"a": {"x"}}, "abc", "x", "a"),
        ({"a": {"x"}}, "abc", None, "abc"),
    ],
)
def test_a_request_goes_to_healthy_engines_that_serve_its_model(
    models: dict[str, set[str] | None], unhealthy: str, model: str | None, tried: str
) -> None:
    balancer, open_requests = balancing(models, unhealthy)
    open_requests.add(tried[0], 9)
    assert sorted(names(balancer.candidates(model))) == list(tried)


class Attempts:
    """Requests at engines a and b, on a clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.outliers = OutlierDetection("ab", OutlierLimits())
        self.balancer = LoadBalancer((A, B), ALL_HEALTHY, None, self.outliers, lambda: self.now_s)

    def send(self, engine: ProxiedEngine, times: int = 1) -> Any:
        for _ in range(times):
            connection: Any = SimpleNamespace(status=None, head_at_s=0.0, read_at_s=0.0)
            Attempt(self.balancer, engine, counts=True).sent(connection)
        return connection

    def end(self, engine: ProxiedEngine, times: int, status: int = 200) -> None:
        """Send requests that get their responses at once."""
        for _ in range(times):
            attempt = Attempt(self.balancer, engine, counts=True)
            attempt.sent(SimpleNamespace(status=status))  # type: ignore[arg-type]
            attempt.answered(status, None)
            attempt.completed(status)
            attempt.close()

    def later(self, by_s: float) -> str:
        """Move the clock; returns the engines to try for a request then."""
        self.now_s += by_s
        return names(self.balancer.candidates(None, probes=True))


def test_a_hanging_engine_gets_no_more_requests_and_then_probes_alone() -> None:
    attempts, limits = Attempts(), OutlierLimits()
    attempts.send(A, 3)
    attempts.end(B, 3)
    assert attempts.later(limits.hold_s) == "b"
    assert not attempts.outliers.ejections
    assert attempts.later(limits.silent_s) == "b"
    assert attempts.outliers.ejections["a"].reason is EjectionReason.SILENT
    assert attempts.later(limits.base_s) == "ab"
    attempts.send(A)
    assert attempts.later(0.0) == "b", "one probe at a time"
    assert attempts.later(limits.silent_s) == "b"
    ejection = attempts.outliers.ejections["a"]
    assert ejection.until_s - ejection.at_s == 2 * limits.base_s, "the probe hangs, too"


def test_refusals_are_no_silence_and_do_not_hide_it() -> None:
    attempts, limits = Attempts(), OutlierLimits()
    attempts.end(A, 9, status=400)
    attempts.end(B, 9)
    assert set(attempts.later(limits.silent_s)) == {"a", "b"}
    attempts.send(A, 3)
    attempts.end(A, 9, status=400)
    attempts.end(B, 9)
    assert attempts.later(limits.hold_s) == "b"
    assert not attempts.outliers.ejections
    attempts.end(A, 9, status=400)
    assert attempts.later(limits.silent_s) == "b"
    assert attempts.outliers.ejections["a"].reason is EjectionReason.SILENT


def test_an_engine_that_streams_is_not_silent_while_new_requests_wait() -> None:
    attempts, limits = Attempts(), OutlierLimits()
    begun_s = attempts.now_s
    stream = attempts.send(A)
    stream.status, stream.head_at_s = 200, attempts.now_s
    for _ in range(6):
        attempts.send(A)
        attempts.end(B, 3)
        stream.read_at_s = attempts.now_s + limits.silent_s - 1
        attempts.later(limits.silent_s - 1)
        assert attempts.outliers.is_in("a", attempts.now_s)
    assert attempts.outliers.answered("a", begun_s + 1), "a stream that goes on is good"
    assert not attempts.outliers.ejections


def unreachable(name: str) -> ProxiedEngine:
    with open_socket("engine", "127.0.0.1", 0) as listening:
        return ProxiedEngine(name, f"http://127.0.0.1:{listening.getsockname()[1]}")


async def test_a_request_goes_to_the_next_engine_if_the_first_is_unreachable() -> None:
    recorder = Recorder()
    async with (
        Engine(responding(OK), "here") as engine,
        proxying(unreachable("gone"), engine.proxied, measuring=recorder) as proxied,
    ):
        for _ in range(4):
            assert (await proxied.ask(ASK)).body == b"ok"
        assert proxied.open_requests == {"gone": 0, "here": 0}
    tried = {tuple(call for call in each.calls if call[0] == "routed") for each in recorder.made}
    assert tried == {(("routed", "here"),), (("routed", "gone"), ("routed", "here"))}


async def test_if_no_engine_is_reachable_the_client_gets_a_502_with_the_reason() -> None:
    recorder, engines = Recorder(), [unreachable(name) for name in "abc"]
    async with proxying(*engines, measuring=recorder) as proxied:
        message = await proxied.ask(ASK)
        assert set(proxied.open_requests.values()) == {0}
    assert (message.status, message.all("content-type")) == (502, ["application/json"])
    # Two engines are tried, a and then b.
    assert json.loads(message.body)["error"] == {
        "message": "engine b sent no response: Connection refused",
        "type": "engine_unreachable",
        "code": 502,
    }
    calls = [("routed", "a"), ("routed", "b"), ("ended", Ending.UNREACHABLE)]
    assert recorder.made[0].calls == calls


@contextmanager
def deaf() -> Iterator[ProxiedEngine]:
    """An engine whose accept queue is full."""
    with socket.socket() as listening, socket.socket() as filling:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        filling.connect(listening.getsockname())
        yield ProxiedEngine("deaf", f"http://127.0.0.1:{listening.getsockname()[1]}")


async def test_the_connect_timeout_becomes_a_504() -> None:
    recorder = Recorder()
    limits = replace(LIMITS, connect_s=0.05)
    with deaf() as engine:
        async with proxying(engine, limits=limits, measuring=recorder) as proxied:
            message = await proxied.ask(ASK)
    assert recorder.made[0].calls == [("routed", "deaf"), ("ended", Ending.TIMEOUT)]
    assert message.status == 504
    assert json.loads(message.body)["error"]["message"] == (
        "engine deaf did not accept a connection within 0.05 s"
    )


def _fail(_: str) -> Any:
    raise RuntimeError("the lookup is broken")


@pytest.mark.parametrize(
    "lookup", [EngineLookup(_fail, lambda _: True), EngineLookup(lambda _: None, _fail)]
)
async def test_a_broken_lookup_is_counted_and_any_engine_is_used(lookup: EngineLookup) -> None:
    async with (
        Engine(responding(OK)) as one,
        Engine(responding(OK), "chat-1") as other,
        proxying(one.proxied, other.proxied, lookup=lookup) as proxied,
    ):
        assert (await proxied.ask(ASK)).body == b"ok"
        assert proxied.failures == {"choose": 1}


def test_each_worker_sees_the_open_requests_of_all_and_begins_with_none_of_its_own() -> None:
    counts = OpenRequests(["chat-0", "chat-1"], workers=2)
    counts.begin(0)
    counts.add("chat-0", 1)
    worker = os.fork()
    if worker == 0:
        # It ends without a word, as a killed one does.
        try:
            counts.begin(1)
            counts.add("chat-0", 2)
            counts.add("chat-1", 2)
        finally:
            os._exit(0)
    os.waitpid(worker, 0)
    assert dict(counts) == {"chat-0": 3, "chat-1": 2}
    # So they are for a process of a later supervisor.
    assert OpenRequests(["chat-0", "chat-1"], descriptor=counts.descriptor)["chat-1"] == 2
    # The worker after it learns how many requests it left open.
    assert counts.begin(1) == 4
    assert dict(counts) == {"chat-0": 1, "chat-1": 0}


OUTLIERS = OutlierLimits()
ASK_M = post(b'{"model": "m"}')


def failing(status: int, headers: str = "") -> bytes:
    return f"HTTP/1.1 {status} Wrong\r\n{headers}Content-Length: 2\r\n\r\nno".encode()


@dataclass
class Pair:
    """Engine `bad` with a script of its own and engine `good` behind a proxy, on a set clock."""

    bad: Engine
    good: Engine
    outliers: OutlierDetection
    recorder: Recorder
    now_s: float = 1000.0
    proxied: Proxied = field(init=False)

    async def ask(self, times: int = 1, request: bytes = ASK_M) -> list[int]:
        return [(await self.proxied.ask(request)).status for _ in range(times)]

    @property
    def got(self) -> dict[str, int]:
        return {engine.name: len(engine.requests) for engine in (self.bad, self.good)}

    @property
    def reason(self) -> EjectionReason | None:
        """Why `bad` is out of the rotation."""
        ejection = self.outliers.ejections.get("bad")
        return None if ejection is None else ejection.reason

    @property
    def routed(self) -> list[list[str]]:
        return [[c[1] for c in each.calls if c[0] == "routed"] for each in self.recorder.made]


@asynccontextmanager
async def pair(
    bad: Script,
    good: Script | None = None,
    limits: ProxyLimits = LIMITS,
    recorder: Recorder | None = None,
    lookup: EngineLookup = ALL_HEALTHY,
) -> AsyncIterator[Pair]:
    outliers = OutlierDetection(["bad", "good"], OUTLIERS)
    async with Engine(bad, "bad") as one, Engine(good or responding(OK), "good") as other:
        engines = Pair(one, other, outliers, recorder or Recorder())
        async with proxying(
            one.proxied,
            other.proxied,
            measuring=engines.recorder,
            lookup=lookup,
            limits=limits,
            outliers=outliers,
            monotonic=lambda: engines.now_s,
        ) as engines.proxied:
            yield engines
            assert engines.proxied.failures == {}


HANGING = hanging_after(b"")


# Both engines hang where a limit is tested, so that a slow machine is no failure of the other.
@pytest.mark.parametrize(
    ("script", "reason", "status"),
    [
        pytest.param(responding(failing(500)), EjectionReason.ERROR, 500, id="status"),
        pytest.param(closing_after(b""), EjectionReason.RESET, 502, id="reset"),
        pytest.param(closing_after(CHUNKED + chunk(b"1")), EjectionReason.RESET, 200, id="cut"),
        pytest.param(HANGING, EjectionReason.TIMEOUT, 504, id="timeout"),
    ],
)
async def test_three_failures_of_any_kind_eject_an_engine(
    script: Script, reason: EjectionReason, status: int
) -> None:
    times_out = script is HANGING
    limits = replace(LIMITS, answer_s=0.05) if times_out else LIMITS
    async with pair(script, script if times_out else None, limits) as engines:
        statuses = []
        while engines.reason is None:
            statuses += await engines.ask()
        assert statuses.count(status) >= 3 == engines.got["bad"]
        assert engines.reason is reason
        assert all(len(tried) == 1 for tried in engines.routed)


@pytest.mark.parametrize(
    ("error_status", "reason"),
    [
        (400, None),
        (429, None),
        (500, EjectionReason.ERROR),
        (501, None),
        (503, EjectionReason.UNAVAILABLE),
    ],
)
async def test_an_error_inside_a_response_is_judged_by_the_status_that_it_stands_for(
    error_status: int, reason: EjectionReason | None
) -> None:
    async with pair(responding(OK), recorder=Recorder(error_status=error_status)) as engines:
        for _ in range(8):
            assert await engines.ask(2) == [200, 200]
            engines.now_s += OUTLIERS.pause_s
        assert engines.reason is reason


@pytest.mark.parametrize("script", [responding(failing(500)), closing_after(b"")])
async def test_a_probe_that_fails_is_answered_by_another_engine(script: Script) -> None:
    async with pair(script) as engines:
        while engines.reason is None:
            await engines.ask()
        for length_s in (OUTLIERS.base_s, 2 * OUTLIERS.base_s):
            before = engines.got["bad"]
            engines.now_s += length_s
            assert await engines.ask(20) == [200] * 20
            assert engines.got["bad"] == before + 1
        assert ["bad", "good"] in engines.routed


async def test_the_measured_model_chooses_the_engine() -> None:
    own_name = EngineLookup(models=lambda name: frozenset({name}), healthy=lambda _: True)
    async with pair(responding(OK), recorder=Recorder(model="good"), lookup=own_name) as engines:
        await engines.ask(3)
        assert engines.routed == [["good"]] * 3


LISTS_M = EngineLookup(models=lambda _: frozenset("m"), healthy=lambda _: True)


async def test_a_404_for_a_model_that_the_engine_lists_is_a_failure_and_is_tried_again() -> None:
    recorder = Recorder(model="m")
    async with pair(responding(failing(404)), recorder=recorder, lookup=LISTS_M) as engines:
        assert await engines.ask(20) == [200] * 20
        assert engines.got["bad"] == 3
        assert engines.reason is EjectionReason.ERROR
        engines.now_s += OUTLIERS.base_s
        assert await engines.ask(20) == [200] * 20
        assert engines.got["bad"] == 4, "the probe"


@pytest.mark.parametrize(
    ("model", "path"),
    [("unknown", "/v1/completions"), (None, "/v1/completions"), ("m", "/v1/responses")],
)
async def test_any_other_404_is_the_clients_and_says_nothing_of_the_engine(
    model: str | None, path: str
) -> None:
    wrong, recorder = responding(failing(404)), Recorder(model=model)
    async with pair(wrong, wrong, recorder=recorder, lookup=LISTS_M) as engines:
        assert await engines.ask(20, post(b"{}", path)) == [404] * 20
        assert not engines.outliers.ejections
        assert engines.got == {"bad": 10, "good": 10}


async def test_a_503_is_answered_by_another_engine_and_its_retry_after_is_honoured() -> None:
    async with pair(responding(failing(503, "Retry-After: 7\r\n"))) as engines:
        assert await engines.ask(20) == [200] * 20
        assert engines.got["bad"] == 1
        (twice,) = [each for each in engines.recorder.made if each.names.count("routed") > 1]
        assert twice.names == ["routed", "routed", "answered", "chunk", "ended"]
        assert {request.body for request in engines.good.requests} == {b'{"model": "m"}'}
        for later_s, got in ((6.9, 1), (0.1, 2)):
            engines.now_s += later_s
            await engines.ask(20)
            assert engines.got["bad"] == got
        assert engines.reason is None
        assert engines.proxied.proxy.balancer.retried == {"bad": 2}


async def test_a_503_goes_to_the_client_if_no_other_engine_takes_the_request() -> None:
    async with pair(responding(failing(503)), responding(failing(503))) as engines:
        assert await engines.ask() == [503]
        assert engines.got == {"bad": 1, "good": 1}
    no_room_for_the_body = replace(LIMITS, kept_memory_bytes=0)
    async with pair(responding(failing(503)), limits=no_room_for_the_body) as engines:
        assert sorted(await engines.ask(2)) == [200, 503]


async def test_a_request_is_tried_at_two_engines_at_most() -> None:
    busy = responding(failing(503))
    async with Engine(busy, "a") as one, Engine(busy, "b") as two, Engine(busy, "c") as three:
        engines = (one, two, three)
        outliers = OutlierDetection([each.name for each in engines], OUTLIERS)
        proxied_engines = [each.proxied for each in engines]
        async with proxying(*proxied_engines, measuring=Recorder(), outliers=outliers) as proxied:
            assert (await proxied.ask(ASK_M)).status == 503
        assert sum(len(each.requests) for each in engines) == 2


async def test_a_429_goes_to_the_client_and_pauses_the_engine() -> None:
    async with pair(responding(failing(429, "Retry-After: 7\r\n"))) as engines:
        assert (await engines.ask(20)).count(429) == 1 == engines.got["bad"]
        engines.now_s += 7
        assert 429 in await engines.ask(2)


async def test_a_request_on_an_idle_connection_that_the_engine_closes_goes_to_another() -> None:
    async def closing(visit: Visit) -> None:
        await visit.request()
        await visit.send(OK)
        await visit.request()

    async with pair(closing) as engines:
        assert await engines.ask(20) == [200] * 20
        assert ["bad", "good"] in engines.routed
        assert engines.reason is None, "it is no failure of the engine"


async def test_mistakes_of_clients_and_lists_of_models_say_nothing_of_an_engine() -> None:
    async with pair(responding(failing(400)), responding(failing(501))) as engines:
        await engines.ask(40)
        assert not engines.outliers.ejections
    async with pair(responding(failing(500))) as engines:
        await engines.ask(40, GET)
        assert engines.reason is None


async def test_if_all_engines_answer_404_for_their_model_all_are_used() -> None:
    wrong, recorder = responding(failing(404)), Recorder(model="m")
    async with pair(wrong, wrong, recorder=recorder, lookup=LISTS_M) as engines:
        assert await engines.ask(40) == [404] * 40
        assert set(engines.outliers.ejections) == {"bad", "good"}
        assert min(engines.got.values()) > 10
