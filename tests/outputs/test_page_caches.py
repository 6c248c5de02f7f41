"""Whether caches and drafts pay, on the page."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.outputs.api.serving import Api, open_api
from tests.outputs.api.test_engine_counts import counts, saving
from tests.outputs.test_page_pools import rows_of
from tests.real_parts.chromium import opened_in

OFFLOAD, DRAFTS = "KV values loaded instead of computed", "Speculative decoding, last hour"


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    with open_api(tmp_path) as running:
        yield running


def test_the_view_of_efficiency_says_whether_caches_and_drafts_pay(
    browser: Browser, api: Api
) -> None:
    api.store_engine_sample("chat-0", api.agent.now, saving())
    api.store_engine_sample("chat-1", api.agent.now, counts())
    with opened_in(browser, f"{api.url}/#efficiency") as there:
        there.html("Do drafts pay?")
        assert rows_of(there.page, OFFLOAD) == [
            ["chat-0", "400", "100", "25 %", "2 s", "500 ms", "pays"]
        ]
        ((engine, *figures),) = rows_of(there.page, DRAFTS)
        unknown = "\N{EN DASH}"
        assert (engine, figures[:4]) == ("chat-0", ["100", "40 %", "80 %, 40 %", "2.2"])
        assert figures[4:] == [unknown, unknown, f"0.55{unknown}2.2", "unknown"]
        there.page.get_by_role("link", name="How it is counted").click()
        there.page.get_by_role("heading", name="Offload", exact=True).wait_for()


def test_engines_without_them_have_no_empty_tables(browser: Browser, api: Api) -> None:
    api.store_engine_sample("chat-1", api.agent.now, counts())
    with opened_in(browser, f"{api.url}/#efficiency") as there:
        html = there.html("Efficiency, last hour")
        assert "pay?" not in html
        assert "Prefill and decode pools" not in html
