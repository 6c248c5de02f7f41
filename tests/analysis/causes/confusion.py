"""Which cause is named for which injected fault of a simulated engine, counted and as tables.

`python -m tests.analysis.causes.confusion` makes the matrices of docs/causes-evidence.md anew.
`counterfactual.py` says which causes are true.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from agent.catalog.causes import Cause
from tests.analysis.causes.counterfactual import Counterfactual, Counts, counted
from tests.analysis.causes.fault_runs import Run, Sight, simulated
from tests.analysis.causes.faults import HELD_OUT, SLOW_UNSEEN, TUNED, FaultKind, Setting


def counts_of(
    setting: Setting, kinds: Sequence[FaultKind], seeds: Iterable[int], *, plugin: bool
) -> Counts:
    """How often each cause was named for the requests that missed because of these faults.

    Without `plugin`, the agent has spans and samples alone.
    """
    return counted(
        each
        for seed in seeds
        for each in _counterfactual(setting, seed, plugin).judged(tuple(kinds))
    )


@lru_cache(maxsize=8)
def _counterfactual(setting: Setting, seed: int, plugin: bool) -> Counterfactual[FaultKind]:
    """The requests of one seed, as an agent with or without the plugin sees them."""

    def sight(kinds: tuple[FaultKind, ...]) -> Sight:
        return _run(setting, kinds, seed).sight(proxy=plugin)

    return Counterfactual(sight, setting.objective, plugin=plugin)


@lru_cache(maxsize=32)
def _run(setting: Setting, kinds: tuple[FaultKind, ...], seed: int) -> Run:
    return simulated([kind.fault for kind in kinds], seed, setting.scenario)


PAGE = Path(__file__).parents[3] / "docs/causes-evidence.md"
BEGIN = "<!-- made by python -m tests.analysis.causes.confusion -->"
END = "<!-- end of the matrix -->"
VIEWS = {True: "plugin, proxy and samples", False: "spans and samples alone"}
UNSEEN = {
    plugin: f"Slow steps for no reason that is seen, with {VIEWS[plugin]}" for plugin in VIEWS
}


def write() -> None:
    """Replace the matrix in the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{_matrix()}\n{END}{after}", encoding="utf-8")


def _matrix() -> str:
    parts = [
        f"### One fault at a time, with {view}\n\n{_singles([TUNED], plugin=plugin)}"
        for plugin, view in VIEWS.items()
    ]
    for plugin, view in VIEWS.items():
        parts += [f"### Held-out faults, with {view}\n\n{_singles(HELD_OUT, plugin=plugin)}"]
    for plugin in VIEWS:
        unseen = [(each, [SLOW_UNSEEN], each.seeds[:1]) for each in (TUNED, *HELD_OUT)]
        parts += [f"### {UNSEEN[plugin]}\n\n{_table(unseen, plugin=plugin)}"]
    return "\n".join(parts)


def seen_kinds(setting: Setting, *, plugin: bool) -> list[FaultKind]:
    """The faults that a view can see."""
    return [kind for kind in setting.kinds if plugin or not kind.outside]


def _singles(settings: Sequence[Setting], *, plugin: bool) -> str:
    return _table(
        [
            (setting, [kind], setting.seeds)
            for setting in settings
            for kind in seen_kinds(setting, plugin=plugin)
        ],
        plugin=plugin,
    )


_Line = tuple[Setting, Sequence[FaultKind], Sequence[int]]


def _table(wanted: Sequence[_Line], *, plugin: bool) -> str:
    lines = [
        "| faults | missed | right | unexplained | wrong | named |",
        "|---|---|---|---|---|---|",
    ]
    every = []
    for setting, kinds, seeds in wanted:
        counts = counts_of(setting, kinds, seeds, plugin=plugin)
        every.append(counts)
        lines.append(row(setting, kinds, counts))
    total = Counts(
        missed=sum(each.missed for each in every),
        right=sum(each.right for each in every),
        unexplained=sum(each.unexplained for each in every),
        causes=every[0].causes,
    )
    lines.append(_line("**all**", total, ""))
    return "\n".join(lines) + "\n"


def row(setting: Setting, kinds: Sequence[FaultKind], counts: Counts) -> str:
    """The table's line of some faults; causes below one in a hundred are left out."""
    true = {cause for kind in kinds for cause in kind.causes}
    named = [
        f"{_name(cause, true)} {_share(number, counts.missed)}"
        for cause, number in counts.causes.most_common()
        if number >= 0.01 * counts.missed
    ]
    name = " + ".join(kind.fault.name for kind in kinds)
    of = "" if setting is TUNED else f"{setting.name}: "
    return _line(f"{of}{name}", counts, ", ".join(named))


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
