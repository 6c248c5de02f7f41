"""Prefill and decode engines on the page: one request's first token, and the pools."""

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from tests.outputs.api.serving import Api, open_api
from tests.outputs.api.test_pool_routes import (
    CAPACITY,
    RUNNING,
    TRANSFERRED,
    WAITING,
    counts,
    serve,
)
from tests.real_parts.chromium import Opened, at, faults, opened_in
from tests.records.making import objective, record
from tests.records.minutes import minute

TWO_ENGINES: dict[str, Any] = {
    **{"engine": "decode-0", "ttft_s": 0.27, "queue_s": 0.22, "prefill_s": 0.05, "e2e_s": 3.0},
    **{"prefill_engine": "prefill-0", "prefill_hop_s": 0.52, "prefill_queue_s": 0.31},
    "prefill_gap_s": 0.02,
}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """A request of two engines, the hop of another one, and one of a single engine."""
    with open_api(tmp_path_factory.mktemp("pools")) as running:
        now = running.agent.now
        when = {"started_at": now - 60, "ended_at": now - 57}
        rows = [
            record(1, **TWO_ENGINES, **when),
            record(2, engine="prefill-0", hop=True, **when),
            record(3, **when),
        ]
        running.store(rows, [objective()])
        serve(
            running,
            prefill_0=counts({RUNNING: 2.0, WAITING: 6.0}),
            prefill_1=counts({RUNNING: 2.0, WAITING: 4.0}),
            decode_0=counts({RUNNING: 8.0, WAITING: 9.0, CAPACITY: 0.5}, **TRANSFERRED),
        )
        running.store_minutes(minute(2))
        yield running


@pytest.fixture(scope="module")
def there(browser: Browser, api: Api) -> Iterator[Opened]:
    with opened_in(browser, api.url) as page:
        yield page


def rows_of(page: Page, table: str) -> list[list[str]]:
    """The texts of a table's rows, heading first."""
    return [
        [row.locator("th").inner_text(), *row.locator("td").all_inner_texts()]
        for row in page.get_by_role("region", name=table).locator("tbody tr").all()
    ]


def test_a_request_of_two_engines_shows_where_the_time_to_its_first_token_went(
    there: Opened, api: Api
) -> None:
    at(there, api.url, "request?id=request-1")
    page = there.page
    parts = {name: time for name, time, _ in rows_of(page, "Parts of the time to its first token")}
    assert parts == {"router": "20 ms", "prefill": "520 ms", "KV wait": "220 ms", "decode": "50 ms"}
    bar = "first token: router 20 ms, prefill 520 ms, KV wait 220 ms, decode 50 ms"
    assert page.get_by_role("img", name=bar).is_visible()
    page.get_by_text("computed its prompt, after 310 ms in its queue; ").wait_for()
    page.get_by_text("Most of 810 ms is prefill: 64.2 %.").wait_for()
    assert faults(there, api.url, "request?id=request-1") == []
    page.get_by_role("link", name="prefill-0").click()
    page.wait_for_url("**/#now?*engine=prefill-0*")


def test_a_prefill_for_another_engine_says_that_no_figure_counts_it(
    there: Opened, api: Api
) -> None:
    there.page.goto(f"{api.url}/#request?id=request-2")
    html = there.html("Request request-2")
    assert "the prefill of a request that another engine decodes, so no figure counts it" in html


def test_a_request_of_one_engine_has_no_parts(there: Opened, api: Api) -> None:
    there.page.goto(f"{api.url}/#request?id=request-3")
    html = there.html("Request request-3")
    assert "first token went" not in html
    assert "another engine decodes" not in html


def test_pools_are_shown_with_the_one_to_grow(there: Opened, api: Api) -> None:
    at(there, api.url, "efficiency")
    page = there.page
    page.get_by_text("Prefill has 3.29 times the load of decode. Add a prefill engine.").wait_for()
    decode, prefill = rows_of(page, "Pools")
    unknown = "\N{EN DASH}"
    assert prefill[:5] == ["prefill", "prefill_0, prefill_1", "4", "10", "3.5"]
    assert prefill[9:] == [unknown, unknown, unknown]
    assert decode[:6] == ["decode", "decode_0", "8", "0.5", "1.06", "250 ms"]
    assert decode[9:] == ["100 ms", "200 B", "2"]
    assert faults(there, api.url, "efficiency") == []
