"""The views of the agent's page, and what no view may have."""

from axe_playwright_python.sync_playwright import Axe

from tests.real_parts.chromium import Opened

# What each view shows once its figures are there.
VIEWS = {
    "now": "Why requests missed",
    "requests": "Requests that began in the last",
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


def grave(there: Opened) -> list[str]:
    """Serious faults that axe finds for those who read with a keyboard or a screen reader."""
    found = Axe().run(there.page).response["violations"]
    return [one["id"] for one in found if one["impact"] in ("serious", "critical")]


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
    found = there.page.locator("main :not(.heat) > .scrolling").evaluate_all(
        "all => all.filter(one => one.scrollWidth > one.clientWidth).map(one => one.ariaLabel)"
    )
    return [f"cut: {label}" for label in found]


def faults(there: Opened, url: str, view: str) -> list[str]:
    """What is broken or unusable in a view, on a wide light screen and on a dark narrow one."""
    found = broken(there, url, view) + grave(there) + cut(there)
    there.page.emulate_media(color_scheme="dark")
    there.page.set_viewport_size({"width": 380, "height": 800})
    found += grave(there) + overflow(there) + cut(there)
    there.page.emulate_media(color_scheme="light")
    there.page.set_viewport_size({"width": 1280, "height": 900})
    return found
