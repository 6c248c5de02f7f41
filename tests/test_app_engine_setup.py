"""Which sources of figures an agent has seen of an engine, by the requests that it has."""

from typing import Any

import pytest

from agent.analysis.joined_record import own_record, served_row
from agent.app.engine_setup import SeenViews
from agent.records.engine import ServedRequest
from agent.records.request import ProxyView, RequestRecord, Vantage
from tests.records.making import judged, record
from tests.store.making import NOON, ended_request

PROXIED = record(1, vantage=Vantage.PROXY, proxied=ProxyView(), parent_span_id=None)
IN_FRONT = served_row(ServedRequest(PROXIED, (ended_request(),)))
REFUSED = served_row(ServedRequest(PROXIED))
PLUGIN_ALONE = own_record(ended_request(), agent="a", model="m", received_at=NOON)
SPAN = record(2, service_name="chat-0")
JOINED = record(3, vantage=Vantage.JOINED, service_name="chat-0")


def row(of: RequestRecord) -> dict[str, Any]:
    """The columns of a stored row that say where it is from."""
    engine_id = None if of.engine_view is None else of.engine_view.request_id
    names = ("vantage", "ended_at", "span_id", "proxy_span_id", "service_name")
    return {**{name: getattr(of, name) for name in names}, "engine_request_id": engine_id}


def test_requests_of_a_plugin_say_whether_it_measures_them_in_the_front() -> None:
    views = SeenViews(has_proxy=False)
    assert views.is_measured_in_front("chat-0", None) is None
    views.counted_of_plugin(judged([PLUGIN_ALONE]))
    assert views.is_measured_in_front("chat-0", None) is False
    views.counted_of_plugin(judged([IN_FRONT]))
    assert views.is_measured_in_front("chat-0", None) is True
    assert not views.has_spans("chat-0", None)
    assert not views.was_proxied("chat-0")


def test_a_refused_request_that_waited_for_a_span_did_not_come_through_a_proxy() -> None:
    views = SeenViews(has_proxy=False)
    views.counted(judged([REFUSED]))
    assert not views.was_proxied("chat-0")
    assert views.is_measured_in_front("chat-0", None) is True


def test_the_engines_next_start_may_be_without_the_middleware() -> None:
    views = SeenViews(has_proxy=False)
    views.counted_of_plugin(judged([IN_FRONT]))
    restarted_at = IN_FRONT.ended_at + 1
    assert views.is_measured_in_front("chat-0", restarted_at) is None
    views.counted(judged([SPAN._replace(ended_at=restarted_at + 1)]))
    assert views.is_measured_in_front("chat-0", restarted_at) is False


@pytest.mark.parametrize(
    ("stored", "has_proxy", "spans", "proxied", "in_front"),
    [
        (SPAN, False, True, False, False),
        (JOINED, True, True, True, False),
        (PROXIED, True, False, True, None),
        (IN_FRONT, True, False, False, True),
        (PLUGIN_ALONE, True, False, False, False),
        # A request that vLLM refused: nothing but the settings tells it from the proxy's.
        (REFUSED, False, False, False, True),
    ],
)
def test_rows_of_an_earlier_run_say_what_saw_them(
    stored: RequestRecord, has_proxy: bool, spans: bool, proxied: bool, in_front: bool | None
) -> None:
    views = SeenViews(has_proxy=has_proxy)
    views.learn_stored("chat-0", [row(stored)])
    assert views.has_spans("chat-0", None) is spans
    assert views.was_proxied("chat-0") is proxied
    assert views.is_measured_in_front("chat-0", None) is in_front
