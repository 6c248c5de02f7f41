"""Routers' views: the engine's row has the time since the router; a failure is counted once."""

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pytest
from sqlalchemy import Engine

from agent.catalog.definitions import Verdict
from agent.records.objective import JudgedRequest
from agent.records.request import Status, Vantage
from agent.store import routers
from agent.store.joining import ROUTER_WAIT_S
from agent.store.transactions import Joining, request_settle, request_write
from tests.store.making import NOON, counted_rollups, counted_rows, request
from tests.store.views import JUDGE, RECEIVED_AT, WAIT_S, engine_view, judged, proxy_view, rows

GATEWAY = "9a7e9a7e9a7e9a7e"
PREFILL, DECODE = "prefill-0", "decode-0"
LATEST = RECEIVED_AT + ROUTER_WAIT_S + WAIT_S


class Agent:
    def __init__(
        self, engine: Engine, *, wait_s: float | None = None, prefilling: Sequence[str] = ()
    ) -> None:
        joining = Joining(judge=JUDGE, wait_s=wait_s, prefilling=prefilling)
        self.write = request_write(engine, joining)
        self.settle = request_settle(engine, joining)


def router(number: int = 1, **given: Any) -> JudgedRequest:
    """The router's view of a request: from 0.2 s before the engine's arrival to its end."""
    values: dict[str, Any] = {
        "span_id": f"{number:x}".rjust(16, "f"),
        "parent_span_id": GATEWAY,
        "vantage": Vantage.ROUTER,
        "started_at": NOON,
        "ended_at": NOON + 1.5,
        "http_status": 200,
        "service_name": "llm-d-disagg-sidecar",
    }
    values |= dict.fromkeys(("engine", "ttft_s", "tpot_s", "e2e_s"), None)
    return judged(request(number, **(values | given)).record)


def failed(number: int = 1, **given: Any) -> JudgedRequest:
    return router(number, **({"status": Status.ERROR, "http_status": 502} | given))


def of_engine(number: int = 1, child: int = 2, **given: Any) -> JudgedRequest:
    values = {"parent_span_id": "dec0dec0dec0dec0", "engine": DECODE, "started_at": NOON + 0.2}
    return engine_view(number, child, **(values | {"ended_at": NOON + 1.4} | given))


def counted(engine: Engine) -> list[tuple[str, str]]:
    found = [(row["vantage"], row["status"]) for row in rows(engine) if row["counted"]]
    assert sum(tally.requests for tally in counted_rollups(engine).values()) == 6 * len(found)
    assert counted_rollups(engine) == counted_rows(engine)
    return sorted(found)


@pytest.mark.parametrize("order", list(permutations((router(), of_engine()))))
@pytest.mark.parametrize("wait_s", [None, WAIT_S])
def test_the_engines_row_has_the_time_since_the_router_and_the_routers_is_not_counted(
    sqlite: Engine, order: Sequence[JudgedRequest], wait_s: float | None
) -> None:
    agent = Agent(sqlite, wait_s=wait_s)
    for view in order:
        agent.write([view])
    agent.settle(LATEST)
    assert counted(sqlite) == [("engine", "ok")]
    (row,) = [row for row in rows(sqlite) if row["counted"]]
    assert row["router_wait_s"] == pytest.approx(0.2)
    assert (row["ttft_s"], row["started_at"]) == (0.1, NOON + 0.2)


def test_the_request_of_two_engines_has_the_time_since_the_router_and_its_prefill(
    sqlite: Engine,
) -> None:
    prefill = {"engine": PREFILL, "output_tokens": 1, "e2e_s": 0.1, "ended_at": NOON + 0.15}
    agent = Agent(sqlite, prefilling=(PREFILL,))
    agent.write([of_engine(1, 1, started_at=NOON + 0.05, **prefill), router(), of_engine()])
    (row,) = [row for row in rows(sqlite) if row["counted"]]
    assert (row["router_wait_s"], row["prefill_hop_s"]) == (pytest.approx(0.2), 0.1)
    assert [row["router_wait_s"] for row in rows(sqlite) if row["hop"]] == [None]


def test_the_users_view_is_joined_beside_a_routers(sqlite: Engine) -> None:
    agent = Agent(sqlite, wait_s=WAIT_S)
    user = proxy_view(1, started_at=NOON - 0.1, ended_at=NOON + 1.6, engine=DECODE)
    for view in (router(), of_engine(), user):
        agent.write([view])
    agent.settle(LATEST)
    assert counted(sqlite) == [("joined", "ok")]
    (row,) = [row for row in rows(sqlite) if row["counted"]]
    assert (row["router_wait_s"], row["ttft_s"]) == (pytest.approx(0.2), 0.3)


