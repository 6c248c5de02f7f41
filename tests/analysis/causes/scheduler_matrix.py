"""How often the named cause is true on vLLM's own scheduler, by scenario, strength and source.

`python -m tests.analysis.causes.scheduler_matrix` prints the matrix; with `--write` it goes into
docs/causes-evidence.md.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from agent.records.objective import Objective
from tests.analysis.causes.counterfactual import Counterfactual, Counts, by_number, counted
from tests.analysis.causes.fault_runs import Sight
from tests.analysis.causes.scheduler_runs import View, recorded, recording
from tests.analysis.causes.scheduler_scenarios import (
    CACHE_LOST,
    CHAT,
    DOCUMENTS,
    DRAFTING,
    LARGE,
    PACKS_SPREAD,
    PREFIXES_CHANGED,
    SCENARIOS,
    Factor,
    Scenario,
    blocks_taken,
    engine_blocks,
    engine_places,
    loaded,
    long_outputs,
    long_prompts,
    places,
    refused,
    slow_tokeniser,
    slower,
    stalls,
    starved,
    strangers,
    throttled,
)
from tests.records.making import objective

# Of the usual requests so many meet each limit.
_MET = 0.97
STRENGTHS = (1.1, 1.2, 1.35, 1.6, 2.5, 4.0)


class Case(NamedTuple):
    """A scenario, and the factors of one run."""

    scenario: Scenario
    factors: tuple[Factor, ...]

    @property
    def name(self) -> str:
        """The factors' names."""
        return " + ".join(factor.name for factor in self.factors)


# How much of the KV cache is taken, and how many places are left, so that it is felt.
_TAKEN = {CHAT: 0.9, LARGE: 0.95, DOCUMENTS: 0.9, DRAFTING: 0.95}
_PLACES = {CHAT: 4, LARGE: 7, DOCUMENTS: 2, DRAFTING: 2}
_LONG = {CHAT: 6000, LARGE: 16_000, DOCUMENTS: 20_000, DRAFTING: 12_000}


def singles(scenario: Scenario) -> list[Case]:
    """Every factor in its strengths."""
    factors: list[Factor] = [
        *map(slower, STRENGTHS),
        *map(starved, (1.2, 1.6, 2.5)),
        *map(throttled, (1.2, 1.6, 3.0)),
        *map(loaded, (1.5, 2.5)),
        *(long_prompts(share, _LONG[scenario]) for share in (0.05, 0.2)),
        *map(long_outputs, (2.0, 5.0)),
        *map(strangers, (0.5, 1.5)),
        blocks_taken(_TAKEN[scenario]),
        places(_PLACES[scenario]),
        CACHE_LOST,
        PREFIXES_CHANGED,
        *map(stalls, (3.0, 8.0)),
        slow_tokeniser(0.4),
        *(map(refused, (0.5, 0.1)) if scenario is DRAFTING else ()),
    ]
    return [Case(scenario, (factor,)) for factor in factors]


def pairs() -> list[Case]:
    """Two factors at once."""
    return [
        Case(DRAFTING, (PREFIXES_CHANGED, refused(0.1))),
        Case(DRAFTING, (loaded(2.5), refused(0.1))),
        Case(CHAT, (PREFIXES_CHANGED, slower(1.6))),
        Case(LARGE, (PREFIXES_CHANGED, starved(1.6))),
        Case(DOCUMENTS, (CACHE_LOST, loaded(1.5))),
        Case(LARGE, (loaded(2.5), slower(1.35))),
        Case(LARGE, (loaded(2.5), throttled(1.6))),
        Case(CHAT, (strangers(1.5), slow_tokeniser(0.4))),
        # Too small for the load, and enough for the usual one.
        Case(CHAT, (long_outputs(5.0), engine_blocks(700))),
        Case(LARGE, (loaded(2.5), engine_places(24))),
        Case(DRAFTING, (loaded(2.5), engine_places(5))),
    ]


def cases() -> list[Case]:
    """All that the matrix has."""
    return [*chain.from_iterable(map(singles, SCENARIOS)), *pairs()]


def run(wanted: Iterable[Case]) -> None:
    """Run what is not kept yet, and what each run is compared with."""
    needed = []
    for scenario, factors in wanted:
        fewer = [tuple(other for other in factors if other is not each) for each in factors]
        needed += [(scenario, each) for each in (factors, (), *fewer, (*factors, PACKS_SPREAD))]
    recorded(dict.fromkeys(needed))


@lru_cache(maxsize=16)
def limits(scenario: Scenario) -> Objective:
    """The objective that 97 of 100 usual requests meet, each limit by itself."""
    usual = recording(scenario).sight(View.SAMPLES).requests
    return objective(
        ttft_s=_met([each.ttft_s for each in usual]), tpot_s=_met([each.tpot_s for each in usual])
    )


