"""One request by an id of any kind, also where several requests have that id."""

import pytest

from agent.records.request import EngineView, ProxyView, Status, Vantage
from tests.outputs.api.serving import Api
from tests.records.making import NOON, record


@pytest.mark.parametrize("number", range(3))
def test_a_span_tells_which_request_with_an_id_is_meant(api: Api, number: int) -> None:
    """Also where the newest hundred requests with this id are others."""
    api.store([record(n, request_id="same", started_at=NOON + n) for n in range(150)], [])
    item = api.query("requests/same", span_id=f"{number:016x}")
    assert item["trace_id"] == f"{number:032x}"
    assert len(item["others"]) == 99
    missing = api.get("/api/v1/requests/same", span_id="f" * 16)
    assert missing.status_code == 404
    assert missing.json()["detail"] == f"no request 'same' with the span '{'f' * 16}' is stored"


def test_the_span_of_the_proxy_finds_the_joined_request(api: Api) -> None:
    seen = {"proxy_span_id": "a" * 16, "engine_view": EngineView("chatcmpl-1", Status.OK)}
    joined = record(1, vantage=Vantage.JOINED, **seen)
    api.store([joined, record(2, request_id="request-1", started_at=NOON + 9)], [])
    assert api.query("requests/request-1", span_id="a" * 16)["trace_id"] == joined.trace_id


def test_a_request_without_an_id_is_found_by_its_trace(api: Api) -> None:
    api.store([record(1, request_id=None)], [])
    assert api.query(f"requests/{1:032x}")["request_id"] is None


IDS = ("mine", "chatcmpl-mine-0", "resp_1")


@pytest.mark.parametrize("request_id", IDS)
def test_a_request_is_found_by_each_of_its_ids(api: Api, request_id: str) -> None:
    client, engine, response = IDS
    views = {
        "proxied": ProxyView(response_id=response),
        "engine_view": EngineView(engine, Status.OK),
    }
    both = record(1, request_id=client, **views)
    api.store([both._replace(vantage=Vantage.JOINED, proxy_span_id="a" * 16), record(9)], [])
    found = api.query(f"requests/{request_id}")
    assert (found["trace_id"], found["request_id"], found["response_id"], found["others"]) == (
        both.trace_id,
        client,
        response,
        [],
    )
