"""Conversations on the page: turns by their number, the worst sessions, and their requests."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator

from agent.records.objective import SessionLimits
from agent.records.request import ProxyView, RequestRecord, Vantage
from tests.outputs.api.serving import Api, open_api
from tests.real_parts.chromium import Opened, at, faults, opened_in
from tests.records.making import NOON, objective, record
from tests.records.minutes import minute

AGENTS = objective(
    "agents", ttft_s=0.5, session=SessionLimits(first_turn_ttft_s=2.0, turn_ttft_s=0.5)
)
UNKNOWN = "\N{EN DASH}"
# A session of a client that is not nice.
LONG = "s" * 200


def turn(number: int, at: float, session: str, **given: Any) -> RequestRecord:
    """A turn of half a second that began at a time after NOON."""
    return record(
        number,
        vantage=Vantage.PROXY,
        started_at=NOON + at,
        ended_at=NOON + at + 0.5,
        received_at=NOON + at + 0.6,
        proxied=ProxyView(session=session, streamed=True),
        **given,
    )


TURNS = [
    turn(1, 0, "kept", ttft_s=0.4, input_tokens=1000, cached_tokens=0),
    turn(2, 5, "kept", ttft_s=0.1, input_tokens=1200, cached_tokens=992),
    turn(3, 10, "evicted", ttft_s=0.4, input_tokens=1000, cached_tokens=0),
    turn(4, 58.5, "evicted", ttft_s=0.9, input_tokens=2000, cached_tokens=0),
    turn(5, 70, "evicted", ttft_s=0.8, input_tokens=2000, cached_tokens=2000),
    turn(6, 20, LONG, ttft_s=None, input_tokens=None),
]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with open_api(tmp_path_factory.mktemp("conversations")) as running:
        running.set_objectives([AGENTS])
        running.store(TURNS, [AGENTS])
        # 900 tokens were computed for 20 cents.
        running.store_minutes(minute(0))
        yield running


@pytest.fixture(scope="module")
def there(browser: Browser, api: Api) -> Iterator[Opened]:
    with opened_in(browser, api.url) as page:
        yield page


def rows_of(there: Opened, table: str) -> list[list[str]]:
    rows = there.page.get_by_role("region", name=table).locator("tbody tr")
    return [each.locator("th, td").all_inner_texts() for each in rows.all()]


def requests_in(there: Opened) -> Locator:
    return there.page.get_by_role("region", name="Requests that began").locator("tbody tr")


def test_the_worst_session_comes_first_with_what_it_waited_for(there: Opened, api: Api) -> None:
    assert faults(there, api.url, "conversations") == []
    evicted, *others = rows_of(there, "The worst sessions")
    usd = f"${1000 * 0.2 / 900:.3f}"
    waited = ["400 ms", "800 ms", "40 %", "1,000", usd, "11 s"]
    assert evicted == ["evicted", "3", "2", *waited, "missed"]
    assert others == [
        ["kept", "2", "0", "400 ms", "100 ms", "45.1 %", "0", "$0", "4.5 s", "met"],
        [LONG, "1", UNKNOWN, *[UNKNOWN] * 6, "undetermined"],
    ]
    there.page.get_by_text("3 sessions with 6 turns; 50 % of 2 sessions met agents.").wait_for()


def test_turns_are_compared_by_their_number(there: Opened, api: Api) -> None:
    at(there, api.url, "conversations")
    first, later = rows_of(there, "Turns by their number")
    assert first[:2] == ["1", "3"]
    assert (later[:2], later[4], later[7:9]) == (["2-3", "3"], "57.5 %", ["1,000", "0"])


def test_a_click_on_a_session_lists_its_requests(there: Opened, api: Api) -> None:
    at(there, api.url, "conversations")
    there.page.get_by_role("link", name="kept").click()
    there.html("Requests that began")
    assert there.page.url.endswith("#requests?session=kept")
    assert requests_in(there).count() == 2


def test_a_session_that_began_before_the_window_is_listed_from_its_begin(
    browser: Browser, tmp_path: Path
) -> None:
    with open_api(tmp_path) as api:
        now = api.agent.now - NOON
        api.store([turn(1, now - 1000, "old"), turn(2, now - 100, "old")], [AGENTS])
        with opened_in(browser, f"{api.url}/#conversations?window=5m") as there:
            there.page.get_by_role("link", name="old").click()
            there.html("Requests that began")
            assert requests_in(there).count() == 2


def test_without_sessions_the_page_says_which_setting_names_them(
    browser: Browser, tmp_path: Path
) -> None:
    with open_api(tmp_path) as api:
        api.store([record(1, ended_at=api.agent.now - 1)], [AGENTS])
        with opened_in(browser, api.url) as there:
            page = at(there, api.url, "conversations")
            assert "<code>proxy.session_header</code>" in page
            assert "<code>GOODPUT_AGENT_SESSION_HEADER</code>" in page
            assert faults(there, api.url, "conversations") == []
