"""The page beside the real engine: every view under load, then the API's figures in every view."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from threading import Event
from typing import Any, TypeVar

import pytest
import requests
from playwright.sync_api import Browser

from tests.real_engine.physics import DRIVER, counted, watching
from tests.real_engine.watching import ENGINE, LIMITS, OBJECTIVE, Row, rows_once_there
from tests.real_parts.agent_process import AgentApi, AgentPorts
from tests.real_parts.chromium import VIEWS, Opened, at, broken, browsing, faults, opened_in
from tests.real_parts.ports import free_port
from tests.real_parts.vllm import ANSWER_WITHIN_S, PROMPT, Vllm, span_request_id
from tests.real_parts.waiting import eventually

pytestmark = pytest.mark.timeout(900)

CLIENTS, TOKENS = 3, 40
EARLIER, FIRST = "page-earlier", "page-0-0"
TENANT_HEADER, TENANTS = "x-tenant", ("acme", "globex", "initech")
# No engine is so fast, so every request misses it.
STRICT = {"name": "strict", "ttft_ms": 0.1}
NEWEST = 50
# An ECC error of the GPU, which no request notices.
FAULT = "xid 0 48 -1 -1\n"
AGREE_WITHIN_S = 120.0
UNKNOWN = "\N{EN DASH}"

Response = TypeVar("Response")


@dataclass(frozen=True, slots=True)
class Site:
    """The agent, the ids of what its proxy passed on, and what was broken in views under load."""

    api: AgentApi
    asked: frozenset[str]
    broken: Mapping[str, list[str]]


@dataclass(frozen=True, slots=True)
class Streams:
    """Clients that stream through the proxy, each one response after the other."""

    url: str
    model: str
    ended: Event

    def asked_by(self, client: int) -> list[str]:
        """Stream until the load ends, and twice at least; the ids of the requests."""
        asked: list[str] = []
        while len(asked) < 2 or not self.ended.is_set():
            asked.append(f"page-{client}-{len(asked)}")
            self.stream(asked[-1], TENANTS[client])
        return asked

    def stream(self, request_id: str, tenant: str) -> None:
        """Stream one response to its end."""
        body = {"model": self.model, "prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True}
        response = requests.post(
            f"{self.url}/v1/completions",
            json={**body, "stream": True},
            headers={"X-Request-Id": request_id, TENANT_HEADER: tenant},
            timeout=ANSWER_WITHIN_S,
        )
        response.raise_for_status()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests."""
    with browsing() as running:
        yield running


