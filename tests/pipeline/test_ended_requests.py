"""Ended requests and records of the same requests, in every order and with ids that repeat."""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, cast

import pytest

from agent.analysis.joined_record import served_row
from agent.analysis.verdicts import Judge
from agent.catalog.reasons import PluginDropped
from agent.errors import StoreUnavailable
from agent.outputs.prometheus.meter import Meter
from agent.pipeline import ended_requests
from agent.pipeline.ended_requests import EARLY_S, OWN_ROW_AFTER_S, EndedRequests, EndedRows
from agent.pipeline.request_pipeline import ClientLabels, TenantLabels
from agent.records.engine import EndedRequest, ServedRequest
from agent.records.objective import JudgedRequest, WriteResult
from agent.records.request import ProxyView, RequestRecord, Status, Vantage
from agent.sources.open_requests import OpenRequest
from agent.sources.proxy.measuring.served_request import record_bytes
from agent.store.writing import RequestWriter
from tests.store.making import NOON, Clock, ended_request, request


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def dropped() -> Counter[tuple[str, PluginDropped]]:
    return Counter()


@pytest.fixture
def held(clock: Clock, dropped: Counter[tuple[str, PluginDropped]]) -> EndedRequests:
    def count(engine: str, reason: PluginDropped, number: int) -> None:
        dropped[engine, reason] += number

    return EndedRequests({"chat-0", "chat-1"}, count, clock)


def span(number: int = 1, **given: Any) -> RequestRecord:
    values: dict[str, Any] = {
        **{"request_id": "chatcmpl-1", "model": None, "agent": None},
        **{"queue_s": 0.25, "prefill_s": 0.5, "decode_s": 1.0, "ttft_s": 0.9, "e2e_s": 2.0},
        **{"input_tokens": 100, "output_tokens": 11},
    }
    return request(number, **(values | given)).record


def proxied(number: int = 1, **given: Any) -> RequestRecord:
    view: dict[str, Any] = {"response_id": "chatcmpl-1", "choices": 1}
    view.update({name: given.pop(name) for name in list(given) if name in view})
    values: dict[str, Any] = {
        "vantage": Vantage.PROXY,
        "request_id": "1",
        "route": "/v1/chat/completions",
        "proxied": ProxyView(**view),
        "ttft_s": 1.0,
        "e2e_s": 2.2,
        "ended_at": NOON + 1.35,
        **dict.fromkeys(("queue_s", "prefill_s", "decode_s", "input_tokens", "output_tokens")),
    }
    return span(number, **{**values, **given})


def own(held: EndedRequests, clock: Clock) -> list[str]:
    clock.now += OWN_ROW_AFTER_S
    return [each.request_id for each in held.due()]


def test_a_span_gets_what_only_the_plugin_knows(held: EndedRequests, clock: Clock) -> None:
    held.on_ended(ended_request())
    record = held.with_figures(span())
    assert record == span(preemptions=2, cached_tokens=32, finish_reason="length")
    assert own(held, clock) == []


def test_a_retried_span_gets_the_same_again(held: EndedRequests) -> None:
    held.on_ended(ended_request())
    assert held.with_figures(span()) == held.with_figures(span())
    # Another span with this id is another request.
    assert held.with_figures(span(2)).preemptions is None


def test_an_error_of_the_engine_is_the_status_of_its_row(held: EndedRequests) -> None:
    held.on_ended(ended_request(finish_reason="error"))
    assert held.with_figures(span()).status is Status.ERROR


def test_a_proxied_record_gets_the_engines_view(held: EndedRequests, clock: Clock) -> None:
    held.on_ended(ended_request())
    record = held.with_figures(proxied())
    # The user's latencies stay.
    assert (record.ttft_s, record.e2e_s) == (1.0, 2.2)
    assert (record.queue_s, record.prefill_s, record.decode_s) == (0.25, 0.5, 1.0)
    assert (record.input_tokens, record.output_tokens, record.cached_tokens) == (100, 11, 32)
    assert (record.preemptions, record.finish_reason) == (2, "length")
    view = record.engine_view
    assert view is not None
    assert (view.request_id, view.status, view.ttft_s) == ("chatcmpl-1", Status.OK, 0.9)
    assert (view.tpot_s, view.e2e_s) == (0.1, 2.0)
    assert view.holdback_s == pytest.approx(0.1)
    assert own(held, clock) == []


def test_values_of_the_response_stay(held: EndedRequests) -> None:
    held.on_ended(ended_request())
    record = held.with_figures(
        proxied(input_tokens=99, output_tokens=10, finish_reason="tool_calls")
    )
    assert (record.input_tokens, record.output_tokens) == (99, 10)
    assert record.finish_reason == "tool_calls"