def test_a_failure_that_no_engine_saw_is_an_error_after_its_wait(sqlite: Engine) -> None:
    agent = Agent(sqlite)
    assert agent.write([failed()]).counted == []
    assert agent.settle(RECEIVED_AT + ROUTER_WAIT_S - 1.0).counted == []
    (request,) = agent.settle(LATEST).counted
    assert (request.record.vantage, request.record.http_status) == (Vantage.ROUTER, 502)
    assert request.judgement.verdict is Verdict.MISSED
    assert counted(sqlite) == [("router", "error")]
    assert agent.settle(LATEST + 400.0).counted == []


@pytest.mark.parametrize("order", list(permutations((failed(), of_engine()))))
@pytest.mark.parametrize("wait_s", [None, WAIT_S])
def test_a_failure_after_the_engine_is_the_status_of_its_row(
    sqlite: Engine, order: Sequence[JudgedRequest], wait_s: float | None
) -> None:
    agent = Agent(sqlite, wait_s=wait_s)
    for view in order:
        agent.write([view])
    agent.settle(LATEST)
    assert counted(sqlite) == [("engine", "error")]
    (row,) = [row for row in rows(sqlite) if row["counted"]]
    assert (row["http_status"], row["verdict"]) == (502, Verdict.MISSED)


def test_a_failure_after_the_prefill_alone_is_an_error(sqlite: Engine) -> None:
    agent = Agent(sqlite, prefilling=(PREFILL,))
    agent.write([of_engine(engine=PREFILL, output_tokens=1), failed()])
    agent.settle(LATEST)
    assert counted(sqlite) == [("router", "error")]


def test_a_failure_that_the_proxy_saw_is_counted_once(sqlite: Engine) -> None:
    agent = Agent(sqlite, wait_s=WAIT_S)
    around = {"started_at": NOON - 0.1, "ended_at": NOON + 1.6}
    agent.write([failed(), proxy_view(1, status=Status.ERROR, **around)])
    agent.settle(LATEST)
    assert counted(sqlite) == [("proxy", "error")]


def again(**given: Any) -> JudgedRequest:
    later = {"span_id": "cafecafecafecafe", "started_at": NOON + 1.55, "ended_at": NOON + 3.0}
    return router(1, **(later | given))


def test_a_try_that_a_gateway_repeated_is_not_counted(sqlite: Engine) -> None:
    agent = Agent(sqlite)
    engine = of_engine(started_at=NOON + 1.6, ended_at=NOON + 2.9)
    agent.write([failed(), again(), engine])
    agent.settle(LATEST)
    assert counted(sqlite) == [("engine", "ok")]
    (row,) = [row for row in rows(sqlite) if row["counted"]]
    assert row["router_wait_s"] == pytest.approx(0.05)


@pytest.mark.parametrize(
    "other",
    [
        again(parent_span_id="0123012301230123"),
        again(started_at=NOON + 9.0, ended_at=NOON + 9.5),
        again(started_at=NOON + 1.0),
        of_engine(started_at=NOON + 1.2, ended_at=NOON + 2.0),
    ],
    ids=["another parent", "much later", "at the same time", "of an engine that ended later"],
)
def test_another_request_of_the_trace_hides_no_failure(
    sqlite: Engine, other: JudgedRequest
) -> None:
    agent = Agent(sqlite)
    agent.write([failed(), other])
    agent.settle(LATEST)
    assert ("router", "error") in counted(sqlite)


def test_requests_of_one_trace_at_one_time_get_no_routers(sqlite: Engine) -> None:
    agent = Agent(sqlite)
    agent.write([router(), router(1, span_id="abbaabbaabbaabba"), of_engine(), of_engine(1, 3)])
    assert {row["router_wait_s"] for row in rows(sqlite)} == {None}
    assert counted(sqlite) == [("engine", "ok")] * 2


def test_successes_of_engines_that_no_one_watches_are_no_requests(sqlite: Engine) -> None:
    agent = Agent(sqlite)
    assert agent.write([router()]).counted == []
    assert agent.settle(LATEST).counted == []
    assert counted(sqlite) == []


def test_a_view_is_compared_with_those_of_its_time_alone_however_long_the_trace_is(
    sqlite: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []
    is_within = routers._is_within

    def counting(inner: routers.Row, outer: routers.Row) -> bool:
        compared.append(inner["id"])
        return is_within(inner, outer)

    monkeypatch.setattr(routers, "_is_within", counting)
    views: list[JudgedRequest] = []
    for number in range(1, 101):
        at = NOON + 5 * number
        own: dict[str, Any] = {"trace_id": "ab" * 16, "request_id": f"chat-{number}"}
        views.append(router(number, **own, started_at=at, ended_at=at + 1.5))
        views.append(of_engine(number, 1000 + number, **own, started_at=at + 0.2, ended_at=at + 1))
    Agent(sqlite).write(views)
    waits = [row["router_wait_s"] for row in rows(sqlite) if row["vantage"] == Vantage.ENGINE]
    assert waits == [pytest.approx(0.2)] * 100
    assert len(compared) <= 200
