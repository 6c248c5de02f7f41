"""The page in a browser: its figures are the API's, it is live, and everybody can use it."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from playwright.sync_api import Browser

from agent import __version__
from agent.catalog.causes import Cause
from agent.records.event import Confidence, Event, EventKind
from agent.records.objective import CauseShare, ExplainedRequest, Explanation
from agent.records.request import ProxyView, Status, Vantage
from tests.outputs.api.serving import Api, open_api
from tests.outputs.api.test_engine_counts import counts
from tests.real_parts.chromium import VIEWS, Opened, at, faults, grave, opened_in
from tests.records.making import judged, objective, record
from tests.records.minutes import UNKNOWN, minute

HOSTILE = "<img src=x onerror=\"document.body.append('owned')\">"


# An engine that works on requests of which the agent sees none.
BLIND = {
    "name": "chat-0",
    "agent": "agent-0",
    "up": True,
    "model": "llama",
    "dialect": "vllm",
    "read_at": None,
    "running": 7.0,
}
# Why a view of an engine that reports little is empty.
UNKNOWN_IN = {
    "efficiency": "MFU by minute, last hour",
    "cost": "no minute of this window has both a price",
    "events": "Nothing broke in this time.",
    "lengths": "no request of these lengths was judged",
}


DISAGREE = {
    **{"figure": "mfu", "higher": "hardware", "lower": "requests", "times": 2.5},
    **{"cause": "preemptions", "causes": ["requests were computed again", "another"]},
}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """Requests that met and missed, one with hostile names and one with unknown values."""
    with open_api(tmp_path_factory.mktemp("page")) as running:
        ended_at = running.agent.now - 1
        named = {"model": HOSTILE, "engine": HOSTILE, "proxied": ProxyView(session=HOSTILE)}
        hostile = record(3, ended_at=ended_at, **named)
        unseen = dict.fromkeys(("ttft_s", "tpot_s", "e2e_s", "queue_s", "input_tokens", "model"))
        running.store(
            [
                record(1, request_id="request-1", max_gap_s=0.3, ended_at=ended_at),
                record(2, ttft_s=9.0, ended_at=ended_at),
                hostile,
                record(4, ended_at=ended_at, **unseen),
            ],
            [objective()],
        )
        running.store_minutes(minute(2), minute(3, output_tokens=2e6, disagreements=(DISAGREE,)))
        running.store_events(
            Event(
                engine=HOSTILE,
                kind=EventKind.ENGINE_DEAD,
                confidence=Confidence.CERTAIN,
                at=running.agent.now - 30,
                evidence={"stop_line": HOSTILE},
            )
        )
        running.agent.engines.append(
            {
                **dict.fromkeys(("name", "agent", "model"), HOSTILE),
                **{"up": False, "dialect": None, "read_at": None},
            }
        )
        yield running


@pytest.fixture(scope="module")
def there(browser: Browser, api: Api) -> Iterator[Opened]:
    with opened_in(browser, api.url) as page:
        yield page


@pytest.mark.parametrize("view", [*VIEWS, "request?id=request-1"])
def test_a_view_shows_its_figures_and_everybody_can_use_it(
    there: Opened, api: Api, view: str
) -> None:
    assert faults(there, api.url, view) == []
    page = str(there.page.content())
    assert "<img" not in page
    assert "SIMULATED: " in page


@pytest.mark.parametrize(
    ("view", "texts"),
    [
        ("requests", ("TTFT (no first token was seen)", "e2e (the request's end was not seen)")),
        (
            "request?id=request-4",
            (
                "No waterfall: no view tells how long",
                "neither the request nor the engine names it",
            ),
        ),
        ("efficiency", ("MFU", "hardware", "2.5", "requests were computed again")),
    ],
)
def test_a_view_names_the_reasons_of_what_is_unknown_and_differs(
    there: Opened, api: Api, view: str, texts: tuple[str, ...]
) -> None:
    page = at(there, api.url, view)
    assert [text for text in texts if text not in page] == []


def test_figures_of_another_window_stay_readable_until_the_new_ones_come(
    browser: Browser, api: Api
) -> None:
    with opened_in(browser, api.url) as there:
        at(there, api.url, "cost")
        there.page.route("**/api/v1/**", lambda route: None)
        there.page.get_by_role("combobox", name="Window").select_option("6h")
        there.page.get_by_text("Reading the figures", exact=True).wait_for()
        assert there.page.locator("main[aria-busy=true]").count() == 1
        assert grave(there) == []
        assert "Per 1M output tokens" in there.page.content()


@pytest.mark.parametrize(
    ("view", "text"),
    [
        ("now", "By minute, "),
        ("requests", "Requests that began "),
        ("conversations", "Conversations, "),
        ("efficiency", "Efficiency, "),
        ("cost", "Cost, "),
        ("events", "Events, "),
        ("lengths", "Attainment by length, "),
    ],
)
def test_a_view_shows_any_range_that_its_address_says(
    there: Opened, api: Api, view: str, text: str
) -> None:
    until = api.agent.now // 60 * 60 - 60
    between = [datetime.fromtimestamp(at, UTC) for at in (until - 1800, until)]
    asked = "&".join(
        f"{name}={at:%Y-%m-%dT%H:%M:%SZ}"
        for name, at in zip(("from", "until"), between, strict=True)
    )
    there.page.goto(f"{api.url}/#{view}?{asked}")
    first, then = (f"{at:%I:%M %p}" for at in between)
    day = f"{between[0]:%b} {between[0].day}"
    there.html(f"{text}{day} {first} to {then}")
    assert there.page.get_by_text("Not live: a range of the past").count() == 1
    assert (
        there.page.get_by_label("From", exact=True).input_value() == f"{between[0]:%Y-%m-%dT%H:%M}"
    )
    assert there.problems == []
    assert grave(there) == []


def test_a_drag_on_a_chart_sets_the_range_of_all_views_and_a_double_click_goes_back(
    there: Opened, api: Api
) -> None:
    at(there, api.url, "events")
    page = there.page
    box = page.locator(".u-over").first.bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] - 1, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.75 * box["width"], middle, steps=5)
    page.mouse.up()
    page.get_by_text("Not live: a range of the past").wait_for()
    asked = dict(pair.split("=") for pair in page.url.partition("?")[2].split("&"))
    begin, end = (datetime.fromisoformat(unquote(asked[name])) for name in ("from", "until"))
    # A quarter of an hour, but for a pixel of 1200.
    assert (end - begin).total_seconds() == pytest.approx(900, abs=10)
    page.get_by_role("link", name="Cost").click()
    page.get_by_text("Cost, ").first.wait_for()
    assert asked["from"] in page.url
    page.go_back()
    page.get_by_text("Events, ").first.wait_for()
    page.locator(".u-over").first.dblclick()
    page.get_by_text("Events, last hour, the newest first").first.wait_for()
    assert "from=" not in page.url


def test_the_figures_of_now_are_those_of_the_summary(there: Opened, api: Api) -> None:
    summary = api.get("/api/v1/summary?window=1h").json()
    page = at(there, api.url, "now")
    (attained,) = summary["by_objective"]
    verdicts = f"{summary['met']} met, {summary['missed']} missed"
    assert f"<dd>{100 * attained['attainment']:.2f} %</dd>" in page
    assert verdicts in page
    assert f"<dd>{100 * summary['mfu']:.3g} % / {100 * summary['mbu']:.3g} %</dd>" in page
    assert f"{summary['ttft_ms']['p50']:,.0f} ms" in page


def test_one_agent_of_several_is_chosen_for_every_view(there: Opened, api: Api) -> None:
    api.beat("agent-0")
    api.beat("agent-of-the-test")
    at(there, api.url, "now")
    row = there.page.get_by_role("row").filter(has_text="agent-of-the-test")
    row.get_by_text(__version__).wait_for()
    at(there, api.url, "requests")
    there.page.get_by_role("combobox", name="Agent").select_option("agent-of-the-test")
    there.page.get_by_text("No request that the agent saw").wait_for()
    assert there.page.url.endswith("#requests?agent=agent-of-the-test")
    there.page.get_by_role("link", name="Cost", exact=True).click()
    there.page.get_by_text("no minute of this window has both a price").first.wait_for()
    assert there.page.url.endswith("#cost?agent=agent-of-the-test")
    there.page.get_by_role("combobox", name="Agent").select_option("")
    there.page.get_by_text("Per 1M output tokens").first.wait_for()


# Figures


@pytest.mark.parametrize(
    ("value", "percent", "share"),
    [
        (1, "100 %", "100 %"),
        (0.99999, "99.99 %", "99.9 %"),
        (0.9, "90 %", "90 %"),
        (0, "0 %", "0 %"),
        (1.234e-19, "0 %", "1.23e-17 %"),
    ],
)
def test_a_share_below_one_is_not_rounded_to_all(
    there: Opened, api: Api, value: float, percent: str, share: str
) -> None:
    there.page.goto(api.url)
    found = there.page.evaluate(
        """async (value) => {
            const {percent, share} = await import('/assets/words.js');
            return [percent(value), share(value)];
        }""",
        value,
    )
    assert found == [percent, share]


def test_one_request_is_one_request(there: Opened, api: Api) -> None:
    there.page.goto(api.url)
    found = there.page.evaluate(
        """async () => {
            const {plural} = await import('/assets/words.js');
            return [0, 1, 17].map((count) => plural(count, 'request'));
        }"""
    )
    assert found == ["0 requests", "1 request", "17 requests"]


def test_causes_are_shown_with_how_many_misses_they_are_of_and_first_on_their_request(
    browser: Browser, tmp_path: Path
) -> None:
    others = [cause for cause in Cause if cause is not Cause.KV_PRESSURE][:7]
    seconds = {Cause.KV_PRESSURE: 21.0} | dict.fromkeys(others, 1.0)
    with open_api(tmp_path) as api:
        now = api.agent.now
        slow = [record(n, request_id=f"r-{n}", ttft_s=9.0, ended_at=now - 1) for n in (1, 2)]
        api.set_objectives([objective()])
        api.store([record(3, ended_at=now - 100), *slow], [objective()])
        shares = [CauseShare("chat", "ttft", *each, ("seen",)) for each in seconds.items()]
        (first, _) = judged(slow, [objective()])
        why = (slow[0].trace_id, slow[0].span_id, Cause.KV_PRESSURE, tuple(shares), ("span",))
        api.explain(ExplainedRequest(first, Explanation(*why)))
        with opened_in(browser, api.url) as there:
            now_page = at(there, api.url, "now")
            there.page.get_by_text("3 more causes").click()
            for each in seconds:
                name = each.replace("_", " ")
                there.page.get_by_role("rowheader", name=name, exact=True).wait_for()
            page = at(there, api.url, "request?id=r-1")
    assert "of 1 explained requests of 2 that missed" in now_page
    assert "of the last 30 days, of which 2 minutes are stored" in now_page
    mostly = "mostly because of <strong>kv pressure</strong>: 75 % of the excess seconds."
    assert 0 < page.index(f"It missed, {mostly}") < page.index("Why it missed")


def test_the_parts_of_a_request_add_up_on_its_page(there: Opened, api: Api) -> None:
    found = api.get("/api/v1/requests/request-1").json()
    page = at(there, api.url, "request?id=request-1")
    parts = [found[f"{name}_s"] for name in ("queue", "prefill", "decode", "front", "rest")]
    assert sum(parts) == pytest.approx(found["e2e_s"])
    for name in ("Front", "Left over"):
        assert f"<dt>{name}</dt>" in page
    assert f"{1000 * found['front_s']:,.0f} ms before the first token" in page
    row = there.page.get_by_role("row").filter(has_text="the longest gap of its stream")
    assert "300 ms" in row.inner_text()


def test_prices_below_a_dollar_are_not_rounded_to_nothing(there: Opened, api: Api) -> None:
    cost = api.get("/api/v1/summary?window=1h").json()["cost"]
    page = at(there, api.url, "cost")
    assert cost["usd_per_million_output_tokens"] < 1
    for name in ("usd_per_million_output_tokens", "usd_per_million_input_tokens", "usd_per_hour"):
        value = cost[name]
        shown = f"${value:.3g}" if value < 1 else f"${value:,.2f}"
        assert f"<dd>{shown}</dd>" in page, name


def test_a_filter_is_in_the_address_that_can_be_shared(there: Opened, api: Api) -> None:
    at(there, api.url, "requests")
    there.page.get_by_role("combobox", name="Verdict").select_option("missed")
    there.page.wait_for_url("**/#requests?*verdict=missed*")
    rows = there.page.locator("tbody tr")
    there.page.get_by_role("cell", name="undetermined", exact=True).wait_for(state="detached")
    assert rows.count() == 1


@pytest.mark.parametrize(
    ("target", "colour"), [(0.6, "level high"), (0.8, "level middle"), (0.9, "level low")]
)
def test_colours_of_lengths_follow_the_target(
    browser: Browser, tmp_path: Path, target: float, colour: str
) -> None:
    """Two of three requests met their objective."""
    with open_api(tmp_path) as api:
        ended_at = api.agent.now - 1
        rows = [record(number, ended_at=ended_at) for number in (1, 2)]
        promised = objective(target=target)
        api.set_objectives([promised])
        api.store([*rows, record(3, ttft_s=9.0, ended_at=ended_at)], [promised])
        with opened_in(browser, api.url) as there:
            page = at(there, api.url, "lengths")
            (cell,) = there.page.locator(".level").all()
            assert cell.get_attribute("class") == colour
            assert cell.inner_text().startswith("66.7 %")
    assert f"Green from the strictest target, {100 * target:.0f} %" in page


def test_the_worst_requests_come_first(there: Opened, api: Api) -> None:
    there.page.goto(f"{api.url}/#requests?worst=ttft")
    first = there.page.locator("tbody tr").first
    first.filter(has_text="9 s").wait_for()
    assert "\t9 s\t" in first.inner_text()


def test_a_link_opens_the_request_of_its_row_though_clients_repeat_ids(
    browser: Browser, tmp_path: Path
) -> None:
    with open_api(tmp_path) as api:
        now = api.agent.now
        api.store(
            [
                record(1, request_id="same", ttft_s=0.15, started_at=now - 30, ended_at=now - 20),
                record(2, request_id="same", started_at=now - 9, ended_at=now - 1),
            ],
            [objective()],
        )
        with opened_in(browser, api.url) as there:
            at(there, api.url, "requests")
            there.page.get_by_role("row").filter(has_text="150 ms").get_by_role("link").click()
            page = there.html("Others with this id")
            assert "<dt>TTFT</dt><dd>150 ms</dd>" in page
            others = there.page.get_by_role("region", name="Clients repeat ids")
            others.get_by_role("link").first.click()
            there.page.get_by_text("100 ms").first.wait_for()
            assert f"span={2:016x}" in there.page.url


def test_a_request_that_is_not_stored_is_no_old_figure(browser: Browser, api: Api) -> None:
    with opened_in(browser, f"{api.url}/#request?id=expired") as there:
        page = there.html("No figures: ")
    assert "no request 'expired' is stored" in page
    assert "are old" not in page


def test_new_requests_are_shown_without_loading_the_page_again(
    browser: Browser, tmp_path: Path
) -> None:
    soon = "#now?window=5m"
    with open_api(tmp_path) as api, opened_in(browser, f"{api.url}/{soon}") as there:
        there.html("Why requests missed")
        api.store([record(1, ended_at=api.agent.now - 1)], [objective()])
        assert "1 met, 0 missed" in there.html("1 met, 0 missed")


def test_errors_are_of_the_requests_that_were_seen_as_users_got_them(
    browser: Browser, tmp_path: Path
) -> None:
    with open_api(tmp_path) as api, opened_in(browser, api.url) as there:
        ended = {"ended_at": api.agent.now - 1}
        seen = [record(n, vantage=Vantage.PROXY, **ended) for n in (1, 2, 3)]
        failed = record(4, vantage=Vantage.PROXY, status=Status.ERROR, **ended)
        api.store([*seen, failed, record(5, **ended)], [objective()])
        page = there.html("of the 4 of 5 requests that were seen as users got them")
    assert "25 %" in page


def test_unknown_figures_are_a_dash_with_the_reason(browser: Browser, tmp_path: Path) -> None:
    with open_api(tmp_path) as api, opened_in(browser, api.url) as there:
        api.agent.engines.append(BLIND)
        api.store_minutes(minute(3, **UNKNOWN))
        there.html("engines run requests, but neither plugin")
        page = there.html("the model or the GPU's peak is unknown")
        assert "<dd>\N{EN DASH} / \N{EN DASH}</dd>" in page
        for reason in (
            "unknown: no stream was seen token by token",
            "see every request",
            "unknown: no minute has a price and a number of GPUs",
            "queue (only the engine's plugin and spans have it)",
            "No GPU was read: ",
        ):
            assert reason.lower() in page.lower(), reason
        for view, reason in UNKNOWN_IN.items():
            there.page.goto(f"{api.url}/#{view}")
            there.html(reason)


def test_an_engine_that_nobody_traces_is_shown_by_its_own_counters(
    browser: Browser, tmp_path: Path
) -> None:
    with open_api(tmp_path) as api, opened_in(browser, api.url) as there:
        api.set_objectives([objective(ttft_s=0.5, tpot_s=None, e2e_s=4.0)])
        api.store_engine_sample("chat-0", api.agent.now, counts())
        page = there.html("of 20 requests: percentiles lie in a bucket")
    for name, value in (
        ("Attainment: chat", "30\N{EN DASH}90 %"),
        ("Goodput", "0.9\N{EN DASH}2.7 req/s"),
        ("Throughput", "3 req/s"),
        ("Output", "100 tok/s"),
    ):
        assert f"<dt>{name}</dt><dd>{value}</dd>" in page
    assert "500 ms \N{EN DASH} 1 s" in page
    assert "unknown: nothing counted the" not in page
    assert "No single request is seen: causes need the plugin, spans or the proxy." in page
    assert "Percentiles are within" not in page


def test_the_page_says_that_it_has_no_figures(browser: Browser, tmp_path: Path) -> None:
    with open_api(tmp_path, migrated=False) as api, opened_in(browser, api.url) as there:
        # Two readers of the page find it out, the one or the other first.
        there.html("No figures: ")
        there.html("Not live: ")


def test_the_page_says_that_its_figures_are_old(browser: Browser, api: Api) -> None:
    with opened_in(browser, api.url) as there:
        at(there, api.url, "cost")
        there.page.route("**/api/v1/**", lambda route: route.abort())
        there.page.get_by_role("combobox", name="Window").select_option("6h")
        page = there.html("These figures are old: ")
    assert "Per 1M output tokens" in page


def test_live_figures_are_not_read_a_second_time(browser: Browser, api: Api) -> None:
    # Of the agents that other tests show, one lives.
    api.beat("agent-of-the-test")
    with opened_in(browser, f"{api.url}/#cost") as there:
        there.page.get_by_role("status").filter(has_text="Live").wait_for()
        asked: list[str] = []
        there.page.on("request", lambda request: asked.append(request.url))
        at(there, api.url, "now")
        there.page.locator("canvas").first.wait_for()
    queries = [url.partition("/api/v1/")[2] for url in asked if "/api/v1/" in url]
    asked_of = [each.partition("?")[0] for each in queries]
    assert not {"engines", "gpus", "agents"} & set(asked_of)


def test_a_view_whose_queries_take_long_is_read_more_rarely(browser: Browser, api: Api) -> None:
    # Of the agents that other tests show, one lives.
    api.beat("agent-of-the-test")
    with opened_in(browser, f"{api.url}/#cost?agent=agent-of-the-test") as there:
        there.page.get_by_role("status").filter(has_text="Read every").wait_for()
        there.page.route("**/api/v1/lengths*", lambda route: None)
        there.page.get_by_role("link", name="Heatmap").click()
        # So many times as long as they took, and a thirtieth of an hour at most.
        there.page.get_by_role("status").filter(has_text="Read every 2 minutes").wait_for()


# Charts: their window, their breaks and their values. They are drawn on a canvas, so what uPlot
# was told is noted.

NOTE_CHARTS = """() => {
  window.Real ??= uPlot;
  window.noted = [];
  window.uPlot = function (...given) {
    const plot = new Real(...given);
    noted.push(plot);
    return plot;
  };
}"""
CHARTS = """() => noted.filter((plot) => plot.scales.x.time)
  .map((plot) => ({from: plot.scales.x.min, until: plot.scales.x.max, data: plot.data}))"""


def charts(there: Opened, api: Api, view: str) -> list[dict[str, Any]]:
    """The charts over time of a view that is opened now."""
    at(there, api.url, "requests")
    there.page.evaluate(NOTE_CHARTS)
    at(there, api.url, view)
    found: list[dict[str, Any]] = there.page.evaluate(CHARTS)
    return found


@pytest.mark.parametrize(
    ("view", "number"), [("now", 1), ("efficiency", 2), ("cost", 1), ("events", 1)]
)
def test_charts_are_as_wide_as_their_window(
    there: Opened, api: Api, view: str, number: int
) -> None:
    """Also where minutes are computed of a small part of it."""
    summary = api.get("/api/v1/summary?window=1h").json()
    window = [
        datetime.fromisoformat(summary[f"window_{end}"]).timestamp() for end in ("from", "until")
    ]
    found = charts(there, api, view)
    assert len(found) >= number
    for chart in found:
        assert [chart["from"], chart["until"]] == pytest.approx(window, abs=61)


def test_an_event_of_this_moment_is_on_the_chart(there: Opened, api: Api) -> None:
    (newest, *_) = api.get("/api/v1/events?window=1h").json()["items"]
    (chart,) = charts(there, api, "events")
    assert chart["from"] < datetime.fromisoformat(newest["at"]).timestamp() < chart["until"]


def test_a_line_has_a_break_where_no_step_is_known(there: Opened, api: Api) -> None:
    steps = [{"at": f"2026-11-25T12:0{minute}:00Z", "value": minute} for minute in (0, 1, 4)]
    found = there.page.evaluate(
        """async (steps) => {
            const {with_breaks} = await import('/assets/chart.js');
            return with_breaks(steps, 60, (step) => step.value);
        }""",
        steps,
    )
    assert found[1] == [0, 1, None, 4]
    assert [at - found[0][0] for at in found[0]] == [0, 60, 120, 240]


def test_the_bill_is_drawn_at_its_rate(there: Opened, api: Api) -> None:
    """Dollars of a minute that is computed in part would look like a lower price."""
    steps = api.get("/api/v1/efficiency?window=1h&step=1m").json()["items"]
    (chart,) = charts(there, api, "cost")
    legend = "noted.at(-1).series.slice(1).map(({label}) => label)"
    names = there.page.evaluate(legend)
    drawn = dict(zip(names, chart["data"][1:], strict=True))
    # Areas lie on each other, so the highest has the whole bill.
    whole = [step["cost"]["usd_per_hour"] for step in steps]
    assert drawn["engine not read"] == pytest.approx(whole)
    for step, below, above in zip(steps, drawn["aborted requests"], drawn["idle"], strict=True):
        cost = step["cost"]
        parts = [cost[f"{name}_usd"] for name in ("prefill", "decode", "unseen", "idle")]
        scale = cost["usd_per_hour"] / cost["bill_usd"]
        assert below == pytest.approx(scale * sum(parts[:2]))
        assert above == pytest.approx(scale * sum(parts))


def test_the_legend_tells_rates_apart_that_are_nearly_alike(there: Opened, api: Api) -> None:
    charts(there, api, "now")
    assert there.page.evaluate("noted[0].series[1].value(noted[0], 0.734)") == "0.73"
