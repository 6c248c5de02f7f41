"""Time until the page shows something, and its first figures, over a day of a million requests."""

import tempfile
import time
from pathlib import Path
from statistics import median

from playwright.sync_api import Browser

from benchmarks.report import REQUESTS, fill
from tests.demos import demo
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.chromium import browsing, opened_in
from tests.real_parts.ports import free_port
from tests.store.migrated import migrated_in

TARGET_S = 1.0
DEMO_TARGET_S = 10.0
_LOADS = 9
_FIGURES = "Why requests missed"
_PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


def run() -> bool:
    """Print the figures; return whether the targets are met."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        with migrated_in(folder) as engine:
            fill(engine)
        settings = {"engines": [{"name": "chat-0", "url": f"http://127.0.0.1:{free_port()}"}]}
        with (
            AgentProcess.with_settings(folder, AgentPorts.free(), settings) as agent,
            browsing() as browser,
        ):
            loads = [_loaded(browser, agent.url) for _ in range(_LOADS)]
    painted_s = median(paint_s for paint_s, _ in loads)
    shown_s = median(figures_s for _, figures_s in loads)
    print(
        f"page over {REQUESTS:,} requests: first paint {painted_s:.2f} s "
        f"(target under {TARGET_S:.0f}), first figures {shown_s:.2f} s, "
        f"the median of {_LOADS} loads; slowest paint {max(loads)[0]:.2f} s"
    )
    return painted_s < TARGET_S


def _loaded(browser: Browser, url: str) -> tuple[float, float]:
    """Seconds from the navigation to the first paint and to the figures, in a fresh browser."""
    with opened_in(browser, url) as there:
        there.page.get_by_text(_FIGURES).first.wait_for()
        figures_ms = float(there.page.evaluate("performance.now()"))
        return float(there.page.evaluate(_PAINT)) / 1000, figures_ms / 1000


def run_demo() -> bool:
    """Print how long a demo takes to its first response; return whether the target is met."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, demo(Path(folder), past="2h") as agent:
        took_s = time.perf_counter() - began
        requests = agent.api.summary(window="2h")["requests"]
    print(
        f"demo with two hours of past, {requests:,} requests: first response after {took_s:.1f} s "
        f"(target under {DEMO_TARGET_S:.0f})"
    )
    return took_s < DEMO_TARGET_S
