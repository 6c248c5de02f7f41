"""Files that the agent serves: its page, and the runbooks of its alerts."""

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path


def first_page() -> str:
    """The HTML of the page, which fetches its figures from the API."""
    return files(__name__).joinpath("page.html").read_text(encoding="utf-8")


def runbooks() -> Mapping[str, str]:
    """Every runbook by its file's name, as Markdown; FileNotFoundError where none is packaged."""
    pages = {path.name: path.read_text(encoding="utf-8") for path in _runbooks_path().iterdir()}
    return dict(sorted(pages.items()))


def _runbooks_path() -> Path:
    """The folder of runbooks: inside an installed package, beside it in a checkout."""
    package = Path(str(files("agent")))
    installed = package / "runbooks"
    return installed if installed.is_dir() else package.parent / "docs" / "runbooks"