@pytest.fixture(scope="module")
def site(
    engine: Vllm, ports: AgentPorts, browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """Every view was opened while requests streamed; then the load ended and rows were settled."""
    proxy = free_port()
    more = {
        "objectives": [{"name": OBJECTIVE, "ttft_ms": LIMITS.ttft_ms}, STRICT],
        "proxy": {"tenant_header": TENANT_HEADER},
    }
    folder = tmp_path_factory.mktemp("page")
    with watching(folder, ports, engine.url, proxy, more) as api:
        streams = Streams(f"http://127.0.0.1:{proxy}", engine.model, Event())
        streams.stream(EARLIER, TENANTS[0])
        # Some views show their figures after the first minute, and no load has to last so long.
        eventually(
            lambda: api.summary(window="1h")["efficiency"],
            within_s=AGREE_WITHIN_S,
            what="a computed minute",
        )
        (folder / DRIVER).write_text(FAULT)
        eventually(api.events, within_s=AGREE_WITHIN_S, what="an event of the GPU")
        with ThreadPoolExecutor(CLIENTS) as clients:
            asking = [clients.submit(streams.asked_by, client) for client in range(CLIENTS)]
            try:
                rows_once_there(api, {FIRST})
                found = in_each_view(broken, browser, api)
            finally:
                streams.ended.set()
        asked = frozenset({EARLIER}.union(*(client.result() for client in asking)))
        counted(api, set(asked))
        yield Site(api, asked, found)
        # Spans leave in the order of requests, so that none of these comes to a later agent.
        engine.complete(request_id="page-last", max_tokens=2)
        rows_once_there(api, {span_request_id("page-last")})


def in_each_view(
    look: Callable[[Opened, str, str], list[str]], browser: Browser, api: AgentApi
) -> dict[str, list[str]]:
    """What this finds in each view, also in that of one request."""
    with opened_in(browser, api.url) as there:
        return {view: look(there, api.url, view) for view in (*VIEWS, f"request?id={FIRST}")}


def agreed(
    browser: Browser, site: Site, view: str, ask: Callable[[], Response]
) -> tuple[str, list[list[str]], Response]:
    """A view's HTML, the cells of its tables, and a response that held before and after them.

    Figures of hours change with each computed minute, so both are read again then.
    """

    def look() -> tuple[str, list[list[str]], Response] | None:
        before = ask()
        with opened_in(browser, f"{site.api.url}/#{view}") as there:
            page, cells = at(there, site.api.url, view), cells_of(there)
        after = ask()
        return (page, cells, after) if before == after else None

    found = eventually(look, within_s=AGREE_WITHIN_S, what=f"one state of {view}")
    assert found is not None
    return found


def cells_of(there: Opened) -> list[list[str]]:
    """The texts of all cells of tables, without those of legends, row by row."""
    rows = there.page.locator(".scrolling tbody tr").all_inner_texts()
    return [[cell.strip() for cell in row.split("\t")] for row in rows]


# Numbers as the page writes them. A browser rounds the decimal that it would print, halves up;
# Python rounds the binary number: 0.5375 is 0.538 there, and 0.537 here.
LONG_MS = 1000


def rounded(value: float, places: int) -> Decimal:
    return Decimal(repr(value)).quantize(Decimal(1).scaleb(-places), ROUND_HALF_UP)


def significant(value: float) -> str:
    if 0 < abs(value) < 1e-6:
        return f"{value:.2e}".replace("e-0", "e-")
    first = Decimal(repr(value)).adjusted() if value else 0
    return f"{rounded(value, 2 - first).normalize():,f}"


def share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{significant(100 * value)} %"


def fixed(value: float, digits: int) -> str:
    text = f"{rounded(value, digits):,f}"
    return text.rstrip("0").rstrip(".") if digits else text


def milliseconds(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    if value >= LONG_MS:
        return f"{significant(value / 1000)} s"
    return f"{fixed(value, 2 if value < 10 else 0)} ms"


def seconds(value: float | None) -> str:
    return milliseconds(None if value is None else 1000 * value)


def dollars(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"${significant(value) if value < 1 else f'{rounded(value, 2):,f}'}"


# The tests


def test_no_view_is_broken_under_load(site: Site) -> None:
    assert len(site.asked) > CLIENTS
    assert site.broken == {view: [] for view in site.broken}


def test_no_view_of_a_load_has_faults(site: Site, browser: Browser) -> None:
    found = in_each_view(faults, browser, site.api)
    assert found == {view: [] for view in found}


def test_now_shows_the_summary(site: Site, browser: Browser) -> None:
    names = ("met", "missed", "undetermined", "by_objective", "ttft_ms", "tpot_ms", "e2e_ms")
    page, cells, summary = agreed(
        browser,
        site,
        "now",
        lambda: {name: site.api.summary(window="5m")[name] for name in names},
    )
    for one in summary["by_objective"]:
        assert f"{one['met']:,} met, {one['missed']:,} missed" in page
    for label, name in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("End to end", "e2e_ms")):
        shown = [milliseconds(summary[name][q]) for q in ("p50", "p95", "p99")]
        assert [label, *shown] in [row[:4] for row in cells]


def test_requests_shows_the_newest_rows(site: Site, browser: Browser) -> None:
    rows: list[Row]
    page, cells, rows = agreed(browser, site, "requests", site.api.requests)
    newest = rows[:NEWEST]
    assert len(cells) == len(newest) > CLIENTS
    for row, shown in zip(newest, cells, strict=True):
        assert f"id={row['request_id']}" in page
        latencies = [seconds(row[name]) for name in ("queue_s", "ttft_s", "tpot_s", "e2e_s")]
        tokens = [str(row["input_tokens"]), str(row["output_tokens"])]
        assert shown[4:10] == [*tokens, *latencies]
        assert shown[3] == row["tenant"]
        unknown = UNKNOWN if row["explained_at"] else "not explained yet"
        cause = row["cause"] or (unknown if row["verdict"] == "missed" else "")
        assert shown[11:] == [row["verdict"], cause.replace("_", " ")]


def test_one_request_shows_the_phases_of_both_views(site: Site, browser: Browser) -> None:
    view = f"request?id={FIRST}"
    page, _, row = agreed(browser, site, view, lambda: site.api.request(FIRST))
    assert row["vantage"] == "joined"
    phases = ", ".join(f"{name} {seconds(row[f'{name}_s'])}" for name in ("queue", "prefill"))
    assert f"{phases}, decode {seconds(row['decode_s'])}" in page
    ttft_s, e2e_s = (row["views"]["proxy"][name] for name in ("ttft_s", "e2e_s"))
    assert (
        f"before the first token {seconds(ttft_s)}, after the first token {seconds(e2e_s - ttft_s)}"
        in page
    )
    for fact in (row["trace_id"], seconds(row["e2e_s"]), dollars(row["cost_usd"])):
        assert f"<dd>{fact}</dd>" in page


def of_the_hour(site: Site, figure: str) -> Any:
    """A figure of the last hour."""
    return site.api.summary(window="1h")[figure]


def test_efficiency_shows_every_source(site: Site, browser: Browser) -> None:
    # The first minute that is computed had one short request, which no sample need have seen.
    eventually(
        lambda: of_the_hour(site, "efficiency")["batch_fill"]["requests"],
        within_s=AGREE_WITHIN_S,
        what="a computed minute of the load",
    )
    page, _, found = agreed(browser, site, "efficiency", lambda: of_the_hour(site, "efficiency"))
    assert {"requests", "engine", "hardware"} == {k for k, v in found["sources"].items() if v}
    for use in found["sources"].values():
        assert f"<dd>{share(use['mfu'])} / {share(use['mbu'])}</dd>" in page
    assert f"<dd>{share(found['prefix_cache']['hit_ratio'])}</dd>" in page
    for fill in found["batch_fill"].values():
        assert 0 < fill <= 1
        assert f"<dd>{share(fill)}</dd>" in page


def test_cost_shows_what_each_tenant_pays(site: Site, browser: Browser) -> None:
    def ask() -> dict[str, tuple[str, str]]:
        groups = site.api.breakdown(window="1h", by="tenant", cost="true")["groups"]
        return {
            each["group"]: (f"{each['requests']:,}", dollars(each["cost"]["cost_usd"]))
            for each in groups
            if each["group"] in TENANTS
        }

    _, cells, paid = agreed(browser, site, "cost", ask)
    assert set(paid) == set(TENANTS)
    for tenant, shown in paid.items():
        assert [tenant, *shown] in [row[:3] for row in cells]


def test_cost_shows_what_a_million_tokens_cost(site: Site, browser: Browser) -> None:
    page, _, cost = agreed(browser, site, "cost", lambda: of_the_hour(site, "cost"))
    for tokens in ("output", "input", "cached_input"):
        price = cost[f"usd_per_million_{tokens}_tokens"]
        label = f"Per 1M {tokens.replace('_', ' ')} tokens"
        assert f"<dt>{label}</dt><dd>{dollars(price)}</dd>" in page
    assert f"<dt>Per request</dt><dd>{dollars(cost['usd_per_request'])}</dd>" in page


def test_events_shows_what_broke(site: Site, browser: Browser) -> None:
    _, cells, events = agreed(browser, site, "events", site.api.events)
    assert [event["kind"] for event in events] == ["GPU_FAULT"]
    (event,), (shown,) = events, cells
    assert shown[1:5] == ["GPU FAULT", ENGINE, event["gpu"], event["confidence"]]
    assert "Xid 48, double-bit ECC error" in event["evidence"]["meaning"]
    assert event["evidence"]["meaning"] in shown[5]


def test_lengths_shows_the_share_of_each_cell(site: Site, browser: Browser) -> None:
    _, cells, found = agreed(
        browser, site, "lengths", lambda: site.api.lengths(window="1h")["items"]
    )
    shown = [cell for row in cells for cell in row[1:] if cell != UNKNOWN]
    judged = [one for one in found if one["attainment"] is not None]
    assert len(judged) >= 1
    expected = [
        f"{fixed(100 * one['attainment'], 1)} % of {one['met'] + one['missed']}" for one in judged
    ]
    assert sorted(" ".join(cell.split()) for cell in shown) == sorted(expected)
