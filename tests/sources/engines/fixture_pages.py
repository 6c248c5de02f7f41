"""The fixture pages, each named `<engine>-<version>[-<setting>].txt`, and their facts."""

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
    return (PAGES / f"{name}.txt").read_bytes()


def translated_body(page: bytes, kind: str = AUTO) -> TranslatedExposition:
    """The facts of an exposition, for an engine that is configured with this kind."""
    dialects = dialects_of(kind)
    return translate(read_exposition(page, wanted_series(dialects)), dialects)


def translated_page(name: str, kind: str = AUTO) -> TranslatedExposition:
    return translated_body(body(name), kind)
