"""The fixture pages, each named `<engine>-<version>[-<setting>].txt`, and readings of them."""

from pathlib import Path

from agent.sources.engines.exposition import read_exposition
from agent.sources.engines.translate import (
    AUTO,
    TranslatedExposition,
    dialects_of,
    translate,
    wanted_series,
)

PAGES = Path(__file__).parent / "pages"


def body(name: str) -> bytes:
    """The bytes of one fixture page."""
    return (PAGES / f"{name}.txt").read_bytes()


def reading_of(page: bytes, kind: str = AUTO) -> TranslatedExposition:
    """What a page tells an agent that was configured with this kind of engine."""
    dialects = dialects_of(kind)
    return translate(read_exposition(page, wanted_series(dialects)), dialects)


def reading(name: str, kind: str = AUTO) -> TranslatedExposition:
    """What a fixture page tells."""
    return reading_of(body(name), kind)
