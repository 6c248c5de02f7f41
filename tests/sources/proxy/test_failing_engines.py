"""Engines that fail behind the proxy: who gets requests, and what clients get."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from agent.catalog.reasons import EjectionReason
from agent.sources.proxy.load_balancer import EngineLookup
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
    in_loop,
    post,
    proxying,
    responding,
    until_gone,
)

OUTLIERS = OutlierLimits()
ASK = post(b'{"model": "m"}')


def failing(status: int, headers: str = "") -> bytes:
    """A response with an error status."""
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

    async def ask(self, times: int = 1, request: bytes = ASK) -> list[int]:
        """Send requests one after the other; returns the statuses that clients get."""
        return [(await self.proxied.ask(request)).status for _ in range(times)]

    @property
    def got(self) -> dict[str, int]:
        """The number of requests that each engine read."""
        return {engine.name: len(engine.requests) for engine in (self.bad, self.good)}

    @property
    def reason(self) -> EjectionReason | None:
        """Why `bad` is out of the rotation."""
        ejection = self.outliers.ejections.get("bad")
        return None if ejection is None else ejection.reason

    @property
    def routed(self) -> list[list[str]]:
        """The engines that each request was sent to."""
        return [[c[1] for c in each.calls if c[0] == "routed"] for each in self.recorder.made]


@asynccontextmanager
async def pair(
    bad: Script,
    good: Script | None = None,
    limits: ProxyLimits = LIMITS,
    recorder: Recorder | None = None,
    lookup: EngineLookup = ALL_HEALTHY,
) -> AsyncIterator[Pair]:
    """Serve both engines behind a proxy."""
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


async def hanging(visit: Visit) -> None:
    """Read a request and send no response."""
    await visit.request()
    await until_gone(visit.reader)


# Both engines hang where a limit is tested, so that a slow machine is no failure of the other.
@pytest.mark.parametrize(
    ("script", "reason", "status"),
    [
        pytest.param(responding(failing(500)), EjectionReason.ERROR, 500, id="status"),
        pytest.param(closing_after(b""), EjectionReason.RESET, 502, id="reset"),
        pytest.param(closing_after(CHUNKED + chunk(b"1")), EjectionReason.RESET, 200, id="cut"),
        pytest.param(hanging, EjectionReason.TIMEOUT, 504, id="timeout"),
    ],
)
@in_loop
async def test_three_failures_of_any_kind_eject_an_engine(
    script: Script, reason: EjectionReason, status: int
) -> None:
    times_out = script is hanging
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
@in_loop
async def test_an_error_inside_a_response_is_judged_by_the_status_that_it_stands_for(
    error_status: int, reason: EjectionReason | None
) -> None:
    async with pair(responding(OK), recorder=Recorder(error_status=error_status)) as engines:
        for _ in range(8):
            assert await engines.ask(2) == [200, 200]
            engines.now_s += OUTLIERS.pause_s
        assert engines.reason is reason


@pytest.mark.parametrize("script", [responding(failing(500)), closing_after(b"")])
@in_loop
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


LISTS_M = EngineLookup(models=lambda _: frozenset("m"), healthy=lambda _: True)


@in_loop
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
@in_loop
async def test_any_other_404_is_the_clients_and_says_nothing_of_the_engine(
    model: str | None, path: str
) -> None:
    wrong, recorder = responding(failing(404)), Recorder(model=model)
    async with pair(wrong, wrong, recorder=recorder, lookup=LISTS_M) as engines:
        assert await engines.ask(20, post(b"{}", path)) == [404] * 20
        assert not engines.outliers.ejections
        assert engines.got == {"bad": 10, "good": 10}


@in_loop
async def test_a_503_is_answered_by_another_engine_and_its_retry_after_is_honoured() -> None:
    async with pair(responding(failing(503, "Retry-After: 7\r\n"))) as engines:
        assert await engines.ask(20) == [200] * 20
        assert engines.got["bad"] == 1
        engines.now_s += 6.9
        await engines.ask(20)
        assert engines.got["bad"] == 1
        engines.now_s += 0.1
        await engines.ask(20)
        assert engines.got["bad"] == 2
        assert engines.reason is None
        assert engines.proxied.proxy.balancer.retried == {"bad": 2}


@in_loop
async def test_the_other_engine_gets_the_same_body_and_both_tries_are_one_exchange() -> None:
    async with pair(responding(failing(503))) as engines:
        await engines.ask(2, post(b"the whole body"))
        assert [request.body for request in engines.good.requests] == [b"the whole body"] * 2
        (twice,) = [each for each in engines.recorder.made if each.names.count("routed") > 1]
        assert twice.names == ["routed", "routed", "answered", "chunk", "ended"]


@in_loop
async def test_a_503_of_both_engines_goes_to_the_client() -> None:
    async with pair(responding(failing(503)), responding(failing(503))) as engines:
        assert await engines.ask() == [503]
        assert engines.got == {"bad": 1, "good": 1}


@in_loop
async def test_without_room_for_the_body_a_503_goes_to_the_client() -> None:
    limits = replace(LIMITS, kept_memory_bytes=0)
    async with pair(responding(failing(503)), limits=limits) as engines:
        assert sorted(await engines.ask(2)) == [200, 503]


@in_loop
async def test_a_429_goes_to_the_client_and_pauses_the_engine() -> None:
    async with pair(responding(failing(429, "Retry-After: 7\r\n"))) as engines:
        assert (await engines.ask(20)).count(429) == 1 == engines.got["bad"]
        engines.now_s += 7
        assert 429 in await engines.ask(2)


@in_loop
async def test_a_request_on_an_idle_connection_that_the_engine_closes_goes_to_another() -> None:
    async def closing(visit: Visit) -> None:
        await visit.request()
        await visit.send(OK)
        await visit.request()

    async with pair(closing) as engines:
        assert await engines.ask(20) == [200] * 20
        assert ["bad", "good"] in engines.routed
        assert engines.reason is None, "it is no failure of the engine"


@in_loop
async def test_mistakes_of_clients_and_lists_of_models_say_nothing_of_an_engine() -> None:
    async with pair(responding(failing(400)), responding(failing(501))) as engines:
        await engines.ask(40)
        assert not engines.outliers.ejections
    async with pair(responding(failing(500))) as engines:
        await engines.ask(40, GET)
        assert engines.reason is None


@in_loop
async def test_if_all_engines_answer_404_for_their_model_all_are_used() -> None:
    wrong, recorder = responding(failing(404)), Recorder(model="m")
    async with pair(wrong, wrong, recorder=recorder, lookup=LISTS_M) as engines:
        assert await engines.ask(40) == [404] * 40
        assert set(engines.outliers.ejections) == {"bad", "good"}
        assert min(engines.got.values()) > 10
