"""The site of docs/: every page is on it, and every link and anchor leads somewhere."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
PAGES = sorted(DOCS.rglob("*.md"))
README = ROOT / "README.md"

SITE_TEXT = run_path(str(ROOT / ".ci/docs_links.py"))["on_page_markdown"]

_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def nav(entries: list[Any]) -> Iterator[str]:
    """The files of the navigation."""
    for entry in entries:
        for target in entry.values() if isinstance(entry, dict) else [entry]:
            if isinstance(target, list):
                yield from nav(target)
            else:
                yield target


def test_the_navigation_has_every_page_but_single_runbooks() -> None:
    named = list(nav(SITE["nav"]))
    assert len(set(named)) == len(named)
    found = {str(page.relative_to(DOCS)) for page in PAGES}
    runbooks = {name for name in found if name.startswith("runbooks/")} - {"runbooks/README.md"}
    assert set(named) == found - runbooks


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as both the site and GitHub make them."""
    headings = _HEADING.findall(_FENCE.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(_FENCE.sub("", page.read_text(encoding="utf-8"))):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        # The site has files only: a link to a folder is broken there.
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link


def test_the_readme_is_read_in_five_minutes_and_names_the_test_command() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert len(text.split()) <= 900
    assert "`make test`" in text


def test_the_readme_says_why_each_library_is_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = README.read_text(encoding="utf-8")
    names = [re.split(r"[\[<>=~! ;]", each)[0] for each in project["dependencies"]]
    section = text.partition("## Why each library is there")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| *([^|]+)\|", section, re.MULTILINE)
    listed = {word for cell in cells for word in re.findall(r"[\w-]+", cell.lower())}
    assert {name.lower() for name in names} <= listed


def test_of_a_link_that_leaves_the_docs_the_site_has_the_text() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="runbooks/LlmEngineDown.md"))
    text = "[a](../failures.md#b), [c](../../README.md), [d](GpuLost.md)"
    assert SITE_TEXT(text, page=page) == "[a](../failures.md#b), c, [d](GpuLost.md)"
