"""Outputs of an agent beside the real engine: every panel, alert rule and view has its figures.

The agent has the engine's plugin, a proxy, the model, a price and the stand-in driver's GPU.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from math import fsum
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import pytest
import requests
import yaml
from playwright.sync_api import Browser

from agent.analysis.physics import coefficients, decode_flops, prefill_flops
from agent.settings.settings_model import Settings
from agent.sources.model_config.reading import read_model
from tests.real_engine.watching import ENGINE, Row, engine_away, rows_once_there
from tests.real_parts.agent_process import AgentApi, AgentPorts, AgentProcess, HastyAgent
from tests.real_parts.chromium import VIEWS, Opened, at, broken, browsing, opened_in
from tests.real_parts.collector import Collector
from tests.real_parts.metric_pages import total
from tests.real_parts.ports import free_port
from tests.real_parts.prometheus import Prometheus, complaints_about, scrape_of
from tests.real_parts.tiny_model import tiny_model
from tests.real_parts.vllm import ANSWER_WITHIN_S, PROMPT, Vllm, span_request_id
from tests.real_parts.waiting import eventually
from tests.render.alerts.cases import expressions, series_of
from tests.render.dashboards.answering import every_question, never_answered
from tests.render.dashboards.reading import selectors
from tests.sources.nvml.fake_driver import build

pytestmark = [pytest.mark.timeout(1500), pytest.mark.usefixtures("asked")]

ALERTS = Path(__file__).parents[2] / "alerts"
WITH_AGENT, ALONE = "goodput-agent.yml", "vllm-alone.yml"
ANSWERED_WITHIN_S = 180.0
TENANTS = ("acme", "globex")
CLIENTS, TOKENS = 2, 40
UNKNOWN = "\N{EN DASH}"
_NUMBERS = count()

# Prefixes of series that need not exist here, by the reason.
NO_DRAFTS = ("llm_engine_spec_decode_",)
NO_TRANSFERS = ("llm_engine_kv_transfer", "llm_engine_kv_offload_", "llm_engine_external_cache_")
ONE_RANK = ("llm_engine_rank_", "llm_engine_expert_balance_")
NOTHING_MISSING = ("llm_engine_fact_missing",)
# Of its KV cache it says only that its width is the model's.
NOT_TOLD_BY_VLLM = ("llm_engine_requests_aborted_total", "llm_engine_kv_value_bytes")
# Series of an agent with other limits than those of the rules.
NO_DIFFERENCE = ('llm_slo_limit_seconds{objective="chat",measure!~"ttft|tpot"}',)
# The agent publishes nothing.
NOT_PUBLISHED = (
    "llm_agent_unpublished_",
    "llm_agent_publish",
    "llm_agent_file_",
    "llm_agent_lost_",
)
# Its proxy has one engine, which never leaves the rotation, and is asked for no other route.
NO_ROTATION = ("llm_proxy_engine_", "llm_proxy_requests_", "llm_proxy_responses_total")
# It pushes no metrics, its engine is in the settings, and it reads no router.
NOT_CONFIGURED = ("llm_agent_metrics_push", "llm_agent_discover", "llm_router_")
# Of GPUs that are older, or have other faults.
OTHER_GPUS = ("gpu_page_retirement_pending", "gpu_retired_pages", "gpu_xid_last_seen")
# What hangs on the machine of the test: whether its kernel tells the memory of a control group.
BY_MACHINE = ("llm_engine_memory_", "llm_engine_oom_kills_total")
# What the engine was asked before: whether it ever failed to answer.
BY_HISTORY = ("llm_engine_requests_failed_total", 'http_requests_total{status="5xx"}')
# This engine has the plugin without its middleware.
NO_MIDDLEWARE = (
    "llm_engine_open_requests",
    "llm_engine_stalled_requests",
    "llm_engine_responses_total",
)
# Its objective is one of the settings.
NO_PRESET = ("llm_slo_configured",)
# A minute is judged five minutes after its end.
JUDGED_LATER = ("llm_slo_held_rate",)
# The engine started before its agent.
STARTED_BEFORE = ("llm_engine_start_seconds",)
# It does prefill and decode.
BOTH_PHASES = ("llm_engine_role",)
# The names before release 0.11.
OLDER = ("vllm:gpu_cache_usage_perc",)
NOT_HERE = (
    *(*NO_DRAFTS, *NO_TRANSFERS, *ONE_RANK, *NOTHING_MISSING, *NOT_TOLD_BY_VLLM, *NO_DIFFERENCE),
    *(*NOT_PUBLISHED, *NO_ROTATION, *NOT_CONFIGURED, *OTHER_GPUS, *BY_MACHINE, *BY_HISTORY),
    *(*NO_MIDDLEWARE, *NO_PRESET, *JUDGED_LATER, *STARTED_BEFORE, *BOTH_PHASES, *OLDER),
)

GPU_HOUR_USD = 3.6
TENSOR_ACTIVE, MEMORY_ACTIVE, CLOCK_RATIO = 0.3, 0.4, 0.5
# Numbers of GPM: activity of the tensor cores, of the memory. The clock is at most 1980 MHz.
SCRIPT = (
    f"activity 0 5 {100 * TENSOR_ACTIVE:.0f}",
    f"activity 0 10 {100 * MEMORY_ACTIVE:.0f}",
    f"set 0 sm_clock {1980 * CLOCK_RATIO:.0f}",
)
# An ECC error of the GPU, which no request notices.
FAULT = "xid 0 48 -1 -1\n"

Response = TypeVar("Response")


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """An agent, a Prometheus that scrapes it and its engine, and the proxy before the engine."""

    api: AgentApi
    prometheus: Prometheus
    proxy: str
    model: str

    def stream(self) -> None:
        """A streamed completion through the proxy that runs during a scrape or two."""
        self.ask(f"streamed-{next(_NUMBERS)}", TENANTS[0], max_tokens=256, stream=True)

    def ask(self, request_id: str, tenant: str, **body: Any) -> requests.Response:
        """A completion through the proxy, read to its end."""
        asked = {"model": self.model, "prompt": PROMPT, "ignore_eos": True, **body}
        response = requests.post(
            f"{self.proxy}/v1/completions",
            json=asked,
            headers={"X-Request-Id": request_id, "x-tenant": tenant},
            timeout=ANSWER_WITHIN_S,
        )
        response.raise_for_status()
        return response

    def counted(self, request_ids: set[str]) -> tuple[list[Row], dict[str, Any]]:
        """All rows and the summary of the same minutes, once these requests have their price."""

        def priced(rows: list[Row]) -> bool:
            return request_ids <= {row["request_id"] for row in rows if row["priced_at"]}

        def read() -> tuple[list[Row], dict[str, Any]] | None:
            # A summary is much work for an agent that is still to price these.
            if not priced(self.api.requests()):
                return None
            before, rows, after = self.hour(), self.api.requests(), self.hour()
            same = before["cost"] == after["cost"] and before["cost"] is not None
            return (rows, after) if same and priced(rows) else None

        found = eventually(read, within_s=ANSWERED_WITHIN_S, what=f"prices of {request_ids}")
        assert found is not None
        return found

    def hour(self) -> dict[str, Any]:
        """The figures of the last hour."""
        return self.api.summary(window="1h")


def evaluated_often(name: str, folder: Path) -> Path:
    """A copy of a file of rules that are not waited for."""
    rules = yaml.safe_load((ALERTS / name).read_text())
    for group in rules["groups"]:
        group["interval"] = "1s"
    copy = folder / name
    copy.write_text(yaml.safe_dump(rules))
    return copy


def configuration(agent: AgentProcess, engine: Vllm, folder: Path) -> dict[str, Any]:
    """Two scrapes, with the rules for a site with an agent and those for one without."""
    config = scrape_of("goodput-agent", agent.url)
    config["scrape_configs"] += scrape_of("vllm", engine.url)["scrape_configs"]
    return config | {"rule_files": [str(evaluated_often(n, folder)) for n in (WITH_AGENT, ALONE)]}


def settings(engine: Vllm, plugin: Path, collector: Collector, proxy: int) -> dict[str, Any]:
    """The real engine with all that is known of it and one that is away, and a proxy.

    Promised is what ours promise and more.
    """
    return {
        "otlp": {"forward_to": f"grpc://127.0.0.1:{collector.port}"},
        "engines": [
            {
                "name": ENGINE,
                "url": engine.url,
                "scrape_interval": "1s",
                "plugin_socket": str(plugin),
                "model_config": str(tiny_model()),
                "gpus": [0],
                "parallelism": {"tensor": 1},
                "gpu_hour_usd": GPU_HOUR_USD,
            },
            engine_away(),
        ],
        "proxy": {
            "listen": f"127.0.0.1:{proxy}",
            "engine": ENGINE,
            "join_wait": "1s",
            "tenant_header": "x-tenant",
        },
        "objectives": [
            {"name": "chat", "preset": "chat"},
            {"name": "answers", "e2e_ms": 10_000},
            # Missed by all, so that causes are there.
            {"name": "at-once", "ttft_ms": 0.1},
        ],
    }


@pytest.fixture(scope="module")
def watched(
    engine: Vllm,
    plugin_socket: Path,
    ports: AgentPorts,
    collector: Collector,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Watched]:
    """An agent of its own, on the ports that the engine sends its spans to; its GPU had a fault."""
    # vLLM has the counters of its own estimates from its first step on.
    engine.complete(request_id="first-step", max_tokens=2)
    folder, proxy = tmp_path_factory.mktemp("outputs"), free_port()
    driver = folder / "driver"
    os.mkfifo(driver)
    build(folder)
    # Scripted before the agent reads the GPU, so that no sample is of an idle one.
    environment = {
        "LD_LIBRARY_PATH": str(folder),
        "STANDIN_SCRIPT": "\n".join(SCRIPT),
        "STANDIN_PIPE": str(driver),
    }
    configured = settings(engine, plugin_socket, collector, proxy)
    with (
        HastyAgent.with_settings(folder, ports, configured, environment) as agent,
        Prometheus(folder, configuration(agent, engine, folder)) as prometheus,
    ):
        driver.write_text(FAULT)
        url = f"http://127.0.0.1:{proxy}"
        yield Watched(api=agent.api, prometheus=prometheus, proxy=url, model=engine.model)
        # Spans leave in the order of requests, so that none of these comes to a later agent.
        engine.complete(request_id="last", max_tokens=2)
        rows_once_there(agent.api, {span_request_id("last")})


# What is asked and what it costs


@pytest.fixture(scope="module")
def asked(watched: Watched) -> dict[str, dict[str, Any]]:
    """The usage of requests by id: of the second one's prompt the prefix cache has the most."""
    prompts = {
        "first": (TENANTS[0], 1001, 700, 20),
        "again": (TENANTS[1], 1001, 700, 40),
        "other": (TENANTS[1], 1002, 130, 60),
    }
    usage = {}
    for name, (tenant, start, length, output) in prompts.items():
        prompt = [10 + (start + 7 * position) % 2000 for position in range(length)]
        answer = watched.ask(name, tenant, prompt=prompt, max_tokens=output)
        usage[name] = answer.json()["usage"]
    return usage


