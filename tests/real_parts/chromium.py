"""Headless Chromium from Debian, driven by Playwright: pages as a user sees and uses them."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

from tests.real_parts.processes import PartMissing

# Debian's sandbox needs rights that tests as root in a container do not have.
FLAGS = ("--no-sandbox", "--disable-dev-shm-usage")
# On a busy machine a browser may take long to start and to draw.
WITHIN_MS = 120_000.0

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
    """A running browser."""
    program = shutil.which("chromium")
    if program is None:
        raise PartMissing("chromium is not installed: run .ci/install-parts")
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
    page = browser.new_page(
        viewport={"width": width, "height": height}, color_scheme=scheme, timezone_id="UTC"
    )
    page.set_default_timeout(WITHIN_MS)
    problems: list[str] = []

    def note(message: ConsoleMessage) -> None:
        if message.type == "error":
            problems.append(message.text)

    page.on("console", note)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(url)
    yield Opened(page, problems)
    page.context.close()


@contextmanager
def opened(url: str, *, width: int = 1280, height: int = 900) -> Iterator[Opened]:
    """A page in a browser of its own."""
    with browsing() as browser, opened_in(browser, url, width=width, height=height) as there:
        yield there


def shown(url: str, awaited: str) -> str:
    """The document, as HTML, once this text is visible."""
    with opened(url) as page:
        return page.html(awaited)


def screenshot(url: str, picture: Path, *, width: int = 1280, height: int = 900) -> None:
    """Write a PNG of a window of this size."""
    with opened(url, width=width, height=height) as there:
        there.page.screenshot(path=picture)
