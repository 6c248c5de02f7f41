"""The page in a browser: what would show more, and which figures are of the past."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, expect

from agent.analysis.setup_steps import (
    SetupFacts,
    SpansTarget,
    StepName,
    setup_steps,
)
from agent.store.store_queries import shown_gpu
from tests.outputs.api.serving import Api, open_api
from tests.real_parts.chromium import WITHIN_MS, Opened, faults, opened_in
from tests.store.making import gpu_sample

COMMAND = (
    "OTEL_SERVICE_NAME=chat-0 OTEL_TRACES_SAMPLER=always_on vllm serve llama "
    "--otlp-traces-endpoint http://127.0.0.1:4317"
)


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    with open_api(tmp_path) as running:
        yield running


def setup(*seen: StepName, engine: str = "chat-0") -> dict[str, Any]:
    """The steps of a vLLM of which the agent sees these sources, and metrics."""
    facts = SetupFacts(
        engine=engine,
        url="http://127.0.0.1:8000",
        program="vllm",
        model="llama",
        seen=frozenset({StepName.METRICS, *seen}),
        spans=SpansTarget(url="http://127.0.0.1:4317"),
    )
    row = {"engine": engine, "agent": "agent-0", "dialect": "vllm", "version": "0.32.0"}
    return {**row, "model": "llama", "steps": setup_steps(facts)}


def card(there: Opened) -> Locator:
    return there.page.get_by_role("region", name="Next steps")


def shown_without_card(there: Opened, url: str) -> None:
    """Load the page anew, and return when its figures are there without the card."""
    there.page.goto(f"{url}/#now")
    there.page.reload()
    there.html("Why requests missed")
    assert card(there).count() == 0


@pytest.mark.parametrize(
    ("wanted", "engines"),
    [
        ({}, ["chat-0", "chat-1"]),
        ({"engine": "chat-1"}, ["chat-1"]),
        ({"agent": "agent-0"}, ["chat-0", "chat-1"]),
        ({"agent": "agent-1"}, []),
    ],
)
def test_the_setup_of_one_engine_or_agent_can_be_asked_for(
    api: Api, wanted: dict[str, str], engines: list[str]
) -> None:
    api.agent.setups = [setup(), setup(engine="chat-1")]
    items = api.get("/api/v1/setup", **wanted).json()["items"]
    assert [each["engine"] for each in items] == engines


def test_the_next_step_is_shown_with_its_command_until_everything_is_seen(
    browser: Browser, api: Api
) -> None:
    api.agent.setups = [setup(), setup(engine="chat-1")]
    with opened_in(browser, api.url) as there:
        card(there).get_by_text("Seen of chat-0 and 1 more: metrics.").wait_for()
        card(there).get_by_text("pip install ./plugins/vllm").wait_for()
        card(there).get_by_text("Then: spans, proxy").click()
        card(there).get_by_text(COMMAND).wait_for()
        assert faults(there, api.url, "now") == []
        api.agent.setups = [setup(*StepName)]
        shown_without_card(there, api.url)


def test_engines_that_lack_other_steps_are_listed_without_leaving_the_page(
    browser: Browser, api: Api
) -> None:
    """A link to the API would be refused where it needs a token."""
    seen = [(), (StepName.SPANS,), (StepName.PLUGIN,), (StepName.LOG,), (StepName.LOG,)]
    api.agent.setups = [setup(*each, engine=f"chat-{n}") for n, each in enumerate(seen)]
    with opened_in(browser, api.url) as there:
        card(there).get_by_text("2 more engines").click()
        card(there).get_by_text("Seen of chat-3, chat-4: metrics, log.").wait_for()
        assert card(there).get_by_role("link").count() == 0
        assert faults(there, api.url, "now") == []


def test_a_dismissed_card_stays_away_until_another_step_is_missing(
    browser: Browser, api: Api
) -> None:
    api.agent.setups = [setup(StepName.SPANS)]
    with opened_in(browser, api.url) as there:
        card(there).get_by_role("button", name="Dismiss").click()
        card(there).wait_for(state="detached")
        shown_without_card(there, api.url)
        api.agent.setups = [setup()]
        there.page.reload()
        card(there).get_by_text("Seen of chat-0: metrics.").wait_for()


def test_what_was_not_read_for_three_intervals_is_grey_with_its_age(
    browser: Browser, api: Api
) -> None:
    now = api.agent.now
    known = {"agent": "a", "up": True, "model": None, "dialect": "vllm", "stale_after_s": 3600.0}
    api.agent.engines = [
        {**known, "name": "fresh", "read_at": now - 3500, "running": 7.0},
        {**known, "name": "hanging", "read_at": now - 4 * 3600, "running": 8.0},
    ]
    api.agent.gpus = [
        {**shown_gpu("a", gpu_sample(now - age_s, f"GPU-{age_s}")), "stale_after_s": 3600.0}
        for age_s in (10, 7200)
    ]
    with opened_in(browser, api.url) as there:
        rows = {
            name: there.page.get_by_role("row").filter(has_text=name)
            for name in ("fresh", "hanging", "GPU-10", "GPU-7200")
        }
        rows["hanging"].get_by_text("old: read 4 hours ago").wait_for()
        rows["GPU-7200"].get_by_text("old: read 2 hours ago").wait_for()
        for name, row in rows.items():
            old = row.locator(".old").count()
            assert (old > 0) == (name in ("hanging", "GPU-7200")), name
        rows["fresh"].get_by_text("up", exact=True).wait_for()
        rows["GPU-10"].get_by_text("ok", exact=True).wait_for()
        assert faults(there, api.url, "now") == []


STATES: list[tuple[dict[str, Any], str, str]] = [
    ({"state": "ok"}, "ok", "up"),
    ({"state": "idle"}, "idle", "up"),
    (
        {"state": "saturated"},
        "saturated since 1:20:33 PM: it computes, and more than 10 requests wait or it rejects "
        "requests",
        "slow",
    ),
    ({"state": "paused"}, "paused since 1:20:33 PM: it was paused or sent to sleep", "slow"),
    (
        {"state": "loading", "up": False, "problem": "nothing listens there"},
        "loading since 1:20:33 PM: nothing listens there",
        "slow",
    ),
    (
        {"state": "unreachable", "up": False, "problem": "no answer within 5 s"},
        "unreachable since 1:20:33 PM: no answer within 5 s",
        "down",
    ),
    ({"state": "stalled", "state_why": "HANG"}, "stalled since 1:20:33 PM: HANG", "down"),
    (
        {"state": "dead", "up": False, "problem": "nothing", "state_why": "CUDA_OOM"},
        "dead since 1:20:33 PM: CUDA OOM",
        "down",
    ),
    (
        {"state": "ok", "ejected": "error 500"},
        "ok; gets no new requests: error 500",
        "down",
    ),
    ({"up": False, "problem": "nothing listens there"}, "down: nothing listens there", "down"),
]


def test_an_engine_has_the_state_of_its_probes_in_words_and_with_its_colour(
    browser: Browser, api: Api
) -> None:
    known = {"agent": "a", "up": True, "model": None, "dialect": "vllm", "read_at": None}
    since = {"state_since": datetime(2026, 11, 28, 13, 20, 33, tzinfo=UTC).timestamp()}
    api.agent.engines = [
        {**known, **since, **given, "name": f"chat-{n}"} for n, (given, *_) in enumerate(STATES)
    ]
    with opened_in(browser, api.url) as there:
        # Times of another day have a date.
        there.page.clock.set_fixed_time("2026-11-28T14:00:00Z")
        rows = there.page.get_by_role("region", name="Engines at their last sample")
        rows.get_by_text("paused since").wait_for()
        cells = rows.locator("tbody tr td:nth-child(2)").all()
        found = [(each.inner_text(), each.get_attribute("class")) for each in cells]
        assert found == [(text, f"left {colour}") for _, text, colour in STATES]
        assert faults(there, api.url, "now") == []


def test_engines_with_several_ranks_show_how_uneven_these_are(browser: Browser, api: Api) -> None:
    known = {"agent": "a", "up": True, "model": None, "dialect": "vllm", "stale_after_s": 15.0}
    skew = {"requests": 2.15, "kv_cache_usage": 1.4}
    uneven: dict[str, Any] = {"name": "ranks", "rank_skew": skew}
    engines = [uneven, {"name": "one", "rank_skew": None}]
    api.agent.engines = [{**known, "read_at": api.agent.now, **each} for each in engines]
    with opened_in(browser, api.url) as there:
        table = there.page.get_by_role("region", name="Skew of data-parallel ranks")
        table.wait_for()
        (row,) = table.locator("tbody tr").all()
        assert row.locator("th").inner_text() == "ranks"
        unknown = "\N{EN DASH}"
        assert row.locator("td").all_inner_texts() == ["2.15", unknown, unknown, "1.4", unknown]
        assert [each.inner_text() for each in row.locator(".missed").all()] == ["2.15"]
        assert faults(there, api.url, "now") == []


def test_a_page_without_a_running_agent_is_not_live(browser: Browser, api: Api) -> None:
    api.beat("agent-0")
    api.store_gpus(gpu_sample(api.agent.now - 10, "GPU-1"))
    with opened_in(browser, api.url) as there:
        status = there.page.get_by_role("status")
        main = there.page.get_by_role("main")
        expect(status).to_have_text("Live", timeout=WITHIN_MS)
        there.page.get_by_role("row").filter(has_text="GPU-1").get_by_text("ok").wait_for()
        expect(main).not_to_have_class("old")
        api.execute("UPDATE agents SET stopped_at = seen_at")
        status.filter(has_text="Old: no agent has reported for").wait_for()
        there.page.get_by_text("old: read 10 seconds ago").wait_for()
        there.page.get_by_text("No agent runs, so no engine is watched.").wait_for()
        expect(main).to_have_class("old")
        assert faults(there, api.url, "now") == []
        # One that reads engines is live, though it can store nothing.
        known = {"agent": "a", "up": True, "model": None, "dialect": "vllm"}
        engine = {**known, "name": "chat-0", "read_at": api.agent.now, "stale_after_s": 3600.0}
        api.agent.engines = [engine]
        there.page.reload()
        expect(status).to_have_text("Live", timeout=WITHIN_MS)


def test_a_chosen_agent_that_has_ended_is_old_beside_one_that_reads_engines(
    browser: Browser, api: Api
) -> None:
    api.beat("ended")
    api.execute("UPDATE agents SET stopped_at = seen_at")
    api.beat("alive")
    known = {"up": True, "model": None, "dialect": "vllm", "stale_after_s": 3600.0}
    now = api.agent.now
    api.agent.engines = [{**known, "agent": "alive", "name": "chat-0", "read_at": now}]
    api.agent.gpus = [{**shown_gpu("alive", gpu_sample(now)), "stale_after_s": 3600.0}]
    with opened_in(browser, f"{api.url}/#now?agent=ended") as there:
        there.page.get_by_role("status").filter(has_text="Old: no agent has reported").wait_for()
        expect(there.page.get_by_role("main")).to_have_class("old")
        there.page.get_by_role("combobox", name="Agent").select_option("alive")
        there.page.get_by_role("status").filter(has_text="Read every").wait_for()
        expect(there.page.get_by_role("main")).not_to_have_class("old")


def test_figures_of_an_agent_that_is_gone_are_grey(browser: Browser, tmp_path: Path) -> None:
    with open_api(tmp_path) as api, opened_in(browser, api.url) as there:
        there.page.get_by_role("status").filter(has_text="Live").wait_for()
        there.html("Why requests missed")
        there.page.route("**/api/v1/**", lambda route: route.abort())
        # The open stream breaks as well.
        api.agent.engines = [{"broken": True}]
        there.page.get_by_role("status").filter(has_text="these figures are").wait_for()
        expect(there.page.get_by_role("main")).to_have_class("old")
