"""The view of now in a browser: its sentence in every state, its tiles and its charts."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from agent.analysis.phase_means import median_and_slowest, request_phases
from agent.catalog.causes import Cause
from agent.records.event import Confidence, Event, EventKind
from agent.records.gpu import Facts, GpuSample
from agent.records.objective import CauseShare, ExplainedRequest, Explanation
from agent.records.request import RequestRecord
from tests.outputs.api.serving import Api, open_api
from tests.outputs.api.test_engine_counts import counts
from tests.real_parts.chromium import Opened, at, grave, opened_in
from tests.records import making
from tests.records.making import objective, record


@pytest.fixture(scope="module")
def there(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    with open_api(tmp_path_factory.mktemp("now")) as api, opened_in(browser, api.url) as page:
        yield page


# The sentence


def judged(objective_: str, met: int, missed: int, undetermined: int = 0) -> dict[str, Any]:
    attainment = met / (met + missed) if met + missed else None
    return {
        **{"objective": objective_, "met": met, "missed": missed},
        **{"undetermined": undetermined, "attainment": attainment},
    }


def cause(
    name: str, requests: int, remedy: str = "Add replicas: two are better."
) -> dict[str, Any]:
    return {"cause": name, "requests": requests, "advice": {"remedy": remedy}}


def state(*by: dict[str, Any], requests: int | None = None, **more: Any) -> dict[str, Any]:
    """The figures of requests judged by these objectives; `more` are those that differ."""
    first = by[0] if by else judged("", 0, 0)
    counted = sum(first[name] for name in ("met", "missed", "undetermined"))
    shown = {name: first[name] for name in ("met", "missed", "undetermined")}
    summary = {
        **shown,
        "requests": counted if requests is None else requests,
        "by_objective": list(by),
        "explained": 0,
        "cause_details": [],
        "engine_counts": None,
    }
    summary |= {name: more.pop(name) for name in list(more) if name in summary}
    return {
        "summary": summary,
        "objectives": [{"name": one["objective"], "definition": {"target": 0.95}} for one in by],
        "engines": [],
        "steps": [],
        "over": "in the last hour",
        "filters": [],
    } | more


CHAT = {"name": "chat", "definition": {"target": 0.95}}
HISTOGRAMS = {"requests": 20, "attainment": [{"objective": "chat", "lower": 0.3, "upper": 0.9}]}
PEAK = [{"at": f"2026-11-28T13:3{n}:00Z", "missed": missed} for n, missed in ((4, 1), (5, 2))]

STATES: list[tuple[dict[str, Any], str, str]] = [
    (state(), "No request ended in the last hour.", ""),
    (
        state(filters=[["tenant", "acme"]]),
        "No request of tenant acme ended in the last hour.",
        "",
    ),
    (
        state(engines=[{"running": 7}, {"running": None}]),
        "Engines run 7 requests, of which the agent sees none: no plugin, span or proxy "
        "shows them.",
        "bad",
    ),
    (
        state(engine_counts={"requests": 20, "attainment": []}),
        "Engines counted 20 requests in the last hour, of which the agent sees none.",
        "bad",
    ),
    (
        state(engine_counts=HISTOGRAMS, objectives=[CHAT]),
        "30\N{EN DASH}90 % of chat requests kept their promise, by the engines' histograms; "
        "no single request is seen.",
        "bad",
    ),
    (
        state(judged("chat", 230, 0)),
        "All 230 chat requests kept their promise (target 95 %).",
        "good",
    ),
    (state(judged("chat", 1, 0)), "The only chat request kept its promise (target 95 %).", "good"),
    (
        state(judged("chat", 0, 1)),
        "The only chat request missed its promise (target 95 %); its cause is not known yet.",
        "bad",
    ),
    (
        state(judged("chat", 0, 3), explained=3, cause_details=[cause("burst", 3)]),
        "None of 3 chat requests kept its promise (target 95 %), all because of burst: "
        "add replicas.",
        "bad",
    ),
    (
        state(
            judged("chat", 227, 3),
            explained=3,
            cause_details=[cause("sequence_cap", 1), cause("burst", 2)],
            steps=PEAK,
        ),
        "98.7 % of 230 chat requests kept their promise (target 95 %); 3 missed, most of them at "
        "01:35 PM, 2 of them because of burst: add replicas.",
        "good",
    ),
    (
        state(judged("chat", 9, 1), explained=1, cause_details=[cause("burst", 1)]),
        "90 % of 10 chat requests kept their promise (target 95 %); 1 missed, because of burst: "
        "add replicas.",
        "bad",
    ),
    (
        state(judged("chat", 99999, 1)),
        "99.99 % of 100,000 chat requests kept their promise (target 95 %); 1 missed; its cause is "
        "not known yet.",
        "good",
    ),
    (
        state(judged("chat", 9, 2), explained=2, cause_details=[cause("unexplained", 2)]),
        "81.82 % of 11 chat requests kept their promise (target 95 %); 2 missed, all without a "
        "known cause.",
        "bad",
    ),
    (
        state(judged("chat", 9, 0, 4)),
        "All 9 chat requests kept their promise (target 95 %); 4 requests could not be judged.",
        "good",
    ),
    (
        state(judged("chat", 0, 0, 4)),
        "4 requests ended in the last hour, and whether they kept their promise is unknown: what "
        "is needed to judge was not seen.",
        "",
    ),
    (
        state(requests=5, objectives=[CHAT]),
        "5 requests ended in the last hour; no objective covers them.",
        "",
    ),
    (
        state(requests=1),
        "1 request ended in the last hour. No objective is set, so nothing says whether it was "
        "fast enough.",
        "",
    ),
    (
        state(
            *(judged("chat", 99, 1), judged("batch", 9, 1)),
            met=98,
            missed=2,
            explained=2,
            cause_details=[cause("burst", 2)],
        ),
        "Below target: batch 90 % (target 95 %). 98 % of 100 requests kept every promise; "
        "2 missed, all because of burst: add replicas.",
        "bad",
    ),
    (
        state(judged("chat", 99, 1), judged("batch", 99, 1), met=98, missed=2),
        "Above target: chat 99 % (target 95 %) and batch 99 % (target 95 %). 98 % of 100 requests "
        "kept every promise; 2 missed; their causes are not known yet.",
        "good",
    ),
    (
        state(judged("chat", 9, 1), objectives=[{"name": "chat", "definition": {"target": None}}]),
        "90 % of 10 chat requests kept their promise; 1 missed; its cause is not known yet.",
        "",
    ),
]


@pytest.mark.parametrize(("given", "text", "kind"), STATES, ids=[text for _, text, _ in STATES])
def test_the_sentence_is_true_in_every_state(
    there: Opened, given: dict[str, Any], text: str, kind: str
) -> None:
    found = there.page.evaluate(
        "async (given) => (await import('/assets/sentence.js')).sentence(given)", given
    )
    assert found == {"text": text, "kind": kind}


# Tiles and charts


def phased(number: int, ended_at: float, e2e_s: float, **more: Any) -> RequestRecord:
    parts = {"queue_s": 0.1, "prefill_s": 0.2, "decode_s": e2e_s - 0.5}
    return record(number, ended_at=ended_at, **{"e2e_s": e2e_s, **parts, **more})


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Api]:
    """An hour, and the one before, in which more requests missed; an event; a GPU."""
    with open_api(tmp_path) as api:
        api.agent.now += 7200.0
        now = api.agent.now
        promised = [objective("chat", ttft_s=0.5, target=0.9)]
        api.set_objectives(promised)
        before = [phased(n, now - 5400, 1.0, ttft_s=9.0 if n < 5 else 0.1) for n in range(1, 11)]
        newest = [phased(n, now - 300, 1.0, ttft_s=9.0 if n < 22 else 0.1) for n in range(21, 31)]
        api.store([*before, *newest], promised)
        api.store_events(
            Event(
                engine="chat-0",
                kind=EventKind.RESTART,
                confidence=Confidence.CERTAIN,
                at=now - 600,
                evidence={},
            )
        )
        facts: Facts = {("gpu_utilization_ratio", ()): 0.5}
        api.store_gpus(
            *(
                GpuSample(gpu="GPU-1", index=0, name="H100", at=now - at, facts=facts)
                for at in (90, 30)
            )
        )
        api.store_engine_sample("chat-0", now - 30, counts())
        yield api


def test_now_begins_with_the_sentence_and_four_tiles_with_their_change(
    browser: Browser, told: Api
) -> None:
    with opened_in(browser, told.url) as there:
        page = at(there, told.url, "now")
        assert page.index("90 % of 10 chat requests kept their promise") < page.index("<canvas")
        tiles = [one.inner_text() for one in there.page.locator(".tile").all()]
        there.page.get_by_text("Where the time of a request goes").wait_for()
        assert grave(there) == []
        assert there.problems == []
    attainment, ttft, goodput, cost = tiles
    for text in ("90 %", "target 90 %", "\N{UPWARDS ARROW} 30 points against the hour before"):
        assert text in attainment
    for text in ("8.96 s", "limit 500 ms (chat)"):
        assert text in ttft
    assert "against the hour before" in goodput
    assert "unknown: no minute has a price" in cost


def test_no_flag_of_the_sentence_is_broken_at_its_dashes(browser: Browser, tmp_path: Path) -> None:
    with open_api(tmp_path) as api:
        now = api.agent.now
        slow = [record(n, ttft_s=9.0, ended_at=now - 1) for n in (1, 2)]
        api.set_objectives([objective()])
        api.store([record(3, ended_at=now - 100), *slow], [objective()])
        for late in making.judged(slow, [objective()]):
            share = CauseShare("chat", "ttft", Cause.SLOW_CLIENT, 1.0, ("seen",))
            key = (late.record.trace_id, late.record.span_id)
            why = Explanation(*key, Cause.SLOW_CLIENT, (share,), ("span",))
            api.explain(ExplainedRequest(late, why))
        with opened_in(browser, api.url) as there:
            at(there, api.url, "now")
            flag = there.page.locator(".sentence .flag")
            assert flag.inner_text() == "--stream-interval"
            for width in range(340, 900, 20):
                there.page.set_viewport_size({"width": width, "height": 900})
                lines = flag.evaluate("(flag) => flag.getClientRects().length")
                assert lines == 1, width


PLOTS = """() => {
  const noted = [];
  const Real = uPlot;
  window.uPlot = function (...given) {
    const plot = new Real(...given);
    noted.push(plot);
    return plot;
  };
  window.plots = () => noted.filter(({root}) => root.isConnected).map((plot) => ({
    label: plot.root.closest('figure').querySelector('figcaption').textContent,
    names: plot.series.slice(1).map(({label}) => label), data: plot.data,
    x: [plot.scales.x.min, plot.scales.x.max]}));
}"""


def test_charts_of_now_share_one_time_axis_and_show_limits_and_the_target(
    browser: Browser, told: Api
) -> None:
    with opened_in(browser, f"{told.url}/#events") as there:
        there.page.get_by_text("Events, last hour").first.wait_for()
        there.page.evaluate(PLOTS)
        there.page.goto(f"{told.url}/#now")
        there.page.get_by_text("The slowest 5 %").wait_for()
        there.page.get_by_role("img", name="GPU 0, H100: 50 % busy").wait_for()
        marks = there.page.locator(".marks").inner_text()
        plots = {plot["label"]: plot for plot in there.page.evaluate("plots()")}
    assert "1 event" in marks
    assert "restart (chat-0)" in marks
    assert len({tuple(plot["x"]) for plot in plots.values()}) == 1
    verdicts = next(plot for label, plot in plots.items() if label.startswith("Requests that met"))
    assert verdicts["names"] == ["met", "missed", "target"]
    _, met, upper, target = verdicts["data"]
    place = max(range(len(met)), key=lambda each: upper[each] or 0)
    assert met[place] / upper[place] == pytest.approx(0.9)
    assert target[place] / upper[place] == pytest.approx(0.9)
    ttft = next(plot for label, plot in plots.items() if label.startswith("TTFT"))
    assert ttft["names"] == ["p50", "p95", "p99", "limit"]
    assert set(ttft["data"][4]) == {500}
    load = next(
        plot for label, plot in plots.items() if label.startswith("Requests in the engines")
    )
    assert load["names"] == ["running", "waiting", "KV cache"]
    slowest = plots["The slowest 5 %"]
    assert slowest["names"] == ["queue", "prefill", "decode", "front", "network"]
    place = next(each for each, value in enumerate(slowest["data"][5]) if value is not None)
    stacked = [values[place] for values in slowest["data"][1:]]
    assert stacked == pytest.approx([0.1, 0.3, 0.8, 1.0, 1.0])


BANDS = """() => {
  const filled = [];
  const {fillRect} = CanvasRenderingContext2D.prototype;
  CanvasRenderingContext2D.prototype.fillRect = function (...box) {
    filled.push(box.map(Math.round));
    return fillRect.apply(this, box);
  };
  window.filled = filled;
}"""


def test_alerts_are_bands_of_the_charts_with_their_times_and_runbooks(
    browser: Browser, tmp_path: Path
) -> None:
    with open_api(tmp_path) as api:
        now = api.agent.now // 60 * 60
        promised = [objective("chat", ttft_s=0.5, target=0.9)]
        api.set_objectives(promised)
        begin = now - 1800
        rows = [
            record(60 * minute + n, ended_at=begin + 60 * minute + n, ttft_s=9.0)
            for minute in range(10)
            for n in range(3)
        ]
        api.store(rows, promised)
        with opened_in(browser, f"{api.url}/#events") as there:
            there.page.evaluate(BANDS)
            there.page.goto(f"{api.url}/#now")
            # Five misses after two minutes, a wait of two, and none in the last five minutes.
            times = [f"{datetime.fromtimestamp(begin + 60 * n, UTC):%I:%M %p}" for n in (4, 14)]
            text = f"outage {times[0]} to {times[1]} (chat, llama)"
            there.page.get_by_text(text).wait_for()
            filled = there.page.evaluate("filled")
            # A sixth of the hour's width, in each chart over time.
            wide = there.page.locator(".u-over").first.bounding_box()
            assert wide is not None
            sixth = [box for box in filled if abs(box[2] - wide["width"] / 6) < 3]
            assert len(sixth) >= 1
            assert grave(there) == []
            there.page.get_by_role("link", name="outage").click()
            there.page.get_by_role("heading", name="LlmObjectiveOutage").wait_for()
            assert there.page.url.endswith("?objective=chat&model=llama")
            assert there.problems == []


@pytest.mark.parametrize(
    ("apart_s", "labels"),
    [(15, ["1:35:00 PM", "1:35:15 PM"]), (60, ["1:35 PM", "1:36 PM"])],
)
def test_ticks_of_a_time_axis_have_labels_of_their_own(
    there: Opened, apart_s: int, labels: list[str]
) -> None:
    found = there.page.evaluate(
        """async (apart) => {
            const {moments} = await import('/assets/chart.js');
            const at = Date.parse('2026-11-28T13:35:00Z') / 1000;
            return moments(null, [at, at + apart], 0, 0, apart);
        }""",
        apart_s,
    )
    assert found == labels


# Phases


def test_phases_are_means_of_the_middle_fifth_and_of_the_slowest(told: Api) -> None:
    now = told.agent.now
    rows = [phased(100 + n, now - 30, 1.0 + n) for n in range(20)]
    unknown = record(200, ended_at=now - 30, queue_s=None)
    told.store([*rows, unknown], [objective()])
    series = told.query("phases", window="10m", step="1m")
    newest = series["items"][-1]
    assert (series["one_in"], series["without"]) == (1, 1)
    assert newest["slowest"]["requests"] == 1
    assert newest["slowest"]["e2e_s"] == 20.0
    assert newest["slowest"]["decode_s"] == pytest.approx(19.5)
    assert newest["slowest"]["front_s"] == pytest.approx(0.2)
    assert newest["slowest"]["network_s"] is None
    # The 9th to the 12th of 20.
    assert newest["median"]["requests"] == 4
    assert newest["median"]["e2e_s"] == pytest.approx((9 + 10 + 11 + 12) / 4)


def test_the_time_beyond_the_engine_is_the_network() -> None:
    parts = {"queue_s": 0.1, "prefill_s": 0.2, "decode_s": 1.0}
    joined = request_phases(ended_at=0.0, e2e_s=2.0, engine_e2e_s=1.5, **parts)
    assert joined is not None
    assert joined.network_s == 0.5
    assert joined.front_s == pytest.approx(0.2)
    assert (
        request_phases(ended_at=0.0, e2e_s=2.0, engine_e2e_s=None, **(parts | {"queue_s": None}))
        is None
    )
    assert median_and_slowest([]) == (None, None)
    median, slowest = median_and_slowest([joined])
    assert median == slowest