def _met(values: Iterable[float | None]) -> float:
    known = sorted(value for value in values if value is not None)
    return round(known[int(_MET * len(known))], 4)


@lru_cache(maxsize=16)
def counterfactual(scenario: Scenario, view: View) -> Counterfactual[Factor]:
    """The requests of a scenario with any factors, as an agent with this view sees them."""

    def sight(factors: tuple[Factor, ...]) -> Sight:
        return recording(scenario, factors).sight(view)

    without = (PACKS_SPREAD,)
    return Counterfactual(sight, limits(scenario), plugin=True, without=without, known=by_number)


@cache
def counts_of(case: Case, view: View) -> Counts:
    """How often each cause was named for the requests that missed because of the factors."""
    return counted(counterfactual(case.scenario, view).judged(case.factors))


def named(wanted: Sequence[Case]) -> Iterator[str]:
    """For the terminal: of each case and view the shares, and the causes that were named."""
    for case in wanted:
        yield f"{case.scenario.name}: {case.name}"
        for view in View:
            counts = counts_of(case, view)
            causes = ", ".join(f"{cause} {n}" for cause, n in counts.causes.most_common(5))
            yield f"   {view[:12]:12} {cell(counts):16} {causes}"


def cell(counts: Counts, digits: int = 0) -> str:
    """Missed requests, and the percentages that are right, unexplained and wrong."""
    if not counts.missed:
        return "-"
    of = (counts.right, counts.unexplained, counts.wrong)
    return f"{counts.missed}: " + " / ".join(f"{100 * n / counts.missed:.{digits}f}" for n in of)


# All factors are inside the engine: with the proxy in addition, the figures are the same.
TABLES = (View.SAMPLES, View.PLUGIN, View.DETAILS)
BOTH = """Requests of which both factors are true, and the percentage of them in which the causes of
each have a tenth of the seconds or more."""
PAGE = Path(__file__).parents[3] / "docs/causes-evidence.md"
BEGIN = "<!-- made by python -m tests.analysis.causes.scheduler_matrix --write -->"
END = "<!-- end of the matrix of vLLM's scheduler -->"


def write() -> None:
    """Replace the matrix in the page."""
    # All views of a run together: it is read once.
    for case in cases():
        for view in TABLES:
            counts_of(case, view)
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    tables = "\n".join(f"### With {view}\n\n{table(view)}" for view in TABLES)
    tables += f"\n### Two factors at once\n\n{side_by_side()}"
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables}\n{END}{after}", encoding="utf-8")


def table(view: View) -> str:
    """The table of a view: a line of each factor, a column of each scenario."""
    head = ["factor", *(scenario.name for scenario in SCENARIOS), "all"]
    lines = [_line(head), f"|{'---|' * len(head)}"]
    rows: dict[str, dict[Scenario, Counts]] = {}
    for case in cases():
        rows.setdefault(case.name, {})[case.scenario] = counts_of(case, view)
    for name, of in rows.items():
        lines.append(_line([name, *_cells(of), cell(total(of.values()), 1)]))
    columns = {each: [of[each] for of in rows.values() if each in of] for each in SCENARIOS}
    sums = {each: total(column) for each, column in columns.items()}
    lines.append(_line(["**all**", *_cells(sums), cell(total(sums.values()), 1)]))
    return "\n".join(lines) + "\n"


def side_by_side() -> str:
    """The table of requests of which both of two factors are true: how often both are named."""
    visible = [case for case in pairs() if all(each.causes for each in case.factors)]
    rows = [
        _line([case.name, case.scenario.name, *(_both_named(case, view) for view in TABLES)])
        for case in visible
    ]
    head = [_line(["factors", "scenario", *TABLES]), f"|{'---|' * (2 + len(TABLES))}"]
    return "\n".join((BOTH, "", *head, *rows)) + "\n"


def _both_named(case: Case, view: View) -> str:
    judged = counterfactual(case.scenario, view).judged(case.factors)
    of_both = [each.all_named for each in judged if len(each.guilty) == len(case.factors)]
    return f"{len(of_both)}: {100 * sum(of_both) / len(of_both):.0f}" if of_both else "-"


def _cells(of: Mapping[Scenario, Counts]) -> Iterator[str]:
    return (cell(of[each]) if each in of else "" for each in SCENARIOS)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def total(every: Iterable[Counts]) -> Counts:
    """The sum of some counts."""
    known = list(every)
    return Counts(
        missed=sum(each.missed for each in known),
        right=sum(each.right for each in known),
        unexplained=sum(each.unexplained for each in known),
        causes=sum((each.causes for each in known), Counter()),
    )


def main(arguments: Sequence[str]) -> None:
    """Write the page, or print the cases of the scenarios with this in their names."""
    wanted = [case for case in cases() if not arguments or arguments[0] in case.scenario.name]
    if arguments == ["--write"]:
        run(cases())
        write()
        return
    run(wanted)
    for line in named(wanted):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
