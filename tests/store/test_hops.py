from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pytest
from sqlalchemy import Engine

from agent.catalog.definitions import Verdict
from agent.records.minute import RequestCost
from agent.records.objective import JudgedRequest
from agent.records.queries import Selection, Window
from agent.store import hops
from agent.store.minutes import MinuteStore
from agent.store.stored_queries import stored_queries
from agent.store.transactions import Joining, request_settle, request_write
from tests.store.making import NOON, counted_rollups, counted_rows
from tests.store.views import DUE, JUDGE, WAIT_S, engine_view, proxy_view, rows

# The router's span, which no one sends to the agent.
ROUTER = "beefbeefbeefbeef"
PREFILL, DECODE = "prefill-0", "decode-0"


class Agent:
    """Writes and settles with an engine that only prefills."""

    def __init__(
        self,
        engine: Engine,
        prefilling: Sequence[str] = (PREFILL,),
        wait_s: float | None = WAIT_S,
    ) -> None:
        joining = Joining(judge=JUDGE, wait_s=wait_s, prefilling=prefilling)
        self.write = request_write(engine, joining)
        self.settled = request_settle(engine, joining)


def prefill(number: int = 1, **given: Any) -> JudgedRequest:
    """The span of the prefill: one token, which the router drops."""
    values = {
        "parent_span_id": ROUTER,
        "engine": PREFILL,
        "output_tokens": 1,
        "started_at": NOON + 0.15,
        "ended_at": NOON + 0.25,
        "queue_s": 0.02,
        "e2e_s": 0.1,
    }
    return engine_view(number, 1, **(values | given))


def decode(number: int = 1, **given: Any) -> JudgedRequest:
    values = {"parent_span_id": ROUTER, "engine": DECODE, "started_at": NOON + 0.28}
    return engine_view(number, 2, **(values | {"ended_at": NOON + 1.3} | given))


def user(number: int = 1, **given: Any) -> JudgedRequest:
    """The proxy's view; to the proxy, the router is the engine."""
    return proxy_view(number, **({"engine": "router"} | given))


@pytest.mark.parametrize("order", list(permutations((prefill(), decode(), user()))))
def test_a_request_of_two_engines_is_one_row_of_the_one_that_decodes(
    sqlite: Engine, order: Sequence[JudgedRequest]
) -> None:
    agent = Agent(sqlite)
    for view in order:
        agent.write([view])
    agent.settled(DUE)
    hop, request = sorted(rows(sqlite), key=lambda row: row["counted"])
    assert (hop["engine"], hop["hop"], hop["verdict"]) == (PREFILL, True, Verdict.UNDETERMINED)
    assert (hop["counted"], hop["settles_at"]) == (False, None)
    assert (request["vantage"], request["engine_ttft_s"]) == ("joined", 0.1)
    assert (request["prefill_engine"], request["output_tokens"]) == (PREFILL, 21)
    assert (request["prefill_hop_s"], request["prefill_queue_s"]) == (0.1, 0.02)
    assert sum(tally.requests for tally in counted_rollups(sqlite).values()) == 6
    assert counted_rollups(sqlite) == counted_rows(sqlite)


def test_the_row_has_the_engine_that_decodes_not_the_router(sqlite: Engine) -> None:
    agent = Agent(sqlite)
    agent.write([prefill(), decode(), user()])
    agent.settled(DUE)
    assert [row["engine"] for row in rows(sqlite) if row["counted"]] == [DECODE]


def test_without_the_users_view_the_time_between_is_by_the_engines_clocks(sqlite: Engine) -> None:
    Agent(sqlite).write([prefill(), decode()])
    (request,) = [row for row in rows(sqlite) if not row["hop"]]
    assert request["prefill_gap_s"] == pytest.approx(0.03)


@pytest.mark.parametrize("order", list(permutations((prefill(), decode()))))
def test_without_a_proxy_the_request_is_counted_at_once(
    sqlite: Engine, order: Sequence[JudgedRequest]
) -> None:
    agent = Agent(sqlite, wait_s=None)
    counted = [item for view in order for item in agent.write([view]).counted]
    assert [item.record.engine for item in counted] == [DECODE]
    (request,) = [row for row in rows(sqlite) if row["counted"]]
    assert request["prefill_engine"] == PREFILL
    assert counted_rollups(sqlite) == counted_rows(sqlite)


