"""Which engine gets a request, and what happens where it cannot be reached."""

import asyncio
import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from agent.sources.listening import open_socket
from agent.sources.proxy.exchange import Ending
from agent.sources.proxy.load_balancer import EngineLookup, LoadBalancer, ProxiedEngine
from tests.sources.proxy.recording import Recorded, Recorder
from tests.sources.proxy.wire import (
    LIMITS,
    OK,
    Engine,
    Visit,
    answering,
    in_loop,
    post,
    proxying,
    until_gone,
)

ASK = post(b"{}")

A, B, C = (ProxiedEngine(name, f"http://{name}") for name in "abc")


def choice(
    serves: dict[str, set[str] | None] | None = None, ill: str = ""
) -> tuple[LoadBalancer, dict[str, int]]:
    """A choice among a, b and c, and its counts."""

    def models(name: str) -> frozenset[str] | None:
        known = (serves or {}).get(name)
        return None if known is None else frozenset(known)

    chosen = LoadBalancer((A, B, C), EngineLookup(models, lambda name: name not in ill))
    return chosen, chosen.open_requests


def names(engines: Sequence[ProxiedEngine]) -> str:
    return "".join(engine.name for engine in engines)


# Choosing


def test_the_engine_with_the_fewest_requests_under_way_is_the_best() -> None:
    chosen, outstanding = choice()
    outstanding.update(a=2, b=0, c=1)
    assert names(chosen.candidates(None)) == "bca"


def test_engines_that_are_level_take_turns() -> None:
    chosen, _ = choice()
    assert [names(chosen.candidates(None))[0] for _ in range(6)] == list("abcabc")


def test_only_an_engine_that_serves_the_model_is_chosen() -> None:
    chosen, outstanding = choice({"a": {"x"}, "b": {"y", "z"}, "c": None})
    outstanding.update(b=9)
    assert names(chosen.candidates("y")) == "b"


def test_a_model_that_nobody_is_known_to_serve_may_be_anywhere() -> None:
    chosen, _ = choice({"a": {"x"}, "b": None, "c": None})
    assert sorted(names(chosen.candidates("unheard"))) == ["a", "b", "c"]


def test_an_engine_that_is_ill_is_left_alone() -> None:
    chosen, _ = choice({"a": {"x"}, "b": {"x"}}, ill="a")
    assert {names(chosen.candidates("x")) for _ in range(4)} == {"b"}


def test_where_all_are_ill_all_are_tried() -> None:
    chosen, _ = choice({"a": {"x"}}, ill="abc")
    assert names(chosen.candidates("x")) == "a"
    assert len(chosen.candidates(None)) == 3


# Over the wire


def held(asked: asyncio.Semaphore) -> Engine:
    """An engine that takes requests and keeps them."""

    async def script(visit: Visit) -> None:
        await visit.request()
        asked.release()
        await until_gone(visit.reader)

    return Engine(script)


@in_loop
async def test_requests_go_where_the_fewest_are_under_way() -> None:
    asked = asyncio.Semaphore(0)
    first, second = held(asked), held(asked)
    second.name = "chat-1"
    async with first, second, proxying(first.proxied, second.proxied) as proxied:
        clients = [proxied.client() for _ in range(6)]
        for context in clients:
            client = await context.__aenter__()
            client.writer.write(ASK)
            await asked.acquire()
        assert proxied.proxy.open_requests == {"chat-0": 3, "chat-1": 3}
        for context in clients:
            await context.__aexit__(None, None, None)


@in_loop
async def test_the_model_that_measuring_reads_leads_to_its_engine() -> None:
    def prepare(exchange: Recorded) -> None:
        exchange.model = "y"

    lookup = EngineLookup(
        models=lambda name: frozenset({"x" if name == "chat-0" else "y"}), healthy=lambda _: True
    )
    recorder = Recorder(prepare)
    async with (
        Engine(answering(OK)) as one,
        Engine(answering(OK), "chat-1") as other,
        proxying(one.proxied, other.proxied, measuring=recorder, lookup=lookup) as proxied,
    ):
        for _ in range(3):
            await proxied.ask(ASK)
        assert (one.visits, other.visits) == (0, 1)
    assert [exchange.told[0] for exchange in recorder.made] == [("routed", "chat-1")] * 3


def nowhere(name: str) -> ProxiedEngine:
    """An engine at a port that nobody listens on."""
    with open_socket("engine", "127.0.0.1", 0) as listening:
        return ProxiedEngine(name, f"http://127.0.0.1:{listening.getsockname()[1]}")


@in_loop
async def test_a_request_goes_to_the_next_engine_where_the_first_is_not_there() -> None:
    recorder = Recorder()
    async with (
        Engine(answering(OK), "here") as engine,
        proxying(nowhere("gone"), engine.proxied, measuring=recorder) as proxied,
    ):
        for _ in range(4):
            assert (await proxied.ask(ASK)).body == b"ok"
        assert proxied.proxy.open_requests == {"gone": 0, "here": 0}
    assert {exchange.told[0] for exchange in recorder.made} == {("routed", "here")}


@in_loop
async def test_where_no_engine_can_be_reached_the_client_is_told_in_a_sentence() -> None:
    recorder = Recorder()
    async with proxying(nowhere("a"), nowhere("b"), nowhere("c"), measuring=recorder) as proxied:
        message = await proxied.ask(ASK)
        assert set(proxied.proxy.open_requests.values()) == {0}
    error = json.loads(message.body)["error"]
    assert message.status == 502
    assert message.all("content-type") == ["application/json"]
    # Two are tried, and the turn begins with the first.
    assert error == {
        "message": "engine b sent no response: Connection refused",
        "type": "engine_unreachable",
        "code": 502,
    }
    assert recorder.made[0].calls == ["ended"]
    assert recorder.made[0].ending is Ending.UNREACHABLE


@contextmanager
def deaf() -> Iterator[ProxiedEngine]:
    """An engine whose queue of connections is full."""
    with socket.socket() as listening, socket.socket() as filling:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        filling.connect(listening.getsockname())
        yield ProxiedEngine("deaf", f"http://127.0.0.1:{listening.getsockname()[1]}")


@in_loop
async def test_an_engine_that_takes_no_connection_in_time_is_told_so() -> None:
    with deaf() as engine:
        async with proxying(engine, limits=replace(LIMITS, connect_s=0.05)) as proxied:
            message = await proxied.ask(ASK)
    assert message.status == 504
    assert json.loads(message.body)["error"]["message"] == (
        "engine deaf did not accept a connection within 0.05 s"
    )


def _fail(_: str) -> Any:
    raise RuntimeError("the lookup is broken")


@pytest.mark.parametrize(
    "lookup", [EngineLookup(_fail, lambda _: True), EngineLookup(lambda _: None, _fail)]
)
@in_loop
async def test_a_broken_lookup_is_counted_and_any_engine_is_used(lookup: EngineLookup) -> None:
    async with (
        Engine(answering(OK)) as one,
        Engine(answering(OK), "chat-1") as other,
        proxying(one.proxied, other.proxied, lookup=lookup) as proxied,
    ):
        assert (await proxied.ask(ASK)).body == b"ok"
        assert proxied.failures == {"choose": 1}