def test_every_panel_has_data_except_for_missing_series(watched: Watched) -> None:
    here = [
        question
        for question in every_question(Settings().all_objectives())
        if not any(name.startswith(NOT_HERE) for name, _ in selectors(question.expression))
    ]
    never = never_answered(
        watched.prometheus, here, meanwhile=watched.stream, within_s=ANSWERED_WITHIN_S
    )
    assert sorted(never) == []
    assert len({question.name for question in here}) > 100


@pytest.mark.parametrize(("rules", "at_least"), [(WITH_AGENT, 50), (ALONE, 9)])
def test_each_selector_of_the_alerts_finds_its_series_except_missing_ones(
    watched: Watched, rules: str, at_least: int
) -> None:
    document = yaml.safe_load((ALERTS / rules).read_text())
    selected = {series for expression in expressions(document) for series in series_of(expression)}
    left = {series for series in selected if not series.startswith("ALERTS{")}
    selected_count = len(left)

    def found() -> bool:
        watched.stream()
        for series in tuple(left):
            if watched.prometheus.query(f"last_over_time({series}[1h])"):
                left.discard(series)
        return all(series.startswith(NOT_HERE) for series in left)

    with suppress(AssertionError):
        eventually(found, within_s=ANSWERED_WITHIN_S, what="series")
    assert sorted(series for series in left if not series.startswith(NOT_HERE)) == []
    assert selected_count - len(left) >= at_least


