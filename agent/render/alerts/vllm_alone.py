"""Rules for those who scrape vLLM and no agent, on vLLM's own names.

Histograms can only answer at the edges of their buckets. Where a limit is no edge, the rule takes
the next edge above it: it fires only when the limit is surely broken, and is silent about what lies
between. What no page of vLLM tells has no rule: requests that were given up or refused before their
first token, the reason of a death, goodput of one request over several limits.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from agent.catalog import engine_facts as fact
from agent.catalog.engines.vllm import VLLM
from agent.catalog.metric import Metric
from agent.records.objective import Objective
from agent.render.alerts.agents import watchdog
from agent.render.alerts.expressions import conditions, over_bound, share_over
from agent.render.alerts.latency import Shortcoming, narrow
from agent.render.alerts.rule import Alert, Severity
from agent.render.alerts.timings import Timings
from agent.render.alerts.words import latency, number, percent, percentile
from agent.render.promql import TARGET_LABELS, Matcher, by, like, upto

_MINUTE_S = 60
_DAY_S = 24 * 60 * _MINUTE_S

_MODEL = ("instance", "model_name")
_ENGINE = (*_MODEL, "engine")

# vLLM's defaults, the same from 0.8 to 0.33: vllm/v1/metrics/loggers.py and buckets.py. With
# --custom-histogram-buckets they are others.
TTFT_EDGES_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TPOT_EDGES_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
DURATION_EDGES_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measure:
    """A latency that objectives limit, and where vLLM's histogram of it has edges."""

    alert: str
    limit: str
    fact: Metric
    edges_s: tuple[float, ...]
    name: str


MEASURES = (
    Measure(
        "VllmTtftOverLimit", "ttft_s", fact.TIME_TO_FIRST_TOKEN, TTFT_EDGES_S, "time to first token"
    ),
    Measure(
        "VllmTpotOverLimit",
        "tpot_s",
        fact.TIME_PER_OUTPUT_TOKEN,
        TPOT_EDGES_S,
        "time per output token",
    ),
    Measure(
        "VllmDurationOverLimit",
        "e2e_s",
        fact.REQUEST_DURATION,
        DURATION_EDGES_S,
        "end-to-end time",
    ),
)


def edge_s(measure: Measure, limit_s: float) -> float | None:
    """The lowest edge that is no lower than the limit; None where the limit is above all."""
    return min((edge for edge in measure.edges_s if edge >= limit_s), default=None)


def spellings(metric: Metric) -> tuple[str, ...]:
    """What vLLM calls a fact, newest first."""
    return tuple(spelling.series for spelling in VLLM.facts[metric])


def _own(series: str, *matchers: Matcher) -> str:
    # A router may publish gauges under the engine's names, without this label.
    inside = ",".join(('engine!=""', *(matcher.text for matcher in matchers)))
    return f"{series}{{{inside}}}"


def _spelled(metric: Metric, shape: Callable[[str], str]) -> str:
    """The shape for each of the fact's names, the newest that an engine has."""
    return " or ".join(shape(_own(series)) for series in spellings(metric))


_RUNNING = _own(spellings(fact.REQUESTS_RUNNING)[0])
_WAITING = _own(spellings(fact.REQUESTS_WAITING)[0])
_STEPS = _own(spellings(fact.STEPS)[0])
_TOKENS = _own(spellings(fact.OUTPUT_TOKENS)[0])
_ANSWERS = spellings(fact.REQUESTS_FAILED)[0]


def vllm_alerts(objectives: Iterable[Objective], timings: Timings) -> Iterator[Alert]:
    """Every alert for vLLM without an agent."""
    for objective in objectives:
        for measure, _, edge in _measured(objective):
            if edge is not None:
                yield _over_limit(objective, measure, edge, timings)
    yield watchdog()
    yield _down(timings)
    yield _missing()
    yield _silent(timings)
    yield _restarted(timings)
    yield _failing(timings)
    yield _deep_queue()
    yield _full_cache(timings)


def vllm_shortcomings(objectives: Iterable[Objective]) -> Iterator[Shortcoming]:
    """The rules of this module that some objectives cannot have, or not as exactly as promised."""
    for objective in objectives:
        if narrow(objective.match):
            reason = f"vLLM has no label for {' and '.join(narrow(objective.match))}"
            yield Shortcoming(objective.name, "vLLM alone: latency percentiles", reason)
        for measure, limit_s, edge in _measured(objective):
            if edge is None:
                yield Shortcoming(
                    objective.name, measure.alert, "the limit is above every bucket edge"
                )
            elif edge != limit_s:
                reason = f"{latency(limit_s)} is no bucket edge; it speaks of {latency(edge)}"
                yield Shortcoming(objective.name, measure.alert, reason)


def _measured(objective: Objective) -> Iterator[tuple[Measure, float, float | None]]:
    if narrow(objective.match):
        return
    for measure in MEASURES:
        limit_s: float | None = getattr(objective, measure.limit)
        if limit_s is not None:
            yield measure, limit_s, edge_s(measure, limit_s)


