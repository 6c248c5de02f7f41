"""What a change of an engine does to requests that miss, tried on vLLM's own scheduler.

`python -m tests.analysis.causes.advice_study` runs what is not kept yet, and writes the figures
into advice_study.json and as tables into docs/causes-advice.md. The same requests run with and
without the change, which holds during the whole run. Requests of all the run count, so that what a
change costs at usual times counts, too.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from agent.analysis.verdicts import excesses, judge
from agent.catalog.causes import Cause, Effect
from agent.catalog.definitions import Verdict
from agent.records.objective import Objective
from agent.records.request import RequestRecord
from tests.analysis.causes.counterfactual import by_arrival, explained
from tests.analysis.causes.scheduler_runs import View, recorded, recording, with_engine
from tests.analysis.causes.scheduler_scenarios import (
    CHAT,
    DOCUMENTS,
    DRAFTING,
    LARGE,
    Factor,
    Scenario,
    loaded,
    long_outputs,
    long_prompts,
    refused,
)
from tests.records.making import objective

# Of the usual requests so many meet each limit.
_MET = 0.97
# The excess has to change by this share, to count as better or worse.
_FELT = 0.1
# A scene is one of a cause if the agent charges it with this share of the excess. Some causes are
# never charged with a tenth: who waits for memory loses more than who is preempted, and a long
# prompt takes more from others than it takes itself.
_NAMED = 0.1
_RARE = (Cause.PREEMPTION, Cause.LONG_PROMPT, Cause.PREFILL_CONTENTION)
_RARELY_NAMED = 0.01
# The table by cause has a change with as many cases, and what the catalogue says.
_CASES = 3

Json = dict[str, Any]


class Scene(NamedTuple):
    """An engine and its requests, with something that makes them miss."""

    situation: str
    scenario: Scenario
    factor: Factor

    @property
    def name(self) -> str:
        """The engine, its tight arguments and the factor."""
        return f"{self.scenario.name}; {self.situation}: {self.factor.name}"


@dataclass(frozen=True, kw_only=True)
class Share(Scenario):
    """The scenario of one of several replicas: it gets one request after another in turn."""

    place: int
    replicas: int

    def job(self, factors: tuple[Factor, ...]) -> Json:
        job = super().job(factors)
        return job | {"requests": job["requests"][self.place :: self.replicas]}

    def __hash__(self) -> int:
        return hash((self.name, self.seed, self.place))


# The engines of a scene with a change, which have its requests together.
Change = Callable[[Scene], Sequence[Scenario]]


def _argument(name: str, times: float) -> Change:
    def changed(scene: Scene) -> Sequence[Scenario]:
        value = scene.scenario.engine[name]
        return [with_engine(scene.scenario, **{name: max(1, round(value * times))})]

    return changed


def _threshold(scene: Scene) -> Sequence[Scenario]:
    tokens = scene.scenario.engine["max_num_batched_tokens"] // 4
    return [with_engine(scene.scenario, long_prefill_token_threshold=tokens)]


def _watermark(scene: Scene) -> Sequence[Scenario]:
    return [with_engine(scene.scenario, watermark=0.1)]


def _fewer_seqs(scene: Scene) -> Sequence[Scenario]:
    """Three quarters of the most that ran at once."""
    records = _requests([scene.scenario], scene.factor)
    changes = [(each.started_at + (each.queue_s or 0.0), 1) for each in records]
    changes += [(each.ended_at, -1) for each in records]
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return [with_engine(scene.scenario, max_num_seqs=max(1, most * 3 // 4))]


def _replica(scene: Scene) -> Sequence[Scenario]:
    given = {each.name: getattr(scene.scenario, each.name) for each in fields(scene.scenario)}
    return [Share(**given, place=place, replicas=2) for place in range(2)]


def _twice_the_gpus(scene: Scene) -> Sequence[Scenario]:
    """Each GPU has half of the weights, heads and KV values; a step has its all-reduces."""
    machine = scene.scenario.machine
    split = replace(
        machine,
        weights_s=machine.weights_s / 2,
        token_s=machine.token_s / 2,
        kv_token_s=machine.kv_token_s / 2,
        attention_s=machine.attention_s / 2,
        launch_s=machine.launch_s + 0.001,
    )
    blocks = 2 * scene.scenario.engine["num_gpu_blocks_override"]
    return [with_engine(replace(scene.scenario, machine=split), num_gpu_blocks_override=blocks)]


def _drafts(number: int) -> Change:
    def changed(scene: Scene) -> Sequence[Scenario]:
        config = {**scene.scenario.engine["speculative_config"], "num_speculative_tokens": number}
        return [with_engine(scene.scenario, speculative_config=config if number else None)]

    return changed


FEWER_STEP_TOKENS = "`--max-num-batched-tokens`: a quarter"
MORE_STEP_TOKENS = "`--max-num-batched-tokens`: four times"
THRESHOLD = "`--long-prefill-token-threshold`: a quarter of the step"
FEWER_SEQS = "`--max-num-seqs`: three quarters of the most at once"
MORE_SEQS = "`--max-num-seqs`: twice"
REPLICA = "a second replica"
TWICE_THE_GPUS = "`--tensor-parallel-size`: twice"
MORE_BLOCKS = "KV cache: a quarter more"
WATERMARK = "`--watermark 0.1`"
FEWER_DRAFTS = "`num_speculative_tokens`: 1 in place of 3"
NO_DRAFTS = "no drafts"

CHANGES: Mapping[str, Change] = {
    FEWER_STEP_TOKENS: _argument("max_num_batched_tokens", 0.25),
    MORE_STEP_TOKENS: _argument("max_num_batched_tokens", 4),
    THRESHOLD: _threshold,
    FEWER_SEQS: _fewer_seqs,
    MORE_SEQS: _argument("max_num_seqs", 2),
    REPLICA: _replica,
    TWICE_THE_GPUS: _twice_the_gpus,
    MORE_BLOCKS: _argument("num_gpu_blocks_override", 1.25),
    WATERMARK: _watermark,
    FEWER_DRAFTS: _drafts(1),
    NO_DRAFTS: _drafts(0),
}

TRIED: Mapping[str, Sequence[str]] = {
    "more requests": (FEWER_STEP_TOKENS, MORE_STEP_TOKENS, FEWER_SEQS, REPLICA),
    "long prompts": (FEWER_STEP_TOKENS, MORE_STEP_TOKENS, THRESHOLD, REPLICA, TWICE_THE_GPUS),
    "long responses": (FEWER_STEP_TOKENS, FEWER_SEQS, REPLICA),
    "a small KV cache": (MORE_BLOCKS, WATERMARK, FEWER_SEQS),
    "few places": (MORE_SEQS, REPLICA),
    "refused drafts": (FEWER_DRAFTS, NO_DRAFTS),
}

# What the catalogue advises, and another change of which it has the effect.
ADVISED: Mapping[Cause, str] = {
    Cause.KV_PRESSURE: MORE_BLOCKS,
    Cause.SEQUENCE_CAP: MORE_SEQS,
    Cause.PREFILL_BACKLOG: REPLICA,
    Cause.BURST: REPLICA,
    Cause.LONG_PROMPT: TWICE_THE_GPUS,
    Cause.PREFILL_CONTENTION: REPLICA,
    Cause.PREEMPTION: MORE_BLOCKS,
    Cause.PREFILL_INTERFERENCE: REPLICA,
    Cause.BATCH_LOAD: REPLICA,
}
ALSO_TRIED: Mapping[Cause, str] = {
    Cause.KV_PRESSURE: FEWER_SEQS,
    Cause.PREFILL_BACKLOG: MORE_STEP_TOKENS,
    Cause.PREFILL_CONTENTION: THRESHOLD,
    Cause.PREEMPTION: WATERMARK,
    Cause.PREFILL_INTERFERENCE: FEWER_STEP_TOKENS,
    Cause.BATCH_LOAD: FEWER_SEQS,
    Cause.SPECULATION: FEWER_DRAFTS,
}

_ENGINES = (CHAT, DOCUMENTS, LARGE)
_LONG = {CHAT: 6000, LARGE: 16_000, DOCUMENTS: 20_000}
# Blocks, and the longest request, which has to have room.
_SMALL_CACHE = {CHAT: (320, 4096), LARGE: (1600, 8192), DOCUMENTS: (2400, 14_336)}
_FEW_PLACES = {CHAT: 6, LARGE: 24, DOCUMENTS: 6}


def scenes() -> Iterator[Scene]:
    """All that is tried: on the largest engine, whose runs take long, only the strong ones."""
    for scenario in _ENGINES:
        strong = scenario is LARGE
        for times in (2.5,) if strong else (1.5, 2.5):
            yield Scene("more requests", scenario, loaded(times))
        for share in (0.2,) if strong else (0.05, 0.2):
            yield Scene("long prompts", scenario, long_prompts(share, _LONG[scenario]))
        for times in (2.0, 3.0, 5.0) if scenario is CHAT else (3.0,):
            yield Scene("long responses", scenario, long_outputs(times))
        yield from _tight_scenes(scenario, (2.0,) if strong else (1.5, 2.0))
    yield Scene("long responses", DRAFTING, long_outputs(5.0))
    for accepted in (0.5, 0.1):
        yield Scene("refused drafts", DRAFTING, refused(accepted))


def _tight_scenes(scenario: Scenario, loads: Sequence[float]) -> Iterator[Scene]:
    blocks, longest = _SMALL_CACHE[scenario]
    small = with_engine(scenario, num_gpu_blocks_override=blocks, max_model_len=longest)
    few = with_engine(scenario, max_num_seqs=_FEW_PLACES[scenario])
    for times in loads:
        yield Scene("a small KV cache", small, loaded(times))
        yield Scene("few places", few, loaded(times))
    yield Scene("a small KV cache", small, long_outputs(3.0))


class Misses(NamedTuple):
    """The requests of a run that missed, and by how much."""

    missed: int
    excess_s: float


def _requests(engines: Iterable[Scenario], factor: Factor) -> list[RequestRecord]:
    return [
        record
        for engine in engines
        for record in recording(engine, (factor,)).sight(View.SAMPLES).requests
    ]


def misses(scene: Scene, change: str | None) -> Misses:
    """What missed in a scene with a change, or as it is."""
    engines = [scene.scenario] if change is None else CHANGES[change](scene)
    limits = limits_of(scene.scenario.name)
    broken = [
        excesses(record, limits)
        for record in _requests(engines, scene.factor)
        if judge(record, limits) is Verdict.MISSED
    ]
    excess_s = sum(each.seconds or 0.0 for every in broken for each in every)
    return Misses(len(broken), round(excess_s, 3))


@lru_cache
def limits_of(name: str) -> Objective:
    """The objective that 97 of 100 usual requests meet, each limit by itself."""
    (scenario,) = (each for each in (*_ENGINES, DRAFTING) if each.name == name)
    usual = recording(scenario).sight(View.SAMPLES).requests
    return objective(
        ttft_s=_met(each.ttft_s for each in usual), tpot_s=_met(each.tpot_s for each in usual)
    )


def _met(values: Iterable[float | None]) -> float:
    known = sorted(value for value in values if value is not None)
    return round(known[int(_MET * len(known))], 4)


def named(scene: Scene) -> dict[str, float]:
    """The causes with a part of the excess, as an agent with the plugin charges it."""
    charged: dict[str, float] = defaultdict(float)
    sight = recording(scene.scenario, (scene.factor,)).sight(View.PLUGIN)
    missed = by_arrival(sight.requests)
    for _, _, found in explained(sight, missed, limits_of(scene.scenario.name), plugin=True):
        for share in found.shares:
            charged[share.cause.value] += share.excess_s or 0.0
    total = sum(charged.values())
    return {
        cause: round(seconds / total, 3)
        for cause, seconds in sorted(charged.items(), key=lambda each: -each[1])
        if seconds >= 0.01 * total
    }


def prepare(wanted: Sequence[Scene], changes: Iterable[str] = CHANGES) -> None:
    """Run what is not kept yet: first the scenes as they are."""
    limits = [(each, ()) for each in (*_ENGINES, DRAFTING)
              if any(each.name == scene.scenario.name for scene in wanted)]  # fmt: skip
    recorded([*limits, *((each.scenario, (each.factor,)) for each in wanted)])
    recorded(
        (engine, (scene.factor,))
        for scene in wanted
        for change in TRIED[scene.situation]
        if change in changes
        for engine in CHANGES[change](scene)
    )


FIGURES = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parents[3] / "docs/causes-advice.md"
BEGIN = "<!-- made by python -m tests.analysis.causes.advice_study -->"
END = "<!-- end of the study -->"


def cell(scene: Scene, change: str | None) -> list[float]:
    """Missed requests and excess seconds, as the file has them."""
    return list(misses(scene, change))


def tried(wanted: Sequence[Scene]) -> Json:
    """All figures of these scenes by their names."""
    prepare(wanted)
    return {
        scene.name: {
            "situation": scene.situation,
            "requests": len(_requests([scene.scenario], scene.factor)),
            "causes": named(scene),
            "as it is": cell(scene, None),
            "changed": {change: cell(scene, change) for change in TRIED[scene.situation]},
        }
        for scene in wanted
    }


def kept() -> Json:
    """The figures in the file."""
    figures: Json = json.loads(FIGURES.read_text(encoding="utf-8"))
    return figures


def effect(figures: Json, cause: Cause, change: str) -> Effect:
    """What a change did in the scenes of a cause."""
    ratios = [
        found["changed"][change][1] / found["as it is"][1]
        for found in figures.values()
        if change in found["changed"] and found["causes"].get(cause.value, 0.0) >= _least(cause)
    ]
    return Effect(
        tried=len(ratios),
        helped=sum(ratio <= 1 - _FELT for ratio in ratios),
        harmed=sum(ratio >= 1 + _FELT for ratio in ratios),
        change=round(median(ratios) - 1, 2) if ratios else 0.0,
    )


def _least(cause: Cause) -> float:
    return _RARELY_NAMED if cause in _RARE else _NAMED


def tables(figures: Json) -> str:
    """The page's tables: by cause, then every scene."""
    parts = ["### By cause\n", _by_cause(figures)]
    for situation, changes in TRIED.items():
        parts += [f"### {situation.capitalize()}\n", _of_situation(figures, situation, changes)]
    return "\n".join(parts)


