"""Pages in a real Chromium, and what a person sees of the agent's page."""

import asyncio
import atexit
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Literal

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Error, Page, sync_playwright

from tests.real_parts.processes import PartMissing

# Debian's, Fedora's and that of brew. The shell without windows takes a fifth less of a processor.
PROGRAMS = (
    *("chromium-headless-shell", "headless_shell", "/usr/lib64/chromium-browser/headless_shell"),
    *("/Applications/Chromium.app/Contents/MacOS/Chromium", "chromium"),
)
# Debian's sandbox needs rights that tests as root in a container do not have.
FLAGS = ("--no-sandbox", "--disable-dev-shm-usage")
# On a busy machine a browser may take long to start and to draw.
WITHIN_MS = 120_000.0

_NOWHERE = "about:blank"

Scheme = Literal["light", "dark"]


@dataclass(frozen=True, slots=True)
class Opened:
    """An open page, and what went wrong on it: errors of scripts, and refusals of its policy."""

    page: Page
    problems: list[str]

    def html(self, awaited: str) -> str:
        """The document, as HTML, once this text is visible."""
        self.page.get_by_text(awaited).first.wait_for()
        return str(self.page.content())


@contextmanager
def browsing() -> Iterator[Browser]:
    """A running browser.

    A run of the tests has one in each process, which takes a second of a processor to start.
    """
    if "PYTEST_VERSION" not in os.environ:
        with _started() as browser:
            yield browser
        return
    browser, loop = _kept()
    # Playwright's loop counts as running as long as it exists, and so `asyncio.run` would fail in
    # the tests that follow.
    asyncio._set_running_loop(loop)
    try:
        yield browser
    finally:
        asyncio._set_running_loop(None)


@cache
def _kept() -> tuple[Browser, asyncio.AbstractEventLoop]:
    """The browser of this process until it ends, and Playwright's loop."""
    ends = ExitStack()
    browser = ends.enter_context(_started())
    loop = asyncio.get_running_loop()

    def end() -> None:
        asyncio._set_running_loop(loop)
        ends.close()

    atexit.register(end)
    return browser, loop


@contextmanager
def _started() -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        raise PartMissing("Chromium is not installed: run .ci/install-parts")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        yield browser
        browser.close()


@contextmanager
def opened_in(
    browser: Browser,
    url: str,
    *,
    scheme: Scheme = "light",
    width: int = 1280,
    height: int = 900,
) -> Iterator[Opened]:
    """A page in a window of this size, with cookies and storage of its own."""
    page = _free_page(browser)
    page.set_viewport_size({"width": width, "height": height})
    page.emulate_media(color_scheme=scheme)
    problems: list[str] = []

    def note(message: ConsoleMessage) -> None:
        if message.type == "error":
            problems.append(message.text)

    def note_error(error: Error) -> None:
        problems.append(str(error))

    page.on("console", note)
    page.on("pageerror", note_error)
    page.goto(url)
    try:
        yield Opened(page, problems)
    except BaseException:
        page.context.close()
        raise
    page.remove_listener("console", note)
    page.remove_listener("pageerror", note_error)
    _leave(page)


def _free_page(browser: Browser) -> Page:
    """One that was left, or a new one, which takes more than a second of a processor."""
    pages = (page for context in browser.contexts for page in context.pages)
    if left := next((page for page in pages if page.url == _NOWHERE), None):
        return left
    page = browser.new_page(timezone_id="UTC")
    page.set_default_timeout(WITHIN_MS)
    return page


def _leave(page: Page) -> None:
    """Make it as new."""
    page.unroute_all(behavior="ignoreErrors")
    page.evaluate("try { localStorage.clear(); sessionStorage.clear() } catch {}")
    page.goto(_NOWHERE)
    page.context.clear_cookies()


@contextmanager
def opened(url: str, *, width: int = 1280, height: int = 900) -> Iterator[Opened]:
    """A page in a browser of its own."""
    with browsing() as browser, opened_in(browser, url, width=width, height=height) as there:
        yield there


def shown(url: str, awaited: str) -> str:
    """The document, as HTML, once this text is visible."""
    with opened(url) as page:
        return page.html(awaited)


# What each view shows once its figures are there.
VIEWS = {
    "now": "Why requests missed",
    "requests": "Requests that began in the last",
    "breakdown": "Requests by engine, last hour",
    "conversations": "Conversations, last hour",
    "efficiency": "Phases, over the time",
    "cost": "Per 1M output tokens",
    "events": "Events, last hour, the newest first",
    "lengths": "Rows are input tokens",
}
ONE_REQUEST = "Facts"
BROKEN = ("NaN", "undefined", ">null<", "[object", "Invalid Date")


def at(there: Opened, url: str, view: str) -> str:
    """The HTML of a view of the agent at this URL, once its figures are there."""
    there.page.goto(f"{url}/#{view}")
    page = there.html(VIEWS.get(view, ONE_REQUEST))
    assert there.problems == []
    return page


# Once colours no longer change. The ids alone, because all that passed takes longer to bring here
# than to find.
_GRAVE = """async () => {
    const changing = document.getAnimations()
        .filter(one => one.effect.getComputedTiming().endTime < Infinity);
    await Promise.allSettled(changing.map(one => one.finished));
    return (await axe.run({resultTypes: ["violations"]})).violations
        .filter(one => ["serious", "critical"].includes(one.impact)).map(one => one.id);
}"""


def grave(there: Opened) -> list[str]:
    """Serious faults that axe finds for those who read with a keyboard or a screen reader."""
    if not there.page.evaluate("'axe' in window"):
        there.page.evaluate(Axe().axe_script)
    return list(there.page.evaluate(_GRAVE))


def broken(there: Opened, url: str, view: str) -> list[str]:
    """What no figure of a view may be, and is."""
    page = at(there, url, view)
    return [text for text in BROKEN if text in page]


def overflow(there: Opened) -> list[str]:
    """Whether the page itself scrolls sideways, instead of a table in it."""
    width = there.page.evaluate("document.documentElement.scrollWidth - innerWidth")
    return [f"the page is {width} pixels wider than the screen"] if width > 0 else []


def cut(there: Opened) -> list[str]:
    """Tables of which a part is seen only by scrolling sideways; that of lengths has to."""
    found = there.page.locator("main .scrolling:not(.heat > *)").evaluate_all(
        "all => all.filter(one => one.scrollWidth > one.clientWidth).map(one => one.ariaLabel)"
    )
    return [f"cut: {label}" for label in found]


def faults(there: Opened, url: str, view: str) -> list[str]:
    """What is broken or unusable in a view: on wide and middle screens, and a dark narrow one."""
    found = broken(there, url, view) + grave(there) + cut(there)
    there.page.set_viewport_size({"width": 900, "height": 900})
    found += overflow(there) + cut(there)
    there.page.emulate_media(color_scheme="dark")
    there.page.set_viewport_size({"width": 380, "height": 800})
    found += grave(there) + overflow(there) + cut(there)
    there.page.emulate_media(color_scheme="light")
    there.page.set_viewport_size({"width": 1280, "height": 900})
    return found
