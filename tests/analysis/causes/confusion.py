"""Which cause is named for which injected fault of a simulated engine, counted and as tables.

`python -m tests.analysis.causes.confusion` makes the matrices of docs/causes-evidence.md anew.

The truth does not come from a rule. The same requests run with and without a fault: what a request
lost by the fault is the difference of the two runs. A fault is true of a missed request if without
it the excess would be smaller by a quarter or more.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from agent.analysis.causes import EngineTimeline, explain
from agent.analysis.verdicts import Excess, excesses, judge
from agent.catalog.causes import Cause
from agent.catalog.definitions import Verdict
from agent.records.objective import Explanation, Objective
from agent.records.request import RequestRecord
from tests.analysis.causes.fault_runs import Run, Sight, simulated
from tests.analysis.causes.faults import HELD_OUT, SLOW_UNSEEN, TUNED, FaultKind, Setting

# A fault that cost a smaller part of the excess is not its cause.
_PART = 0.25
# Worth more than any latency.
_FAILURE_S = 3600.0
# When a row comes to the agent, and when it is explained, after the request's end.
_ROW_AFTER_S, _EXPLAINED_AFTER_S = 1.0, 6.0

# A request is known by its arrival, and by its place among those of a surge.
RequestKey = tuple[float, int]


class Counts(NamedTuple):
    """The missed requests of some faults, and the causes that were named for them."""

    missed: int
    right: int
    unexplained: int
    causes: Counter[Cause]

    @property
    def wrong(self) -> int:
        """Requests with a cause that is not true of them."""
        return self.missed - self.right - self.unexplained


def counts_of(
    setting: Setting, kinds: Sequence[FaultKind], seeds: Iterable[int], *, plugin: bool
) -> Counts:
    """How often each cause was named for the requests that missed because of these faults.

    Without `plugin`, the agent has spans and samples alone.
    """
    named = [
        each for seed in seeds for each in _SeededSetting(setting, seed, plugin).named(tuple(kinds))
    ]
    return Counts(
        missed=len(named),
        right=sum(right for right, _ in named),
        unexplained=sum(cause is Cause.UNEXPLAINED for _, cause in named),
        causes=Counter(cause for _, cause in named),
    )


class _SeededSetting(NamedTuple):
    """The requests of one seed, as an agent with or without the plugin sees them."""

    setting: Setting
    seed: int
    plugin: bool

    def named(self, kinds: tuple[FaultKind, ...]) -> Iterator[tuple[bool, Cause]]:
        """For each request that missed because of the faults: whether the cause is true, and it."""
        without = {
            kind: _excess_of_all(self, tuple(other for other in kinds if other is not kind))
            for kind in kinds
        }
        plain = _excess_of_all(self, ())
        objective = self.setting.objective
        sight = self.run(kinds).sight(proxy=self.plugin)
        for key, record, found in explained(sight, objective, plugin=self.plugin):
            still_s = (1 - _PART) * _excess_s(record, objective)
            if plain.get(key, 0.0) > still_s:
                continue
            guilty = [kind for kind in kinds if without[kind].get(key, 0.0) <= still_s] or kinds
            yield any(found.top in kind.causes for kind in guilty), found.top

    def run(self, kinds: tuple[FaultKind, ...]) -> Run:
        """The run with these faults."""
        return _run(self.setting, kinds, self.seed)


@lru_cache(maxsize=32)
def _run(setting: Setting, kinds: tuple[FaultKind, ...], seed: int) -> Run:
    return simulated([kind.fault for kind in kinds], seed, setting.scenario)


@lru_cache(maxsize=64)
def _excess_of_all(seeded: _SeededSetting, kinds: tuple[FaultKind, ...]) -> dict[RequestKey, float]:
    requests = seeded.run(kinds).sight(proxy=seeded.plugin).requests
    objective = seeded.setting.objective
    return {key: _excess_s(record, objective) for key, record in _keyed(requests)}


def _keyed(records: Iterable[RequestRecord]) -> Iterator[tuple[RequestKey, RequestRecord]]:
    """In the order of the requests' numbers: the first of a surge is the request without it."""
    copies: Counter[float] = Counter()
    for record in sorted(records, key=lambda each: int(each.span_id, 16)):
        at = record.started_at
        yield (at, copies[at]), record
        copies[at] += 1


def _broken(record: RequestRecord, objective: Objective) -> Sequence[Excess]:
    return excesses(record, objective) if judge(record, objective) is Verdict.MISSED else ()


def _excess_s(record: RequestRecord, objective: Objective) -> float:
    broken = _broken(record, objective)
    return sum(_FAILURE_S if each.seconds is None else each.seconds for each in broken)


def explained(
    sight: Sight, objective: Objective, *, plugin: bool
) -> Iterator[tuple[RequestKey, RequestRecord, Explanation]]:
    """Each missed request explained, from what an agent knows some seconds after its end."""
    timeline = EngineTimeline()
    if sight.died_at is not None:
        timeline.died(sight.died_at, "ENGINE_DEAD")
    took: list[tuple[float, Callable[[], None]]] = [
        *((each.at, partial(timeline.host, each)) for each in sight.hosts),
        *((each.at, partial(timeline.gpu, each.at, [each])) for each in sight.gpus),
        *((each.at, partial(timeline.sample, each)) for each in sight.samples),
        *((r.ended_at + _ROW_AFTER_S, partial(timeline.request, r)) for r in sight.requests),
        *((s.ended_at, partial(timeline.step, s)) for s in (sight.steps if plugin else ())),
    ]
    took.sort(key=lambda each: each[0])
    missed = [pair for pair in _keyed(sight.requests) if _broken(pair[1], objective)]
    missed.sort(key=lambda pair: pair[1].ended_at)
    upcoming = iter(took)
    at, take = next(upcoming)
    for key, record in missed:
        while at <= record.ended_at + _EXPLAINED_AFTER_S:
            take()
            at, take = next(upcoming, (float("inf"), take))
        ended = sight.ended.get(record.span_id) if plugin else None
        yield key, record, explain(record, [objective], timeline, ended)


PAGE = Path(__file__).parents[3] / "docs/causes-evidence.md"
BEGIN = "<!-- made by python -m tests.analysis.causes.confusion -->"
END = "<!-- end of the matrix -->"
# The simulation of pairs takes long.
PAIR_SEEDS = (1,)
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
    parts = []
    for plugin, view in VIEWS.items():
        kinds = seen_kinds(TUNED, plugin=plugin)
        pairs = [list(pair) for pair in combinations(kinds, 2)]
        parts += [
            f"### One fault at a time, with {view}\n\n{_singles([TUNED], plugin=plugin)}",
            f"### Two faults at a time, with {view}\n\n"
            f"{_table([(TUNED, pair, PAIR_SEEDS) for pair in pairs], plugin=plugin)}",
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