def _over_limit(objective: Objective, measure: Measure, edge: float, timings: Timings) -> Alert:
    window = timings.window(10 * _MINUTE_S)
    series = spellings(measure.fact)[0]
    model = like("model_name", objective.match.model)
    return Alert(
        name=measure.alert,
        severity=Severity.TICKET,
        expression=over_bound(
            _MODEL,
            window,
            share=number(objective.target),
            within=_own(f"{series}_bucket", *model, upto(edge)),
            all_=_own(f"{series}_count", *model),
            buckets=_own(f"{series}_bucket", *model),
        ),
        hold_s=2 * _MINUTE_S,
        labels={"objective": objective.name},
        summary=f"The {percentile(objective.target)} of {measure.name} of "
        f"{{{{ $labels.model_name }}}} is surely over the limit of objective {objective.name}",
        description=f"The {percentile(objective.target)} of {measure.name} over {window} is about "
        f"{{{{ $value | humanizeDuration }}}}: fewer than {percent(objective.target)} of the "
        f"requests stayed within {latency(edge)}, the bucket edge at or above the limit.",
        dashboard=None,
    )


def _seen_lately(series: str, window: str) -> str:
    return by(TARGET_LABELS, f"max_over_time({series}[{window}])", "max")


def _down(timings: Timings) -> Alert:
    lately = _seen_lately(_RUNNING, timings.window(_DAY_S))
    return Alert(
        name="VllmDown",
        severity=Severity.PAGE,
        expression=f"up == 0\nand on ({', '.join(TARGET_LABELS)})\n{lately}",
        hold_s=2 * _MINUTE_S,
        summary="vLLM at {{ $labels.instance }} does not answer",
        description=f"Prometheus could not read its page for {timings.hold(2 * _MINUTE_S)}.",
        dashboard=None,
    )


def _missing() -> Alert:
    return Alert(
        name="VllmMissing",
        severity=Severity.PAGE,
        expression=f"absent({_RUNNING})",
        hold_s=5 * _MINUTE_S,
        summary="Prometheus sees no vLLM at all",
        description="No engine is scraped, or every one is gone; their other alerts are blind.",
        dashboard=None,
    )


def _silent(timings: Timings) -> Alert:
    window = timings.window(2 * _MINUTE_S)
    asleep = _own(spellings(fact.AWAKE)[0], Matcher("sleep_state", 'sleep_state="awake"'))
    return Alert(
        name="VllmSilent",
        severity=Severity.PAGE,
        expression=conditions(
            f"{by(_ENGINE, _RUNNING)} + {by(_ENGINE, _WAITING)} > 0",
            f"{by(_ENGINE, f'rate({_STEPS}[{window}])')} == 0",
        )
        + f"\nunless\n{by(_ENGINE, asleep, 'max')} == 0",
        hold_s=3 * _MINUTE_S,
        summary="vLLM at {{ $labels.instance }} has requests and gives no output",
        description="{{ $value | humanize }} requests run or wait, and for "
        f"{timings.hold(3 * _MINUTE_S)} no step gave output over {window}.",
        dashboard=None,
    )


def _restarted(timings: Timings) -> Alert:
    window = timings.window(15 * _MINUTE_S)
    return Alert(
        name="VllmRestarted",
        severity=Severity.TICKET,
        # A start time is missing where several processes share one page.
        expression=f"{by(_MODEL, f'resets({_TOKENS}[{window}])', 'max')} > 0",
        hold_s=0.0,
        summary="vLLM at {{ $labels.instance }} restarted",
        description=f"Its count of generated tokens began anew {{{{ $value }}}} times over "
        f"{window}.",
        dashboard=None,
    )


def _failing(timings: Timings) -> Alert:
    window = timings.window(5 * _MINUTE_S)
    # Many programs publish this name; only those that are vLLM count.
    is_vllm = by(TARGET_LABELS, _RUNNING, "count")
    return Alert(
        name="VllmAnswersErrors",
        severity=Severity.PAGE,
        expression=share_over(
            "0.05",
            TARGET_LABELS,
            window,
            part=f'{_ANSWERS}{{status="5xx"}}',
            whole=(_ANSWERS,),
        )
        + f"\nand\n{is_vllm}",
        hold_s=2 * _MINUTE_S,
        summary="vLLM at {{ $labels.instance }} answers with errors",
        description=f"{{{{ $value | humanizePercentage }}}} of the answers over {window} were 5xx. "
        "A stream that broke after its 200 is not among them.",
        dashboard=None,
    )


def _deep_queue() -> Alert:
    return Alert(
        name="VllmQueueDeep",
        severity=Severity.TICKET,
        expression=f"{by(_MODEL, _WAITING)} > 10",
        hold_s=5 * _MINUTE_S,
        summary="Requests to {{ $labels.model_name }} queue up at {{ $labels.instance }}",
        description="{{ $value | humanize }} requests wait for a place in the batch.",
        dashboard=None,
    )


def _full_cache(timings: Timings) -> Alert:
    window = timings.window(5 * _MINUTE_S)
    usage = _spelled(fact.KV_CACHE_USAGE, lambda series: by(_ENGINE, series, "max"))
    preempted = _own(spellings(fact.PREEMPTIONS)[0])
    return Alert(
        name="VllmKvCacheSaturated",
        severity=Severity.TICKET,
        expression=conditions(
            f"({usage}) > 0.95",
            f"({by(_ENGINE, _WAITING)} > 0 or {by(_ENGINE, f'rate({preempted}[{window}])')} > 0)",
        ),
        hold_s=5 * _MINUTE_S,
        summary="The KV cache of {{ $labels.instance }} is too small for its load",
        description="{{ $value | humanizePercentage }} of the KV cache is held by live requests, "
        "while others wait for it or start over. They get slower; no memory runs out.",
        dashboard=None,
    )
