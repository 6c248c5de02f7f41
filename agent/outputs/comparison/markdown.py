"""A comparison as Markdown, as for a comment on a pull request."""

from collections.abc import Iterable, Iterator, Sequence

from agent.analysis.comparison.comparing import ComparedLine, Comparison, Outcome
from agent.outputs.comparison import wording

_SIGNS = {
    **{Outcome.BETTER: ":white_check_mark: ", Outcome.WORSE: ":x: "},
    **{Outcome.LOAD_CHANGED: ":warning: ", Outcome.NO_EVIDENCE: ""},
}
# Characters that would end a cell, or begin a tag.
_ESCAPES = str.maketrans({"|": "\\|", "<": "&lt;", "\n": " "})


def markdown(comparison: Comparison) -> str:
    """The verdict first; what did not change is folded."""
    return "\n".join(_lines(comparison)) + "\n"


def _lines(comparison: Comparison) -> Iterator[str]:
    sign = _SIGNS.get(comparison.outcome, ":grey_question: ")
    yield f"### {sign}{wording.headline(comparison)}"
    yield ""
    for sentence in wording.explanations(comparison):
        yield f"- {_escaped(sentence)}"
    for name, run in (("before", comparison.before), ("after", comparison.after)):
        yield f"- {name}: {_escaped(wording.described(run))}"
    yield ""
    yield from _table(comparison.lines)
    yield ""
    yield "<details><summary>Load and causes</summary>"
    yield ""
    yield from _table(comparison.load)
    yield from _causes(comparison)
    yield ""
    yield "</details>"
    yield ""
    yield f"<sub>{wording.METHOD}</sub>"


def _table(lines: Sequence[ComparedLine]) -> Iterator[str]:
    yield _row(wording.HEADERS)
    yield "|:--|--:|--:|--:|:--|"
    for cells in wording.cells(lines):
        judged = cells.verdict in (Outcome.BETTER, Outcome.WORSE)
        yield _row((*cells[:-1], f"**{cells.verdict}**" if judged else cells.verdict))


def _causes(comparison: Comparison) -> Iterator[str]:
    found = wording.causes(comparison)
    if found:
        yield ""
        yield _row(("missed by first cause, % of all", "before", "after"))
        yield "|:--|--:|--:|"
        yield from (_row(each) for each in found)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(_escaped(cell) for cell in cells)} |"


def _escaped(text: str) -> str:
    return text.translate(_ESCAPES)