def test_both_views_of_one_request_get_the_figures(held: EndedRequests, clock: Clock) -> None:
    held.on_ended(ended_request())
    assert held.with_figures(proxied(1)).preemptions == 2
    assert held.with_figures(span(2)).preemptions == 2
    assert own(held, clock) == []


@pytest.mark.parametrize(
    ("request_id", "given"),
    [
        ("cmpl-abc-0", {"response_id": "cmpl-abc"}),
        ("resp_abc_0", {"response_id": "resp_abc", "route": "/v1/responses"}),
        # The client left before the response began, so it has only the id that the proxy sent.
        ("chatcmpl-mine", {"response_id": None, "request_id": "mine"}),
        ("cmpl-mine-0", {"response_id": None, "request_id": "mine", "route": "/v1/completions"}),
    ],
)
def test_the_proxys_ids_find_those_of_the_engine(
    held: EndedRequests, request_id: str, given: dict[str, Any]
) -> None:
    held.on_ended(ended_request(request_id=request_id))
    assert held.with_figures(proxied(**given)).preemptions == 2


def test_requests_with_a_repeated_id_are_distinguished_by_their_figures(
    held: EndedRequests,
) -> None:
    held.on_ended(ended_request(preemptions=1, e2e_s=2.0))
    held.on_ended(ended_request(preemptions=2, e2e_s=3.0))
    held.on_ended(ended_request(preemptions=3, e2e_s=3.0, output_tokens=12))
    assert held.with_figures(span(1, e2e_s=3.0004)).preemptions == 2
    assert held.with_figures(span(2, e2e_s=3.0, output_tokens=12)).preemptions == 3
    assert held.with_figures(span(3, e2e_s=9.0)).preemptions is None
    assert held.with_figures(span(4)).preemptions == 1


def test_choices_of_one_request_are_distinguished_by_their_phases(
    held: EndedRequests, clock: Clock
) -> None:
    for number in range(3):
        held.on_ended(ended_request(preemptions=number, queue_s=0.1 * number))
    found = [held.with_figures(span(n, queue_s=0.1 * n)).preemptions for n in (2, 0, 1)]
    assert found == [2, 0, 1]
    assert own(held, clock) == []


def test_a_proxied_request_of_several_choices_gets_their_sums(
    held: EndedRequests, clock: Clock
) -> None:
    for number in range(3):
        held.on_ended(ended_request(preemptions=number))
    record = held.with_figures(proxied(choices=3))
    assert (record.preemptions, record.output_tokens) == (3, 33)
    # The times of one choice are not the request's.
    assert record.queue_s is None
    assert record.engine_view is None
    assert own(held, clock) == []


def test_another_engines_request_is_another_one(held: EndedRequests, clock: Clock) -> None:
    held.on_ended(ended_request(engine="chat-1"))
    assert held.with_figures(span()).preemptions is None
    assert own(held, clock) == ["chatcmpl-1"]


def test_a_record_that_comes_first_gets_its_figures_later(
    held: EndedRequests, clock: Clock
) -> None:
    assert held.with_figures(span()) == span()
    held.on_ended(ended_request())
    late, superseded = held.take_late()
    assert [(each.key, each.ended) for each in late] == [
        ((f"{1:032x}", f"{1:016x}"), ended_request())
    ]
    assert superseded == []
    assert held.take_late() == ([], [])
    assert own(held, clock) == []


def test_a_record_does_not_wait_for_ever_for_figures(held: EndedRequests, clock: Clock) -> None:
    held.with_figures(span())
    clock.now += EARLY_S
    held.with_figures(span(2, request_id="another"))
    held.on_ended(ended_request())
    assert held.take_late() == ([], [])


def test_a_request_without_any_record_gets_a_row_once(held: EndedRequests, clock: Clock) -> None:
    held.on_ended(ended_request(finish_reason="abort"))
    assert held.due() == []
    clock.now += OWN_ROW_AFTER_S
    (due,) = held.due()
    # Until it is stored, it is due again.
    assert held.due() == [due]
    held.stored({due: ("a", "b")})
    assert held.due() == []
    assert held.take_late() == ([], [])


@pytest.mark.parametrize("while_written", [True, False])
def test_a_record_that_comes_after_the_own_row_or_while_it_is_written_replaces_it(
    held: EndedRequests, clock: Clock, while_written: bool
) -> None:
    held.on_ended(ended_request())
    clock.now += OWN_ROW_AFTER_S
    (due,) = held.due()
    if while_written:
        held.with_figures(span())
    held.stored({due: ("own", "row")})
    if not while_written:
        assert held.with_figures(span()).preemptions == 2
    assert held.take_late() == ([], [("own", "row")])
    # The own row was counted.
    assert held.was_counted(span())
    assert not held.was_counted(span(2))


