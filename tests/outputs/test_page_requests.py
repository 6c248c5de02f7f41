"""The page's list of requests in a browser: found, filtered, sorted, and on any screen."""

import csv
import json
from collections.abc import Iterator
from datetime import datetime
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from agent.catalog.causes import Cause
from agent.records.objective import CauseShare, ExplainedRequest, Explanation
from agent.records.request import EngineView, ProxyView, Status, Vantage
from tests.outputs.api.serving import Api, open_api
from tests.real_parts.chromium import Opened, cut, grave, opened_in, overflow
from tests.records.making import judged, objective, record

COUNT = 70
FORMULA = "=1+1"
# The longest name of a cause is the one that a narrow table might cut off.
LONGEST = max(Cause, key=len)


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """Seventy requests, each slower than the one before; the last three missed."""
    with open_api(tmp_path_factory.mktemp("page")) as running:
        now = running.agent.now
        rows = [
            record(
                n,
                vantage=Vantage.PROXY,
                request_id=f"request-{n}",
                ttft_s=0.001 * n if n <= COUNT - 3 else 0.001 * n + 1,
                status=Status.TIMEOUT if n == 5 else Status.OK,
                engine=f"chat-{n % 2}",
                model=FORMULA if n == 6 else "llama",
                started_at=now - 10 - 2 * (n % 7),
                ended_at=now - 1,
                engine_view=EngineView(f"chatcmpl-{n}", Status.OK),
                proxied=ProxyView(end_user=f"user-{n % 3}", session=f"session-{n}"),
            )
            for n in range(1, COUNT + 1)
        ]
        running.store(rows, [objective()])
        (last,) = judged(rows[-1:], [objective()])
        share = CauseShare("chat", "ttft", LONGEST, 1.0, ("seen",))
        key = (rows[-1].trace_id, rows[-1].span_id)
        running.explain(ExplainedRequest(last, Explanation(*key, LONGEST, (share,), ("span",))))
        yield running


@pytest.fixture(scope="module")
def there(browser: Browser, api: Api) -> Iterator[Opened]:
    with opened_in(browser, api.url) as page:
        yield page


CELLS = """(name) => {
  const index = [...document.querySelectorAll('thead th')]
    .findIndex((one) => one.innerText.trim() === name);
  const rows = [...document.querySelectorAll('tbody tr')];
  return rows.map((row) => row.children[index].innerText.trim());
}"""


def column(page: Page, name: str) -> list[str]:
    """The texts of a column of the list."""
    found: list[str] = page.evaluate(CELLS, name)
    return found


def awaited(page: Page, name: str, first: list[str]) -> list[str]:
    """The texts of a column, once it begins with these."""
    page.wait_for_function(
        f"([name, first]) => first.every((text, n) => ({CELLS})(name)[n] === text)",
        arg=[name, first],
    )
    return column(page, name)


def opened_list(there: Opened, api: Api, search: str = "") -> Page:
    """The list with these parameters, once it is there."""
    there.page.goto("about:blank")
    there.page.goto(f"{api.url}/#requests?{search}")
    there.html("Requests that began")
    assert there.problems == []
    return there.page


@pytest.mark.parametrize("of", ["request-9", "chatcmpl-9", f"{9:032x}"])
def test_a_request_is_found_by_any_of_its_ids(there: Opened, api: Api, of: str) -> None:
    opened_list(there, api, "engine=chat-0")
    there.page.get_by_label("Find an id").fill(of)
    there.page.keyboard.press("Enter")
    there.page.get_by_text(f"Requests with the id {of}, of all time").first.wait_for()
    assert column(there.page, "TTFT") == ["9 ms"]


def test_what_somebody_writes_stays_while_the_page_is_read_again(there: Opened, api: Api) -> None:
    page = opened_list(there, api)
    entry = page.get_by_label("Find an id")
    entry.press_sequentially("request-")
    with page.expect_response("**/api/v1/requests*"):
        page.evaluate("dispatchEvent(new Event('hashchange'))")
    page.locator("main[aria-busy=false]").wait_for()
    assert entry.input_value() == "request-"
    entry.press_sequentially("9")
    entry.press("Enter")
    page.get_by_text("Requests with the id request-9, of all time").first.wait_for()
    page.goto(f"{api.url}/#requests?id=request-8")
    page.get_by_text("Requests with the id request-8, of all time").first.wait_for()
    assert entry.input_value() == "request-8"


