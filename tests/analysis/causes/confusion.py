"""Which cause is named for which injected fault of a simulated engine, counted and as tables.

`python -m tests.analysis.causes.confusion` makes the matrices of docs/causes-evidence.md anew.
`counterfactual.py` says which causes are true.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from agent.catalog.causes import Cause
from tests.analysis.causes.counterfactual import Counterfactual, Counts, counted
from tests.analysis.causes.fault_runs import PROXY, SPANS, Run, Sight, View, simulated
from tests.analysis.causes.faults import SLOW_UNSEEN, TUNED, FaultKind, Setting


def counts_of(
    setting: Setting, kinds: Sequence[FaultKind], seeds: Iterable[int], view: View
) -> Counts:
    """How often each cause was named for the requests that missed because of these faults."""
    return counted(
        each for seed in seeds for each in _counterfactual(setting, seed, view).judged(tuple(kinds))
    )


@lru_cache(maxsize=8)
def _counterfactual(setting: Setting, seed: int, view: View) -> Counterfactual[FaultKind]:
    """The requests of one seed, as an agent with this view sees them."""

    def sight(kinds: tuple[FaultKind, ...]) -> Sight:
        return _run(setting, kinds, seed).sight(view)

    return Counterfactual(sight, setting.objective, plugin=view.plugin)


@lru_cache(maxsize=32)
def _run(setting: Setting, kinds: tuple[FaultKind, ...], seed: int) -> Run:
    return simulated([kind.fault for kind in kinds], seed, setting.scenario)


PAGE = Path(__file__).parents[3] / "docs/causes-evidence.md"
BEGIN = "<!-- made by python -m tests.analysis.causes.confusion -->"
END = "<!-- end of the matrix -->"
VIEWS = (SPANS, PROXY)


def write() -> None:
    """Replace the matrix in the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{_matrix()}\n{END}{after}", encoding="utf-8")


def _matrix() -> str:
    return "\n".join(f"### {title(view)}\n\n{_table(TUNED, view)}" for view in VIEWS)


def title(view: View) -> str:
    """The title of a view's table."""
    return f"One fault at a time, with {view.name}"


def seen_kinds(setting: Setting, view: View) -> list[FaultKind]:
    """The faults that a view can see, and those that none can."""
    return [kind for kind in (*SLOW_UNSEEN, *setting.kinds) if view.proxy or not kind.outside]


def _table(setting: Setting, view: View) -> str:
    lines = [
        "| faults | missed | right | unexplained | wrong | named |",
        "|---|---|---|---|---|---|",
    ]
    every = []
    for kind in seen_kinds(setting, view):
        counts = counts_of(setting, [kind], setting.seeds, view)
        # A fault may be too weak for the limits.
        if counts.missed:
            every.append(counts)
            lines.append(row([kind], counts))
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
    name = " + ".join(kind.fault.name for kind in kinds)
    return _line(name, counts, ", ".join(named))


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