def test_at_the_end_of_the_agent_only_what_clients_left_is_due(held: EndedRequests) -> None:
    held.on_ended(ended_request())
    held.on_ended(ended_request(request_id="left", finish_reason="abort"))
    held.hurry()
    assert [each.request_id for each in held.due()] == ["left"]


def test_memory_has_bounds(
    held: EndedRequests,
    clock: Clock,
    dropped: Counter[tuple[str, PluginDropped]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("MAX_WAITING", "MAX_OWN_ROWS", "MAX_EARLY"):
        monkeypatch.setattr(ended_requests, name, 10)
    for number in range(30):
        held.on_ended(ended_request(request_id=f"chatcmpl-{number}"))
        held.with_figures(span(number, request_id=f"other-{number}"))
    assert held.held == 10
    assert dropped == {("chat-0", PluginDropped.TOO_MANY_WAIT): 20}
    for turn in range(3):
        clock.now += OWN_ROW_AFTER_S
        held.stored({each: ("own", each.request_id) for each in held.due()})
        for number in range(9):
            held.on_ended(ended_request(request_id=f"turn-{turn}-{number}"))
    held.due()
    assert held.held <= 20
    clock.now += ended_requests.OWN_ROW_KEPT_S
    held.due()
    assert held.held <= 10


def test_one_id_for_all_requests_is_no_burden(held: EndedRequests, clock: Clock) -> None:
    """Each look-up is of a few of them; all get their rows."""
    for number in range(5000):
        held.on_ended(ended_request(preemptions=number, e2e_s=float(number)))
        assert held.with_figures(span(number, e2e_s=float(number))).preemptions == number
    assert own(held, clock) == []
    assert held.held == 0


# Requests that the middleware saw


def served(number: int = 1, *choices: EndedRequest, **given: Any) -> ServedRequest:
    return ServedRequest(proxied(number, **given), choices or (ended_request(),))


def test_a_request_that_the_middleware_saw_is_stored_without_waiting(
    held: EndedRequests, clock: Clock
) -> None:
    held.on_served(served())
    assert held.take_served() == [served()]
    assert held.take_served() == []
    assert own(held, clock) == [], "its figures have no row of their own"


def test_a_span_of_a_request_that_the_middleware_saw_has_no_row(held: EndedRequests) -> None:
    held.on_served(served())
    # In the client's trace the span is no child of the row's span.
    assert held.complete(span(7, parent_span_id="c" * 16)) is None
    assert held.complete(span(7, parent_span_id="c" * 16)) is None, "its export may be repeated"
    other = span(8)
    assert held.complete(other) == other, "the next request with this id"


def test_a_request_that_the_middleware_saw_is_remembered_while_its_span_may_be_repeated(
    held: EndedRequests, clock: Clock
) -> None:
    held.on_served(served())
    clock.now += 299.0
    held.due()
    assert held.complete(span(7)) is None
    clock.now += 1.0
    held.due()
    assert held.complete(span(7)) is not None
    assert held.held == 0


def test_a_span_that_came_first_loses_its_row(held: EndedRequests) -> None:
    early = span(7)
    assert held.complete(early) == early
    held.on_served(served())
    assert held.take_late() == ([], [(early.trace_id, early.span_id)])


def test_each_choice_of_a_served_request_has_a_span(held: EndedRequests) -> None:
    two = (ended_request(queue_s=0.25), ended_request(queue_s=0.35))
    held.on_served(served(1, *two, choices=2))
    assert held.complete(span(7, queue_s=0.25)) is None
    assert held.complete(span(8, queue_s=0.35)) is None
    assert held.complete(span(9)) is not None


def test_what_came_through_the_proxy_of_this_agent_is_the_proxys_row(clock: Clock) -> None:
    both = EndedRequests({"chat-0"}, lambda *_: None, clock, has_proxy=True)
    both.on_served(served()._replace(proxied=True))
    assert both.take_served() == []
    assert both.with_figures(proxied()).preemptions == 2
    both.on_served(served(2))
    assert len(both.take_served()) == 1, "a client that goes past the proxy"


def test_without_a_proxy_of_this_agent_the_middleware_has_the_row(held: EndedRequests) -> None:
    held.on_served(served()._replace(proxied=True))
    assert len(held.take_served()) == 1


def test_served_requests_wait_while_the_database_is_away(
    held: EndedRequests,
    dropped: Counter[tuple[str, PluginDropped]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ended_requests, "MAX_SERVED", 2)
    for number in (1, 2, 3):
        held.on_served(served(number))
    assert dropped == {("chat-0", PluginDropped.TOO_MANY_WAIT): 1}
    taken = held.take_served()
    held.on_served(served(4))
    held.give_back_served(taken)
    assert held.take_served() == [served(1), served(2), served(4)]


# Requests whose front died


class Writer:
    """Takes requests, or says that the database is away."""

    def __init__(self) -> None:
        self.away = False
        self.stored: list[JudgedRequest] = []

    def submit(self, judged: Sequence[JudgedRequest]) -> Future[WriteResult]:
        result: Future[WriteResult] = Future()
        if self.away:
            result.set_exception(StoreUnavailable("the database is away"))
        else:
            self.stored += judged
            result.set_result(WriteResult([*judged], [*judged], [*judged]))
        return result


def ended_rows(held: EndedRequests, writer: Writer, meter: Meter) -> EndedRows:
    labels = ClientLabels(
        answered=lambda *_: None,
        is_served=lambda _: True,
        tenants=TenantLabels((), 10),
        on_replaced=meter.label_replaced,
    )
    return EndedRows(
        held,
        meter,
        agent="a0",
        judge=Judge(()),
        writer=cast(RequestWriter, writer),
        amend=lambda *_: None,
        model_of=lambda _: None,
        on_counted=lambda _: None,
        labels=labels,
        now=lambda: NOON + 60,
    )


def test_requests_that_were_open_when_their_front_died_are_stored_as_failed(
    held: EndedRequests,
) -> None:
    record = proxied(status=Status.ERROR, ttft_s=None, e2e_s=None, ended_at=NOON)
    sent = b"\0" + record_bytes(record._replace(engine=None))
    silent = OpenRequest(NOON, 50.0, None, sent)
    streamed = OpenRequest(NOON, 50.0, 53.5, sent)
    old = replace(silent, arrived_at=NOON - 100_000)
    meter, writer = Meter((), ["chat-1"]), Writer()
    rows = ended_rows(held, writer, meter)
    requests = [silent, streamed, old, replace(silent, record=b"\0garbage")]
    writer.away = True
    with pytest.raises(StoreUnavailable):
        rows.on_front_ended("chat-1", requests)
    writer.away = False
    rows.on_front_ended("chat-1", requests)
    stored = [each.record for each in writer.stored]
    assert [row.ended_at for row in stored] == [NOON, NOON + 3.5], "when it was heard last"
    assert {(row.status, row.engine, row.agent) for row in stored} == {
        (Status.ERROR, "chat-1", "a0")
    }


def test_what_the_proxy_of_this_agent_saw_needs_no_row_of_a_dead_front(clock: Clock) -> None:
    both = EndedRequests({"chat-0"}, lambda *_: None, clock, has_proxy=True)
    sent = record_bytes(proxied(status=Status.ERROR, ended_at=NOON))
    writer = Writer()
    ended_rows(both, writer, Meter((), ["chat-0"])).on_front_ended(
        "chat-0",
        [OpenRequest(NOON, 50.0, None, flag + sent) for flag in (b"\1", b"\0")],
    )
    assert len(writer.stored) == 1


def test_a_response_of_several_turns_has_the_phases_of_its_first_one() -> None:
    turns = tuple(ended_request(request_id=f"resp_1_{n}", preemptions=n + 1) for n in range(3))
    row = served_row(ServedRequest(proxied(route="/v1/responses", response_id="resp_1"), turns))
    assert (row.queue_s, row.prefill_s, row.decode_s) == (0.25, 0.5, None)
    assert row.preemptions == 1 + 2 + 3


@pytest.mark.parametrize("parent", [None, "c" * 16])
def test_the_span_of_a_served_request_is_below_its_client_or_the_front(
    parent: str | None,
) -> None:
    record = proxied(parent_span_id=parent)
    row = served_row(ServedRequest(record, (ended_request(),)))
    assert row.parent_span_id == (parent or record.span_id)


@pytest.mark.parametrize("by_middleware", [False, True])
def test_an_engine_whose_plugin_was_found_is_learned_by_its_first_request(
    clock: Clock, by_middleware: bool
) -> None:
    found: set[str] = set()
    held = EndedRequests(found, lambda *_: None, clock)
    assert held.complete(span()) == span()
    if by_middleware:
        held.on_served(served())
    else:
        held.on_ended(ended_request())
    assert found == {"chat-0"}
    assert held.complete(span(2)) != span(2)