def test_an_id_that_nobody_has_is_said_to_be_unknown(there: Opened, api: Api) -> None:
    there.page.goto(f"{api.url}/#requests?id=request-")
    assert "An id is found whole" in there.html("No request with this id is stored.")


def test_a_click_on_a_column_sorts_by_it_and_the_worst_go_on_after_fifty(
    there: Opened, api: Api
) -> None:
    page = opened_list(there, api)
    page.get_by_role("button", name="TTFT").click()
    page.locator('th[aria-sort="descending"]').filter(has_text="TTFT").wait_for()
    assert len(awaited(page, "TTFT", ["1.07 s", "1.07 s", "1.07 s", "67 ms"])) == 50
    page.get_by_role("link", name="next 50").click()
    assert awaited(page, "TTFT", ["20 ms"]) == [f"{n} ms" for n in range(20, 0, -1)]
    page.get_by_role("button", name="TTFT").click()
    assert len(awaited(page, "TTFT", ["1 ms", "2 ms"])) == 50


@pytest.mark.parametrize(
    ("label", "value", "count"),
    [("User", "user-1", 24), ("Session", "session-4", 1)],
)
def test_names_are_suggested_and_filter(
    there: Opened, api: Api, label: str, value: str, count: int
) -> None:
    page = opened_list(there, api)
    page.get_by_text("More filters").click()
    entry = page.get_by_label(label, exact=True)
    entry.focus()
    name = label.lower()
    page.locator(f'#known-{name} option[value="{value}"]').wait_for(state="attached")
    entry.fill(value)
    entry.press("Enter")
    page.wait_for_url(f"**/#requests?*{name}={value}*")
    page.wait_for_function(
        "(count) => document.querySelectorAll('tbody tr').length === count", arg=min(count, 50)
    )


def test_requests_of_a_status_are_listed(there: Opened, api: Api) -> None:
    opened_list(there, api, "status=timeout")
    assert column(there.page, "TTFT") == ["5 ms"]


def test_the_file_has_all_that_match_and_no_formula(there: Opened, api: Api) -> None:
    opened_list(there, api, "sort=ttft")
    with there.page.expect_download() as told:
        there.page.get_by_role("button", name="Save as CSV").click()
    rows = list(csv.DictReader(StringIO(Path(told.value.path()).read_text())))
    assert told.value.suggested_filename == "requests.csv"
    assert [row["request_id"] for row in rows] == [f"request-{n}" for n in range(COUNT, 0, -1)]
    (formula,) = (row for row in rows if row["request_id"] == "request-6")
    assert formula["model"] == f"'{FORMULA}"
    assert (formula["cost_usd"], formula["ttft_s"], formula["engine"]) == ("", "0.006", "chat-0")


@pytest.mark.parametrize("width", [1400, 900, 390])
def test_verdict_and_cause_are_seen_whole_on_any_screen(
    browser: Browser, api: Api, width: int
) -> None:
    """A phone shows a line a request, and what the list is sorted by."""
    with opened_in(browser, api.url, width=width) as there:
        cause = LONGEST.replace("_", " ")
        opened_list(there, api, "verdict=missed&sort=ttft")
        cell = there.page.get_by_role("cell").filter(has_text=cause)
        cell.wait_for()
        box = cell.bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= width
        assert cut(there) == overflow(there) == grave(there) == []
        if width == 390:
            rows = there.page.locator("tbody tr").all()
            boxes = [row.bounding_box() for row in rows]
            assert all(each is not None and each["height"] < 32 for each in boxes)
            opened_list(there, api, "sort=output_tokens")
            assert there.page.get_by_role("columnheader", name="tokens out").is_visible()
            assert cut(there) == []


# The scatter


