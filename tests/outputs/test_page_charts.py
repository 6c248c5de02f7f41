"""The charts of the page in a browser: their window, their breaks and their values."""

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from agent.records.event import Confidence, Event, EventKind
from tests.outputs.api.serving import Api, open_api
from tests.real_parts.chromium import Opened, at, browsing, opened_in
from tests.records.making import objective, record
from tests.records.minutes import minute


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with open_api(tmp_path_factory.mktemp("charts")) as running:
        now = running.agent.now
        running.store([record(1, ended_at=now - 1)], [objective()])
        running.store_minutes(minute(2), minute(3, output_tokens=2e6, gpus_usd=99))
        dead, certain = EventKind.ENGINE_DEAD, Confidence.CERTAIN
        event = Event(engine="chat-0", kind=dead, confidence=certain, at=now - 30, evidence={})
        running.store_events(event)
        yield running


@pytest.fixture(scope="module")
def there(api: Api) -> Iterator[Opened]:
    with browsing() as browser, opened_in(browser, api.url) as page:
        yield page


# Charts. They are drawn on a canvas, so what uPlot was told is noted.

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
    bill, idle = chart["data"][1:]
    assert bill == [step["cost"]["usd_per_hour"] for step in steps]
    for step, each in zip(steps, idle, strict=True):
        cost = step["cost"]
        assert each / step["cost"]["usd_per_hour"] == pytest.approx(
            cost["idle_usd"] / cost["bill_usd"]
        )


def test_the_legend_tells_rates_apart_that_are_nearly_alike(there: Opened, api: Api) -> None:
    charts(there, api, "now")
    assert there.page.evaluate("noted[0].series[1].value(noted[0], 0.734)") == "0.73"
