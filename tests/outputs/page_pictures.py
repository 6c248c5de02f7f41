"""`python -m tests.outputs.page_pictures`: the README's pictures, of a demo and of a check."""

import tempfile
from io import StringIO
from pathlib import Path

from playwright.sync_api import FloatRect, Locator, Page
from rich.console import Console

from agent.analysis.audit import audit
from agent.outputs.audit import print_audit
from tests.outputs.test_audit import badly_started
from tests.real_parts.chromium import Scheme, browsing, opened_in
from tests.simulated import demo

DOCS = Path(__file__).parents[2] / "docs"
# What a view shows once its figures are there, and the picture's height in a wide window.
_NOW, _NOW_SHOWN = "now", "Why requests missed"
WIDE, NARROW, HEIGHT = 1280, 390, 900
# The shown hour and the one before.
_PAST = "2h"
_CAUSES = 4
CHECK_COLUMNS, CHECK_WIDTH, CHECK_HEIGHT = 100, 1000, 600
# The last fault of the demo's past makes the tile red, or one of the next minutes.
_RED_WITHIN_MS = 10 * 60 * 1000.0
_SHAPES: tuple[tuple[str, Scheme, int], ...] = (
    ("page", "light", WIDE),
    ("page-dark", "dark", WIDE),
    ("page-narrow", "light", NARROW),
    ("page-narrow-dark", "dark", NARROW),
)


def take(url: str, folder: Path) -> list[str]:
    """Write a picture of each shape; returns what went wrong on the page."""
    problems: list[str] = []
    with browsing() as browser:
        for name, scheme, width in _SHAPES:
            with opened_in(browser, url, scheme=scheme, width=width, height=HEIGHT) as there:
                there.page.goto(f"{url}/#{_NOW}")
                _settled(there.page)
                there.page.screenshot(path=folder / f"{name}.png")
                problems += there.problems
    return problems


def _settled(page: Page) -> None:
    """Return when every figure and chart of Now is there."""
    page.get_by_text(_NOW_SHOWN).first.wait_for()
    page.get_by_text("The slowest 5 %").wait_for()
    page.locator(".tile").filter(has_text="per 1M output tokens").wait_for()
    page.locator(".marks").filter(has_text="alert").wait_for()


def take_walk(url: str, folder: Path) -> None:
    """Write the three pictures of docs/causes.md: a red tile, its causes, one request of them."""
    with browsing() as browser, opened_in(browser, f"{url}/#{_NOW}", height=HEIGHT) as there:
        page = there.page
        page.locator(".bad").first.wait_for(timeout=_RED_WITHIN_MS)
        _settled(page)
        tiles = _between(page.locator(".sentence"), page.locator(".tiles"))
        page.screenshot(path=folder / "why-tile.png", clip=tiles, full_page=True)
        table = page.get_by_role("region", name="Causes of misses")
        causes = _between(page.get_by_text(_NOW_SHOWN), table.get_by_role("row").nth(_CAUSES))
        page.screenshot(path=folder / "why-causes.png", clip=causes, full_page=True)
        page.get_by_text("The worst missed requests").click()
        page.get_by_label("Window").select_option("5m")
        # The first is any cause, the second the one with the most seconds.
        page.get_by_label("Cause").select_option(index=1)
        page.get_by_role("table").get_by_role("link").first.click()
        page.get_by_text("Why it missed").wait_for()
        page.screenshot(path=folder / "why-request.png", full_page=True)


def _between(first: Locator, last: Locator) -> FloatRect:
    """The page's width from the one to the other."""
    above, below = first.first.bounding_box(), last.bounding_box()
    assert above is not None
    assert below is not None
    top, bottom = above["y"] - 12, below["y"] + below["height"] + 1
    return {"x": 0, "y": top, "width": WIDE, "height": bottom - top}


def take_check(folder: Path) -> None:
    """Write a picture of the first lines that `check` prints of the tests' badly started engine."""
    console = Console(file=StringIO(), width=CHECK_COLUMNS, record=True, highlight=False)
    of = badly_started()
    print_audit(of, audit(of), console)
    with tempfile.TemporaryDirectory() as name:
        page = Path(name) / "check.html"
        console.save_html(str(page), inline_styles=True)
        with (
            browsing() as browser,
            opened_in(browser, page.as_uri(), width=CHECK_WIDTH, height=CHECK_HEIGHT) as there,
        ):
            there.page.screenshot(path=folder / "check.png")


def main() -> None:
    """Run a demo, and write the pictures into docs."""
    take_check(DOCS)
    with tempfile.TemporaryDirectory() as folder, demo(Path(folder), past=_PAST) as agent:
        if problems := take(agent.url, DOCS):
            raise SystemExit("\n".join(problems))
        take_walk(agent.url, DOCS)


if __name__ == "__main__":
    main()