def dragged(page: Page, left: float, top: float, right: float, bottom: float) -> None:
    """Drag over a part of the scatter, from 0 to 1 each way."""
    over = page.locator(".scatter .u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    assert box is not None
    x, y, width, height = (box[name] for name in ("x", "y", "width", "height"))
    page.mouse.move(x + left * width, y + top * height)
    page.mouse.down()
    page.mouse.move(x + right * width, y + bottom * height, steps=4)
    page.mouse.up()


def test_what_is_being_typed_stays_while_new_requests_come(
    browser: Browser, tmp_path: Path
) -> None:
    with open_api(tmp_path) as api:
        new = {"started_at": api.agent.now - 9, "ended_at": api.agent.now - 1}
        api.store([record(1, request_id="request-alpha", **new)], [objective()])
        with opened_in(browser, f"{api.url}/#requests?window=5m") as there:
            there.html("1 met")
            page = there.page
            page.get_by_text("Set the box by numbers").click()
            page.get_by_label("Seconds from").fill("0.05")
            entry = page.get_by_label("Find an id")
            entry.press_sequentially("request-b")
            api.store([record(2, request_id="request-beta", **new)], [objective()])
            there.html("2 met")
            assert entry.input_value() == "request-b"
            assert page.get_by_label("Seconds from").input_value() == "0.05"
            entry.press("Enter")
            there.html("No request")


def test_a_box_around_dots_lists_them_and_says_what_they_have_more_of(
    browser: Browser, tmp_path: Path
) -> None:
    with open_api(tmp_path) as api:
        now = api.agent.now
        slow = [
            record(n, ttft_s=5.0, tenant="acme", started_at=now - 90 - n, ended_at=now - 1)
            for n in range(12)
        ]
        fast = [
            record(100 + n, tenant=f"t-{n % 5}", started_at=now - 20 * n - 30, ended_at=now - 1)
            for n in range(60)
        ]
        api.store([*slow, *fast], [objective()])
        with opened_in(browser, f"{api.url}/#requests?window=1h") as there:
            page = there.page
            there.html("Draw a box around dots")
            assert page.get_by_text("60 met").is_visible()
            assert page.get_by_text("12 missed").is_visible()
            dragged(page, 0.9, 0.0, 0.999, 0.4)
            page.get_by_text("What the 12 requests in the box have more of than the 60").wait_for()
            row = page.get_by_role("row").filter(has_text="tenant").filter(has_text="acme")
            assert row.get_by_text("12 (100 %)").is_visible()
            assert row.get_by_text("0 (0 %)").is_visible()
            page.get_by_text("Requests that began in the last hour, in the box").first.wait_for()
            assert set(column_of(page, "Requests that began", "TTFT")) == {"5 s"}
            assert grave(there) == []
            page.get_by_role("button", name="Remove the box").click()
            page.get_by_text("Draw a box around dots").wait_for()
            # By the keyboard alone.
            page.get_by_text("Set the box by numbers").focus()
            page.keyboard.press("Enter")
            page.get_by_label("Seconds from").fill("0.05")
            page.get_by_label("to", exact=True).last.fill("1")
            page.keyboard.press("Enter")
            page.get_by_text("What the 60 requests in the box").wait_for()
            assert there.problems == []


def column_of(page: Page, label: str, name: str) -> list[str]:
    """The texts of a column of the table with this label."""
    table = page.get_by_role("region", name=label)
    heads = [each.strip().rstrip(" ↓↑") for each in table.locator("thead th").all_inner_texts()]
    return table.locator(f"tbody tr > :nth-child({heads.index(name) + 1})").all_inner_texts()


def test_a_click_on_a_dot_opens_its_request(browser: Browser, tmp_path: Path) -> None:
    with open_api(tmp_path) as api:
        now = api.agent.now
        api.store([record(1, ttft_s=0.2, started_at=now - 1800, ended_at=now - 1)], [objective()])
        with opened_in(browser, f"{api.url}/#requests?window=1h") as there:
            there.html("Draw a box around dots")
            over = there.page.locator(".scatter .u-over")
            box = over.bounding_box()
            assert box is not None
            # In the middle of the hour; the axis goes from 0.8 to 1.25 times the one latency.
            over.click(position={"x": box["width"] / 2, "y": box["height"] / 2})
            there.html("Facts")
            assert "id=request-1" in there.page.url


DOTS = 20_000
# Squares that were drawn in the scatter.
COUNT_SQUARES = """() => {
  const {fillRect} = CanvasRenderingContext2D.prototype;
  window.squares = 0;
  CanvasRenderingContext2D.prototype.fillRect = function (...of) {
    if (this.canvas.closest(".scatter")) window.squares += 1;
    return fillRect.apply(this, of);
  };
}"""


def many_dots(api: Api) -> dict[str, Any]:
    """A response with an hour of dots, one in a hundred of which missed."""
    found: dict[str, Any] = api.query("scatter", window="1h", by="ttft")
    begin = datetime.fromisoformat(found["window_from"]).timestamp()
    at = [begin + 3600 * n / DOTS for n in range(DOTS)]
    values = [0.05 * 100 ** (n * 7919 % DOTS / DOTS) for n in range(DOTS)]
    by_verdict = {
        "met": {"at": at[DOTS // 100 :], "seconds": values[DOTS // 100 :]},
        "missed": {"at": at[: DOTS // 100], "seconds": values[: DOTS // 100]},
        "undetermined": {"at": [], "seconds": []},
    }
    return {**found, "dots": DOTS, "by_verdict": by_verdict}


def test_dots_are_drawn_once_and_not_again_while_a_box_is_drawn(
    browser: Browser, tmp_path: Path
) -> None:
    with open_api(tmp_path) as api, opened_in(browser, f"{api.url}/#events") as there:
        now, page = api.agent.now, there.page
        api.store([record(1, started_at=now - 90, ended_at=now - 1)], [objective()])
        body = json.dumps(many_dots(api))
        page.route("**/api/v1/scatter?*", lambda route: route.fulfill(body=body))
        page.evaluate(COUNT_SQUARES)
        page.evaluate("location.hash = '#requests?window=1h'")
        there.html("Draw a box around dots")
        assert page.evaluate("squares") == DOTS
        box = page.locator(".scatter .u-over").bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 100, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + 400, box["y"] + 150, steps=50)
        drawn = page.locator(".scatter .u-select").bounding_box()
        assert drawn is not None
        assert drawn["width"] == pytest.approx(300, abs=2)
        assert page.evaluate("squares") == DOTS
        page.mouse.up()
        page.get_by_role("button", name="Remove the box").wait_for()
        assert page.evaluate("squares") == DOTS
        assert there.problems == []


# One request


def test_a_request_shows_the_engine_at_its_time_and_leads_to_trace_and_now(
    browser: Browser, tmp_path: Path
) -> None:
    with open_api(tmp_path, trace_url="https://tempo.example/{trace_id}") as api:
        now = api.agent.now
        start = now - 120
        own = record(1, ttft_s=5.0, started_at=start, ended_at=start + 8, queue_s=4.8)
        beside = [
            record(10 + n, started_at=start + n, ended_at=start + n + 0.5, preemptions=n % 2)
            for n in range(3)
        ]
        away = record(20, engine="chat-1", started_at=start, ended_at=start + 8)
        api.store([own, *beside, away], [objective()])
        api.store_engine_sample("chat-0", start - 20)
        api.store_engine_sample("chat-0", start + 2)
        with opened_in(browser, f"{api.url}/#request?id=request-1", width=900) as there:
            page = there.page
            html = there.html("The engine at that time")
            lanes = page.get_by_role("list", name="Requests of chat-0 side by side")
            assert lanes.get_by_role("link").count() == 4
            assert "4 requests of chat-0 from " in html
            assert "3 others were in prefill, 300 tokens to compute" in html
            (mine,) = lanes.locator(".own").all()
            assert "queue 4.8 s, prefill 90 ms, decode" in (mine.get_attribute("title") or "")
            assert lanes.locator(".preempted").count() == 1
            assert "Preemptions by its" in html
            assert grave(there) == overflow(there) == []
            trace = page.get_by_role("link", name="Its trace")
            assert trace.get_attribute("href") == f"https://tempo.example/{1:032x}"
            page.get_by_role("link", name="The same time on Now").click()
            page.get_by_text("Not live: a range of the past").wait_for()
            assert "#now?from=" in page.url
            assert there.problems == []
