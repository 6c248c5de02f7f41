"""Files that the agent serves: its page, and the API with try-out."""

import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

_PARTS = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)

_SIMULATED_LABEL = re.compile(r'<p[^>]* id="simulated">.*?</p>\n')

# Scripts and styles of the page; those of others are in the folder `vendor`.
ASSETS_PATH = Path(str(files(__name__))) / "page"

# Nothing but its own files and queries; sizes of bars are set by script, not by attributes.
_ONLY_OWN = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("connect", "script", "style")),
        *(f"{what} 'none'" for what in ("base-uri", "frame-ancestors")),
    )
)
PAGE_POLICY = f"{_ONLY_OWN}; img-src 'self'; form-action 'none'"
# Labels of an alert may be entered in a form.
DOCUMENT_POLICY = "; ".join(
    (
        *("default-src 'none'", "style-src 'self'", "img-src 'self'", "form-action 'self'"),
        *("base-uri 'none'", "frame-ancestors 'none'"),
    )
)
# Swagger UI has its icons in its style.
API_POLICY = f"{_ONLY_OWN}; img-src 'self' data:; form-action 'none'"


def first_page(*, simulated: bool) -> str:
    """The HTML of the page, which fetches its figures from the API.

    It says by itself that figures are simulated, before any of them is there.
    """
    page = (ASSETS_PATH / "index.html").read_text(encoding="utf-8")
    return page if simulated else _SIMULATED_LABEL.sub("", page)


def api_page() -> str:
    """The HTML of the API's reference, which fetches the OpenAPI document."""
    return (ASSETS_PATH / "api.html").read_text(encoding="utf-8")


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