def test_each_rule_can_be_evaluated(watched: Watched) -> None:
    errors = watched.prometheus.rule_errors
    eventually(
        lambda: "unknown" not in errors().values(),
        within_s=ANSWERED_WITHIN_S,
        what="a first try of every rule",
    )
    assert errors() == {}


def test_promtool_accepts_the_exposition(watched: Watched) -> None:
    page = watched.api.exposition()
    assert total(page, "llm_slo_requests_total", engine=ENGINE) > 0
    assert complaints_about(page) == []


def test_the_agents_rows_add_up_to_the_formula_and_to_the_bill(
    watched: Watched, asked: dict[str, dict[str, Any]]
) -> None:
    ours = coefficients(read_model(tiny_model()))
    rows, summary = watched.counted(set(asked))
    by_id = {row["request_id"]: row for row in rows}
    for name, usage in asked.items():
        row, prompt = by_id[name], usage["prompt_tokens"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert (row["vantage"], row["cached_tokens"]) == ("joined", cached)
        assert row["prefill_flops"] == prefill_flops(ours, prompt, cached)
        assert row["decode_flops"] == decode_flops(ours, prompt, usage["completion_tokens"])
    cost = summary["cost"]
    nobodys = cost["idle_usd"] + cost["unknown_usd"] + cost["unseen_usd"]
    assert (of_requests := fsum(row["cost_usd"] or 0.0 for row in rows)) > 0
    assert of_requests + nobodys == pytest.approx(cost["bill_usd"], rel=1e-9)
    assert cost["bill_usd"] == pytest.approx(cost["gpu_hours"] * GPU_HOUR_USD)
    assert fsum(row["gpu_hours"] or 0.0 for row in rows) == pytest.approx(
        of_requests / GPU_HOUR_USD
    )


def test_the_agent_shows_its_count_beside_the_engines_and_the_gpus(
    watched: Watched, asked: dict[str, dict[str, Any]]
) -> None:
    """The driver's GPU is busier than this engine can make it, as if others used it."""
    _, summary = watched.counted(set(asked))
    sources = summary["efficiency"]["sources"]
    assert sources["engine"]["mfu"] == pytest.approx(sources["requests"]["mfu"], rel=0.1)
    assert 0 < sources["requests"]["mbu"] < sources["engine"]["mbu"], "activations are in it"
    assert sources["hardware"]["mfu"] == pytest.approx(TENSOR_ACTIVE * CLOCK_RATIO, rel=0.05)
    assert sources["hardware"]["mbu"] == pytest.approx(MEMORY_ACTIVE, rel=0.05)
    disagreements = {
        (each["figure"], each["lower"]): each
        for each in summary["efficiency"]["disagreements"]
        if each["higher"] == "hardware"
    }
    assert disagreements.keys() == {(f, s) for f in ("mfu", "mbu") for s in ("requests", "engine")}
    # Which cause comes first hangs on what was seen; tests/analysis has their order.
    causes = disagreements["mfu", "requests"]["causes"]
    assert any("other programs share the GPU" in cause for cause in causes)


# The page: how it writes numbers is in tests/outputs/test_page.py.


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests."""
    with browsing() as running:
        yield running


def agreed(
    browser: Browser,
    watched: Watched,
    view: str,
    ask: Callable[[], Response],
) -> tuple[str, list[list[str]], Response]:
    """A view's HTML, the cells of its tables, and a response that held before and after them.

    Figures of hours change with each computed minute, so both are read again then.
    """

    def look() -> tuple[str, list[list[str]], Response] | None:
        before = ask()
        with opened_in(browser, f"{watched.api.url}/#{view}") as there:
            page, cells = at(there, watched.api.url, view), cells_of(there)
        after = ask()
        return (page, cells, after) if before == after else None

    found = eventually(look, within_s=ANSWERED_WITHIN_S, what=f"one state of {view}")
    assert found is not None
    return found


def cells_of(there: Opened) -> list[list[str]]:
    """The texts of all cells of tables, without those of legends, row by row."""
    rows = there.page.locator(".scrolling tbody tr").all_inner_texts()
    return [[cell.strip() for cell in row.split("\t")] for row in rows]


def in_ms(text: str) -> float:
    """The milliseconds of a cell such as "64 ms" or "1.6 s"."""
    number, unit = text.replace(",", "").split()
    return float(number) * {"ms": 1, "s": 1000}[unit]


def test_no_view_is_broken_under_load(watched: Watched, browser: Browser) -> None:
    ended = Event()

    def stream(client: int) -> None:
        asked = 0
        while asked < 2 or not ended.is_set():
            request_id = f"page-{client}-{asked}"
            watched.ask(request_id, TENANTS[client], max_tokens=TOKENS, stream=True)
            asked += 1

    with ThreadPoolExecutor(CLIENTS) as clients:
        asking = [clients.submit(stream, client) for client in range(CLIENTS)]
        try:
            rows_once_there(watched.api, {"page-0-0"})
            with opened_in(browser, watched.api.url) as there:
                for view in (*VIEWS, "request?id=page-0-0"):
                    assert broken(there, watched.api.url, view) == [], view
        finally:
            ended.set()
        for client in asking:
            client.result()


def test_requests_shows_the_newest_rows(watched: Watched, browser: Browser) -> None:
    rows: list[Row]
    page, cells, rows = agreed(browser, watched, "requests", watched.api.requests)
    assert len(cells) == min(50, len(rows)) > CLIENTS
    for row, shown in zip(rows, cells, strict=False):
        assert f"id={row['request_id']}" in page
        assert shown[1] == verdict_of(row)
        assert in_ms(shown[4]) == pytest.approx(1000 * row["e2e_s"], rel=0.006, abs=0.5)
        assert shown[6:8] == [str(row["input_tokens"]), str(row["output_tokens"])]
        assert shown[10] == (row["tenant"] or UNKNOWN)


def verdict_of(row: Row) -> str:
    if row["verdict"] != "missed":
        return str(row["verdict"])
    unknown = "cause unknown" if row["explained_at"] else "not explained yet"
    return f"missed: {(row['cause'] or unknown).replace('_', ' ')}"


def test_cost_shows_what_each_tenant_pays(
    watched: Watched, browser: Browser, asked: dict[str, dict[str, Any]]
) -> None:
    watched.counted(set(asked))

    def ask() -> dict[str, tuple[int, float]]:
        groups = watched.api.breakdown(window="1h", by="tenant", cost="true")["groups"]
        return {each["group"]: (each["requests"], each["cost"]["cost_usd"]) for each in groups}

    _, cells, paid = agreed(browser, watched, "cost", ask)
    by_tenant = {row[0]: row[1:3] for row in cells}
    for tenant in TENANTS:
        number, usd = paid[tenant]
        assert by_tenant[tenant][0] == f"{number:,}"
        assert float(by_tenant[tenant][1].strip("$")) == pytest.approx(usd, rel=0.006)


def test_a_tenant_that_repeats_a_prompt_has_it_from_the_cache(
    watched: Watched, asked: dict[str, dict[str, Any]]
) -> None:
    watched.counted(set(asked))
    found = watched.api.breakdown(window="1h", by="tenant", cache="true")["groups"]
    by_tenant = {each["group"]: each["cache"] for each in found}
    rows = {row["request_id"]: row for row in watched.api.requests(tenant=TENANTS[1])}
    # 700 tokens that the other tenant had sent, in whole blocks.
    cached = rows["again"]["cached_tokens"]
    assert 0 < cached <= 700
    assert by_tenant[TENANTS[1]]["cached_tokens"] >= cached
    assert by_tenant[TENANTS[1]]["cached_ratio"] > 0


def test_events_shows_what_broke(watched: Watched, browser: Browser) -> None:
    _, cells, events = agreed(browser, watched, "events", watched.api.events)
    (event,) = (event for event in events if event["kind"] == "GPU_FAULT")
    (shown,) = (row for row in cells if row[1] == "GPU FAULT")
    assert shown[2:5] == [ENGINE, event["gpu"], event["confidence"]]
    assert "Xid 48, double-bit ECC error" in event["evidence"]["meaning"]
    assert event["evidence"]["meaning"] in shown[5]


def test_lengths_shows_the_share_of_each_cell(watched: Watched, browser: Browser) -> None:
    _, cells, found = agreed(
        browser, watched, "lengths", lambda: watched.api.lengths(window="1h")["items"]
    )
    shown = sorted(int(c.split("of ")[1]) for row in cells for c in row[1:] if c != UNKNOWN)
    judged = [one["met"] + one["missed"] for one in found if one["attainment"] is not None]
    assert shown == sorted(judged) != []