def _by_cause(figures: Json) -> str:
    lines = [
        "| cause | change | better | worse | excess, median |",
        "|---|---|---|---|---|",
    ]
    for cause in sorted({*ADVISED, *ALSO_TRIED}, key=list(Cause).index):
        for change in CHANGES:
            found = effect(figures, cause, change)
            said = change in (ADVISED.get(cause), ALSO_TRIED.get(cause))
            if said or found.tried >= _CASES:
                lines.append(
                    f"| `{cause}` | {change} | {found.helped} of {found.tried} "
                    f"| {found.harmed} of {found.tried} | {found.change:+.0%} |"
                )
    return "\n".join(lines) + "\n"


def _of_situation(figures: Json, situation: str, changes: Sequence[str]) -> str:
    lines = [
        f"| engine | cause of the excess | as it is | {' | '.join(changes)} |",
        "|---|---|---|" + "---|" * len(changes),
    ]
    for name, found in figures.items():
        if found["situation"] == situation:
            causes = [f"`{cause}` {part:.0%}" for cause, part in found["causes"].items()
                      if part >= _NAMED]  # fmt: skip
            missed, excess_s = found["as it is"]
            cells = [
                f"{after}, {after_s / excess_s - 1:+.0%}"
                for after, after_s in (found["changed"][change] for change in changes)
            ]
            before = f"{missed} of {found['requests']}, {excess_s:.0f} s"
            lines.append(f"| {' | '.join([_short(name), ', '.join(causes), before, *cells])} |")
    return "\n".join(lines) + "\n"


def _short(name: str) -> str:
    engine, _, rest = name.partition("; ")
    return f"{engine}: {rest.partition(': ')[2]}"


def main() -> None:
    """Run what is not kept yet; replace the file's figures and the page's tables."""
    figures = tried(list(scenes()))
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    write_page(figures)


def write_page(figures: Json) -> None:
    """Replace the page's tables."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables(figures)}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
