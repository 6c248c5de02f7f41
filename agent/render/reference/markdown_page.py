"""Parts of a generated page in Markdown."""

from collections.abc import Iterable, Sequence

_MADE = "Made by `goodput-agent render` from the code. Change it there, and render again."


def page(title: str, remark: str, parts: Iterable[str]) -> str:
    """A page: its title, what it is, and its parts."""
    return "\n\n".join((f"# {title}", remark, _MADE, *parts)) + "\n"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; a cell may hold any character but a line break."""
    rule = ["---"] * len(header)
    return "\n".join(_line(cells) for cells in (header, rule, *rows))


def code(text: str) -> str:
    """Text as code in a line."""
    # A back quote inside needs more of them outside.
    return f"`{text}`" if "`" not in text else f"`` {text} ``"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
