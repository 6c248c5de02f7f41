"""`python -m tests.analysis.causes.matrix_page`: make the matrix of docs/causes.md anew."""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from agent.catalog.causes import Cause
from tests.analysis.causes.confusion import Counts, counts_of
from tests.analysis.causes.faults import KINDS, FaultKind

PAGE = Path(__file__).parents[3] / "docs/causes.md"
BEGIN = "<!-- made by python -m tests.analysis.causes.matrix_page -->"
END = "<!-- end of the matrix -->"
SEEDS = (1, 2)
PAIR_SEEDS = (1,)
VIEWS = {True: "plugin, proxy and samples", False: "spans and samples alone"}


def write() -> None:
    """Replace the matrix in the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{_matrix()}\n{END}{after}", encoding="utf-8")


def _matrix() -> str:
    parts = []
    for plugin, view in VIEWS.items():
        kinds = seen_kinds(plugin=plugin)
        singles = [[kind] for kind in kinds]
        pairs = [list(pair) for pair in combinations(kinds, 2)]
        parts += [
            f"### One fault at a time, with {view}\n\n{_table(singles, SEEDS, plugin=plugin)}",
            f"### Two faults at a time, with {view}\n\n{_table(pairs, PAIR_SEEDS, plugin=plugin)}",
        ]
    return "\n".join(parts)


def seen_kinds(*, plugin: bool) -> list[FaultKind]:
    """The faults that a view can see."""
    return [kind for kind in KINDS if plugin or not kind.outside]


def _table(sets: Sequence[Sequence[FaultKind]], seeds: Sequence[int], *, plugin: bool) -> str:
    lines = [
        "| faults | missed | right | unexplained | wrong | named |",
        "|---|---|---|---|---|---|",
    ]
    every = []
    for kinds in sets:
        counts = counts_of(kinds, seeds, plugin=plugin)
        every.append(counts)
        lines.append(row(kinds, counts))
    total = Counts(
        missed=sum(each.missed for each in every),
        right=sum(each.right for each in every),
        unexplained=sum(each.unexplained for each in every),
        causes=every[0].causes,
    )
    lines.append(_line("**all**", total, ""))
    return "\n".join(lines) + "\n"


def row(kinds: Sequence[FaultKind], counts: Counts) -> str:
    """The table's line of some faults; causes below one in a hundred are left out."""
    true = {cause for kind in kinds for cause in kind.causes}
    named = [
        f"{_name(cause, true)} {_share(number, counts.missed)}"
        for cause, number in counts.causes.most_common()
        if number >= 0.01 * counts.missed
    ]
    return _line(" + ".join(kind.fault.name for kind in kinds), counts, ", ".join(named))


def _name(cause: Cause, true: set[Cause]) -> str:
    """The cause; in italics where it is true of none of the faults."""
    return cause.value if cause in true or cause is Cause.UNEXPLAINED else f"*{cause.value}*"


def _line(name: str, counts: Counts, named: str) -> str:
    shares = [_share(number, counts.missed) for number in counts[1:3]]
    wrong = _share(counts.wrong, counts.missed)
    return f"| {name} | {counts.missed} | {shares[0]} | {shares[1]} | {wrong} | {named} |"


def _share(number: int, of: int) -> str:
    return f"{number / of:.1%}" if of else "-"


if __name__ == "__main__":
    write()
