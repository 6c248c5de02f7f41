"""The starts of engines on the page: how long each took, and what made it longer than the last."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from agent.records.event import Confidence, Event, EventKind
from tests.outputs.api.serving import Api, open_api
from tests.real_parts.chromium import at, faults, opened_in

TABLE = "The last starts of engines, each against the one before"


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    with open_api(tmp_path) as running:
        yield running


def store_start(api: Api, ago_s: float, **evidence: float) -> None:
    api.store_events(
        Event(
            at=api.agent.now - ago_s,
            engine="chat-0",
            kind=EventKind.STARTED,
            confidence=Confidence.CERTAIN,
            evidence=dict(evidence),
        )
    )


def test_a_start_is_shown_with_what_made_it_longer_than_the_one_before(
    browser: Browser, api: Api
) -> None:
    store_start(api, 90_000, start_s=60.0, boot_s=10.0, weights_s=50.0, first_request_s=62.0)
    store_start(api, 600, start_s=149.0, boot_s=10.0, weights_s=50.0, compile_s=89.0)
    with opened_in(browser, api.url) as there:
        at(there, api.url, "now")
        rows = there.page.get_by_role("region", name=TABLE).get_by_role("row").all()[1:]
        newest, oldest = (row.locator("td").all_inner_texts()[1:] for row in rows)
        assert rows[0].locator("th").inner_text() == "chat-0"
        longer = "+89 s, of which compile +89 s"
        assert newest == ["149 s", longer, "\N{EN DASH}", "compile 89 s, weights 50 s, boot 10 s"]
        assert oldest == ["60 s", "\N{EN DASH}", "62 s", "weights 50 s, boot 10 s"]
        assert faults(there, api.url, "now") == []


def test_without_a_start_there_is_no_table(browser: Browser, api: Api) -> None:
    with opened_in(browser, api.url) as there:
        at(there, api.url, "now")
        there.page.get_by_role("heading", name="Engines").wait_for()
        assert there.page.get_by_text(TABLE).count() == 0
