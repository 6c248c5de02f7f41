"""Filters of the page, and its breakdown, in a browser."""

from pathlib import Path

import pytest
from playwright.sync_api import Browser

from agent.records.request import ProxyView, Vantage
from tests.outputs.api.serving import open_api
from tests.real_parts.chromium import VIEWS, grave, opened_in
from tests.records.making import objective, record
from tests.records.minutes import minute


def test_every_filter_is_kept_in_the_address_of_all_views(browser: Browser, tmp_path: Path) -> None:
    chosen = {"Engine": "chat-1", "Model": "qwen", "Tenant": "bell", "Objective": "chat"}
    with open_api(tmp_path) as api:
        ended_at = api.agent.now - 1
        api.set_objectives([objective("chat"), objective("batch")])
        rows = [
            record(1, tenant="acme", model="llama", engine="chat-0", ended_at=ended_at),
            record(2, tenant="bell", model="qwen", engine="chat-1", ttft_s=9.0, ended_at=ended_at),
        ]
        api.store(rows, [objective("chat")])
        with opened_in(browser, f"{api.url}/#breakdown") as there:
            page = there.page
            for label, name in chosen.items():
                page.get_by_role("combobox", name=label, exact=True).select_option(name)
            page.get_by_role("row").filter(has_text="chat-0").wait_for(state="detached")
            views = page.get_by_role("navigation", name="Views").get_by_role("link")
            for place, view in enumerate(VIEWS):
                views.nth(place).click()
                page.locator("main[aria-busy=false] :is(h2, table)").first.wait_for()
                for label, name in chosen.items():
                    choice = page.get_by_role("combobox", name=label, exact=True)
                    assert choice.input_value() == name, view
                    assert f"{label.lower()}={name}" in page.url, view
            assert there.problems == []
            page.get_by_role("link", name="Clear filters").click()
            page.get_by_role("link", name="Clear filters").wait_for(state="detached")
            assert page.url.endswith("#lengths")


def test_a_view_says_which_filter_it_does_not_apply(browser: Browser, tmp_path: Path) -> None:
    with open_api(tmp_path) as api:
        api.store_minutes(minute(2))
        with opened_in(browser, f"{api.url}/#efficiency?tenant=acme") as there:
            there.html("Not filtered by tenant: GPUs work for all requests at once.")
            there.html("MFU by minute, last hour")


def test_groups_are_sorted_by_their_headings_and_a_name_shows_its_figures_alone(
    browser: Browser, tmp_path: Path
) -> None:
    with open_api(tmp_path) as api, opened_in(browser, api.url) as there:
        ended_at = api.agent.now - 1
        rows = [record(n, tenant="acme", ended_at=ended_at) for n in (1, 2)]
        rows.append(record(3, tenant="bell", ttft_s=9.0, ended_at=ended_at))
        api.store(rows, [objective()])
        api.price(rows)
        page = there.page
        page.goto(f"{api.url}/#breakdown?by=tenant")
        first = page.locator("tbody tr").first
        first.filter(has_text="acme").wait_for()
        assert "100 %" in first.inner_text()
        page.get_by_role("link", name="met", exact=True).click()
        first.filter(has_text="bell").wait_for()
        heading = page.get_by_role("columnheader", name="met")
        assert heading.get_attribute("aria-sort") == "ascending"
        for text in ("0 %", "8.96 s", "$0.375"):
            assert text in first.inner_text(), text
        heading.get_by_role("link").click()
        first.filter(has_text="acme").wait_for()
        assert grave(there) == []
        page.get_by_role("link", name="bell", exact=True).click()
        page.get_by_text("Why requests missed").first.wait_for()
        assert page.url.endswith("#now?tenant=bell")


@pytest.mark.parametrize(
    ("by", "name", "asked"),
    [
        ("user", "ann", "user=ann"),
        ("session", "s-1", "session=s-1"),
        ("input_length", "1k-4k", "min_input_tokens=1024&max_input_tokens=4095"),
        ("input_length", "64k+", "min_input_tokens=65536"),
    ],
)
def test_a_group_that_figures_cannot_be_chosen_by_leads_to_its_requests(
    browser: Browser, tmp_path: Path, by: str, name: str, asked: str
) -> None:
    with open_api(tmp_path) as api, opened_in(browser, api.url) as there:
        said = ProxyView(end_user="ann", session="s-1")
        lengths = {"1k-4k": 2000, "64k+": 70_000}
        row = record(1, input_tokens=lengths.get(name, 10), ended_at=api.agent.now - 1)
        api.store([row._replace(vantage=Vantage.PROXY, proxied=said)], [objective()])
        there.page.goto(f"{api.url}/#breakdown?by={by}")
        there.page.get_by_role("link", name=name, exact=True).click()
        there.page.wait_for_url(f"**/#requests?*{asked}")
        there.page.locator("tbody tr").first.wait_for()