@pytest.mark.parametrize("order", list(permutations((prefill(hop=True), decode()))))
@pytest.mark.parametrize("wait_s", [None, WAIT_S])
def test_a_span_that_is_a_hop_by_itself_needs_no_role(
    sqlite: Engine, order: Sequence[JudgedRequest], wait_s: float | None
) -> None:
    """SGLang names its span of a prefill so."""
    agent = Agent(sqlite, prefilling=(), wait_s=wait_s)
    for view in order:
        agent.write([view])
    agent.settled(DUE)
    hop, request = sorted(rows(sqlite), key=lambda row: row["counted"])
    assert (hop["hop"], hop["verdict"], hop["counted"]) == (True, Verdict.UNDETERMINED, False)
    assert (request["prefill_engine"], request["prefill_hop_s"]) == (PREFILL, 0.1)
    assert counted_rollups(sqlite) == counted_rows(sqlite)


def test_hops_are_found_by_the_requests_id_if_the_router_passes_no_trace_on(
    sqlite: Engine,
) -> None:
    shared: dict[str, Any] = {"request_id": "cmpl-7", "parent_span_id": None}
    Agent(sqlite).write([prefill(1, **shared), decode(2, **shared)])
    (request,) = [row for row in rows(sqlite) if not row["hop"]]
    assert request["prefill_engine"] == PREFILL


@pytest.mark.parametrize(
    "other",
    [
        decode(1, input_tokens=99),
        decode(1, started_at=NOON + 31.0, ended_at=NOON + 32.0),
        decode(2),
    ],
    ids=["another prompt", "much later", "another trace"],
)
def test_a_hop_of_another_request_is_left_alone(sqlite: Engine, other: JudgedRequest) -> None:
    Agent(sqlite).write([prefill(), other])
    assert {row["prefill_engine"] for row in rows(sqlite)} == {None}


def test_a_hop_that_may_be_of_two_requests_is_of_none(sqlite: Engine) -> None:
    twin = engine_view(1, 3, parent_span_id=ROUTER, engine=DECODE, ended_at=NOON + 1.3)
    Agent(sqlite).write([prefill(), decode(), twin])
    assert {row["prefill_engine"] for row in rows(sqlite)} == {None}


def test_a_hop_is_compared_with_the_requests_near_it_alone_in_a_trace_of_hours(
    sqlite: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []
    may_be_of = hops._may_be_of

    def counted(hop: hops.Row, request: hops.Row) -> bool:
        compared.append(request["id"])
        return may_be_of(hop, request)

    monkeypatch.setattr(hops, "_may_be_of", counted)
    later = [
        decode(1, span_id=f"{n:016x}", started_at=NOON + 60 * n, ended_at=NOON + 60 * n + 1)
        for n in range(1, 200)
    ]
    Agent(sqlite).write([prefill(), decode(), *later])
    attached = [row["prefill_engine"] for row in rows(sqlite) if row["prefill_engine"]]
    assert (attached, len(compared)) == ([PREFILL], 1)


def test_the_prefill_engines_minutes_have_its_hops(sqlite: Engine) -> None:
    Agent(sqlite).write([prefill(), decode()])
    minutes = MinuteStore(sqlite, prefill().record.agent or "")
    assert len(minutes.requests(PREFILL, NOON, NOON + 60.0).rows) == 1


def test_the_costs_of_engines_have_those_of_hops(sqlite: Engine) -> None:
    Agent(sqlite).write([prefill(), decode(parent_span_id=None)])
    minutes = MinuteStore(sqlite, prefill().record.agent or "")
    costs = [
        RequestCost(row=row, vantage="engine", complete=True, cost_usd=usd, gpu_hours=usd / 4)
        for row, usd in ((1, 0.5), (2, 2.0))
    ]
    minutes.write((), costs, NOON)
    window = Window(from_s=NOON, until=NOON + 60.0, ends_now=True)
    found = stored_queries(sqlite).costs_by("engine", window, Selection())
    assert {name: (each.requests, each.cost_usd) for name, each in found.items()} == {
        PREFILL: (0, 0.5),
        DECODE: (1, 2.0),
    }


@pytest.mark.parametrize("order", list(permutations((0, 1, 2))))
def test_without_roles_the_span_of_the_first_token_alone_is_not_the_engines_view(
    sqlite: Engine, order: Sequence[int]
) -> None:
    parent: dict[str, Any] = {"parent_span_id": user().record.span_id}
    views = (prefill(**parent), decode(**parent), user())
    agent = Agent(sqlite, prefilling=())
    for number in order:
        agent.write([views[number]])
    agent.settled(DUE)
    (request,) = [row for row in rows(sqlite) if row["counted"]]
    assert (request["vantage"], request["span_id"]) == ("joined", decode().record.span_id)
    assert counted_rollups(sqlite) == counted_rows(sqlite)


def test_without_roles_a_prefill_without_its_decode_is_no_request(sqlite: Engine) -> None:
    agent = Agent(sqlite, prefilling=())
    agent.write([prefill(parent_span_id=user().record.span_id), user()])
    agent.settled(DUE)
    assert [(row["vantage"], row["counted"]) for row in rows(sqlite)] == [
        ("proxy", True),
        ("engine", False),
    ]
