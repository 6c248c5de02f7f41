"""Files that the agent serves: its pages, and the runbooks of its alerts."""

import re
from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

_PARTS = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)

_SIMULATED_LABEL = re.compile(r'<p[^>]* id="simulated">.*?</p>\n')

# Scripts and styles of the page; those of others are in the folder `vendor`.
ASSETS_PATH = Path(str(files(__name__))) / "page"

# Nothing but its own files and queries; sizes of bars are set by script, not by attributes.
PAGE_POLICY = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("connect", "script", "style", "img")),
        *(f"{what} 'none'" for what in ("base-uri", "form-action", "frame-ancestors")),
    )
)


def first_page(*, simulated: bool) -> str:
    """The HTML of the page, which fetches its figures from the API.

    It says by itself that figures are simulated, before any of them is there.
    """
    page = (ASSETS_PATH / "index.html").read_text(encoding="utf-8")
    return page if simulated else _SIMULATED_LABEL.sub("", page)


def documentation_page() -> str:
    """The HTML of the API's documentation, which fetches the OpenAPI document."""
    return _file("documentation.html")


def _file(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


def vendored(name: str) -> str:
    """A script or style of others, as `uplot.js`."""
    return (ASSETS_PATH / "vendor" / name).read_text(encoding="utf-8")


def content_policy(page: str, *, in_file: bool = False) -> str:
    """The Content-Security-Policy of a page: its own script and style, and queries to the agent.

    That of a file is in the file itself, and allows no queries.
    """
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, content in _PARTS.findall(page):
        digest = b64encode(sha256(content.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    own = [f"{kind}-src {' '.join(found)}" for kind, found in hashes.items() if found]
    nothing = ["base-uri 'none'", "form-action 'none'"]
    # Browsers take these of a response's header alone.
    served = [] if in_file else ["connect-src 'self'", "frame-ancestors 'none'"]
    return "; ".join(("default-src 'none'", *own, *nothing, *served))


def runbooks() -> Mapping[str, str]:
    """Every runbook by its file's name, as Markdown; FileNotFoundError if none is packaged."""
    pages = {path.name: path.read_text(encoding="utf-8") for path in _runbooks_path().iterdir()}
    return dict(sorted(pages.items()))


def _runbooks_path() -> Path:
    """The folder of runbooks: inside an installed package, beside it in a checkout."""
    package = Path(str(files("agent")))
    installed = package / "runbooks"
    return installed if installed.is_dir() else package.parent / "docs" / "runbooks"
