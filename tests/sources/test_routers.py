"""Routers in front of engines: their queue, rejections and ready engines under one set of names."""

import logging
from collections.abc import Iterator, Mapping

import pytest

from agent.catalog.other_programs import OTHER_PROGRAMS
from agent.catalog.routers import (
    ROUTER_ENDPOINTS,
    ROUTER_ERRORS,
    ROUTER_FACTS,
    ROUTER_REJECTIONS,
    ROUTER_REQUESTS,
    ROUTER_RUNNING,
    ROUTER_UP,
    ROUTER_WAITING,
    ROUTERS,
)
from agent.sources.routers import RouterSource
from tests.sources.engines.fixture_pages import body
from tests.sources.engines.wire import EngineServer

# Facts of each page by metric and reason.
FACTS: Mapping[str, Mapping[tuple[str, ...], float]] = {
    "router-llm-d-0.9": {
        (ROUTER_WAITING.name,): 9 + 2,
        (ROUTER_RUNNING.name,): 6 + 1,
        (ROUTER_ENDPOINTS.name,): 3,
        (ROUTER_REQUESTS.name,): 40 + 8 + 2,
        (ROUTER_ERRORS.name, "Internal"): 3 + 1,
        (ROUTER_ERRORS.name, "ResourceExhausted"): 5,
        (ROUTER_REJECTIONS.name, "RejectedCapacity"): 5,
        (ROUTER_REJECTIONS.name, "EvictedTTL"): 2,
    },
    "router-epp-1.0": {
        (ROUTER_WAITING.name,): 7,
        (ROUTER_RUNNING.name,): 4,
        (ROUTER_ENDPOINTS.name,): 2,
        (ROUTER_REQUESTS.name,): 12,
        (ROUTER_ERRORS.name, "Internal"): 1,
        (ROUTER_REJECTIONS.name, "RejectedNoEndpoints"): 3,
    },
    "router-dynamo": {
        (ROUTER_WAITING.name,): 3 + 1,
        (ROUTER_RUNNING.name,): 5,
        (ROUTER_REQUESTS.name,): 30 + 4 + 2,
        (ROUTER_ERRORS.name, "overload"): 4,
        (ROUTER_ERRORS.name, "internal"): 2,
        (ROUTER_REJECTIONS.name, "overload"): 4,
    },
}


@pytest.fixture
def server() -> Iterator[EngineServer]:
    with EngineServer() as running:
        yield running


@pytest.fixture
def router(server: EngineServer) -> Iterator[RouterSource]:
    source = RouterSource(name="front", url=server.url)
    yield source
    source.close()


def facts_of(router: RouterSource) -> dict[tuple[str, ...], float]:
    return {(name, *labels): value for (name, labels), value in router.facts.items()}


@pytest.mark.parametrize("page", FACTS)
def test_a_page_gives_its_facts_and_no_other(
    server: EngineServer, router: RouterSource, page: str
) -> None:
    server.answers("/metrics", body(page))
    router.poll(0.0)
    assert facts_of(router) == {**FACTS[page], (ROUTER_UP.name,): 1}
    assert router.status_text() == "ok"


def test_production_stacks_router_gives_its_own_requests_and_not_the_queues_of_engines(
    server: EngineServer, router: RouterSource
) -> None:
    server.answers("/metrics", body("router-production-stack"))
    router.poll(0.0)
    facts = facts_of(router)
    assert facts[ROUTER_RUNNING.name,] == 40 + 50 + 40 + 50
    assert (ROUTER_ENDPOINTS.name,) in facts
    assert (ROUTER_WAITING.name,) not in facts


def test_a_router_that_cannot_be_read_is_down_and_keeps_no_old_number(
    server: EngineServer, router: RouterSource, caplog: pytest.LogCaptureFixture
) -> None:
    assert facts_of(router) == {}
    assert router.status_text() == "is not read yet"
    server.answers("/metrics", body("router-dynamo"))
    router.poll(0.0)
    server.answers("/metrics", b"no", status=401)
    with caplog.at_level(logging.INFO):
        router.poll(1.0)
        router.poll(2.0)
        assert facts_of(router) == {(ROUTER_UP.name,): 0}
        router_problem = router.status_text()
        assert router_problem == "answered HTTP 401: it wants credentials"
        server.answers("/metrics", body("router-dynamo"))
        router.poll(3.0)
    assert facts_of(router)[ROUTER_UP.name,] == 1
    assert [each.getMessage() for each in caplog.records] == [
        f"router front cannot be read: {server.url}/metrics {router_problem}",
        "router front can be read again",
    ]


def test_a_page_of_no_router_is_named_as_that(server: EngineServer, router: RouterSource) -> None:
    server.answers("/metrics", body("vllm-0.32.0"))
    router.poll(0.0)
    assert facts_of(router) == {(ROUTER_UP.name,): 0}
    assert router.status_text().startswith("has no series of a known router (llm-d's endpoint")


@pytest.mark.parametrize(
    "series",
    [
        "dynamo_frontend_disconnected_clients 0",
        "# TYPE inference_pool_average_queue_size gauge",
        'llm_d_epp_flow_control_request_queue_duration_seconds_count{outcome="Dispatched"} 4',
    ],
)
def test_a_router_that_had_no_request_yet_is_up(
    server: EngineServer, router: RouterSource, series: str
) -> None:
    server.answers("/metrics", f"{series}\n".encode())
    router.poll(0.0)
    assert facts_of(router) == {(ROUTER_UP.name,): 1}
    assert router.status_text() == "ok"


def test_the_path_may_be_given(server: EngineServer) -> None:
    server.answers("/router/metrics", body("router-dynamo"))
    source = RouterSource(name="front", url=f"{server.url}/router/metrics")
    source.poll(0.0)
    source.close()
    assert source.status_text() == "ok"


def test_every_router_is_among_the_programs_that_are_given_in_place_of_an_engine() -> None:
    assert {router.engine for router in ROUTERS} <= {each.name for each in OTHER_PROGRAMS}


def test_every_fact_but_the_source_s_own_is_of_some_router() -> None:
    given = {fact for router in ROUTERS for fact in router.facts}
    assert given == set(ROUTER_FACTS) - {ROUTER_UP}
