"""The committed reference pages, and a reader of their tables."""

import re
from collections.abc import Iterator
from pathlib import Path

from agent.render.alerts import Timings
from agent.render.reference import Declared, render_reference
from agent.settings import Settings
from agent.store.table_meanings import MEANINGS
from agent.store.tables import metadata

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "docs" / "reference"

# A cell ends at a bar that is not escaped.
_BAR = re.compile(r"(?<!\\)\|")


def rendered() -> dict[str, str]:
    """The pages as they are made now, by path."""
    declared = Declared(metadata.tables.values(), MEANINGS)
    return dict(render_reference(declared, Settings().all_objectives(), Timings()))


def committed(name: str) -> str:
    """The text of one committed page."""
    return (FOLDER / name).read_text(encoding="utf-8")


def rows(text: str) -> Iterator[dict[str, str]]:
    """Every row of a page's tables by column, without back quotes; `section` is the heading."""
    header: list[str] | None = None
    section = ""
    for line in text.splitlines():
        if line.startswith("#"):
            section = line.lstrip("# ").replace("`", "")
        if not line.startswith("| "):
            header = None
            continue
        cells = [cell.strip() for cell in _BAR.split(line)[1:-1]]
        if header is None:
            header = cells
        elif set(cells) != {"---"}:
            plain = [cell.replace("`", "").replace("\\|", "|") for cell in cells]
            yield {"section": section, **dict(zip(header, plain, strict=True))}
