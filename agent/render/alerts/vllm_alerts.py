"""Alerts for a Prometheus that scrapes vLLM and no agent, on vLLM's own series.

vLLM has no series of requests that were rejected or cancelled before their first token, of the
cause of a death, or of goodput over several limits: these have no rule. The limit of a latency is
rounded up to the next bucket edge, so the alert fires only when the limit is surely exceeded.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from inspect import cleandoc

from agent.catalog import engine_facts as fact
from agent.catalog.engines.vllm import DURATION_EDGES_S, TPOT_EDGES_S, TTFT_EDGES_S, VLLM
from agent.catalog.metric import Metric
from agent.catalog.time_units import DAY_S, MINUTE_S
from agent.records.objective import Objective
from agent.render.alerts.agent_alerts import watchdog
from agent.render.alerts.alert_rule import (
    Alert,
    Severity,
    Timings,
    fired,
    idle_with_work,
    latency,
    number,
    over_bound,
    percent,
    percentile,
    share_over,
    target_down,
)
from agent.render.alerts.latency_alerts import LATENCIES, LimitedLatency, Shortcoming, narrow
from agent.render.alerts.thresholds import ERROR_PAGE_RATIO, KV_CACHE_RATIO, QUEUE_REQUESTS
from agent.render.promql import TARGET_LABELS, Matcher, eq, like, upto

# The labels of one exposition, of one model in it, and of one engine.
ON_PAGE = ("instance",)
ON_MODEL = (*ON_PAGE, "model_name")
_ON_ENGINE = (*ON_MODEL, "engine")

# vLLM's histogram of each latency that objectives limit, and its bucket edges.
_HISTOGRAMS = {
    "ttft_s": (fact.TIME_TO_FIRST_TOKEN, TTFT_EDGES_S),
    "tpot_s": (fact.TIME_PER_OUTPUT_TOKEN, TPOT_EDGES_S),
    "e2e_s": (fact.REQUEST_DURATION, DURATION_EDGES_S),
}
# A latency with its limit, and the bucket edge at or above that: None if there is none.
_Limit = tuple[LimitedLatency, float, float | None]


def _name(metric: Metric) -> str:
    return VLLM.facts[metric][0].series


def _own(series: str, matchers: Iterable[Matcher] = ()) -> str:
    # A router may publish gauges under the same names, without the label `engine`.
    inside = ",".join(('engine!=""', *(matcher.text for matcher in matchers)))
    return f"{series}{{{inside}}}"


_RUNNING, _WAITING = _own(_name(fact.REQUESTS_RUNNING)), _own(_name(fact.REQUESTS_WAITING))
_FAILED = _name(fact.REQUESTS_FAILED)


def vllm_alerts(objectives: Iterable[Objective], timings: Timings) -> Iterator[Alert]:
    """Every alert for vLLM without an agent."""
    for objective in objectives:
        for row, _, edge in _limits(objective):
            if edge is not None:
                yield _over_limit(objective, row, edge, timings)
                yield _no_bucket(objective, row, edge)
    yield watchdog("vllm-alone")
    yield from _outages(timings)
    yield from _hangs_and_restarts(timings)
    yield _errors(timings)
    yield from _pressure(timings)


def vllm_shortcomings(objectives: Iterable[Objective]) -> Iterator[Shortcoming]:
    """The rules of this module that some objectives cannot have, or only at a higher limit."""
    for objective in objectives:
        if narrow(objective.match):
            reason = f"vLLM has no label for {' and '.join(narrow(objective.match))}"
            yield Shortcoming(objective.name, "vLLM alone: latency percentiles", reason)
        for row, limit_s, edge in _limits(objective):
            if edge is None:
                reason = "the limit is above every bucket edge"
                yield Shortcoming(objective.name, row.alert, reason)
            elif edge != limit_s:
                reason = f"{latency(limit_s)} is not a bucket edge; the rule uses {latency(edge)}"
                yield Shortcoming(objective.name, row.alert, reason)


def _limits(objective: Objective) -> Iterator[_Limit]:
    # No agent is there to say whose limits these are.
    if objective.is_preset or narrow(objective.match):
        return
    for ours in LATENCIES:
        limit_s, (metric, edges) = ours.limit_s(objective), _HISTOGRAMS[ours.limit]
        if limit_s is not None:
            row = replace(ours, alert=ours.alert.replace("Llm", "Vllm"), metric=metric)
            yield row, limit_s, min((edge for edge in edges if edge >= limit_s), default=None)


def _over_limit(objective: Objective, row: LimitedLatency, edge: float, timings: Timings) -> Alert:
    window, share = timings.window(10 * MINUTE_S), percentile(objective.target)
    model = like("model_name", objective.match.model)
    return Alert(
        name=row.alert,
        severity=Severity.TICKET,
        expression=over_bound(
            ON_MODEL,
            window,
            number(objective.target),
            edge,
            lambda ending, more: _own(f"{_name(row.metric)}{ending}", (*model, *more)),
        ),
        hold_s=2 * MINUTE_S,
        labels={"objective": objective.name},
        summary=f"The {share} of {row.name} of {{{{ $labels.model_name }}}} is surely over the "
        f"limit of objective {objective.name}",
        description=f"The {share} of {row.name} over {window} is about "
        f"{{{{ $value | humanizeDuration }}}}: fewer than {percent(objective.target)} of the "
        f"requests stayed within {latency(edge)}, the bucket edge at or above the limit.",
        dashboard=None,
    )


def _no_bucket(objective: Objective, row: LimitedLatency, edge: float) -> Alert:
    series, model = _name(row.metric), like("model_name", objective.match.model)
    counted = _own(f"{series}_count", model)
    inside = _own(f"{series}_bucket", (*model, upto(edge)))
    return Alert(
        name="VllmBucketMissing",
        severity=Severity.TICKET,
        expression=cleandoc(f"""
            sum by (instance, model_name) ({counted})
            unless
            sum by (instance, model_name) ({inside})
        """),
        hold_s=10 * MINUTE_S,
        labels={"objective": objective.name, "measure": row.limit.removesuffix("_s")},
        summary=f"The {row.name} of {{{{ $labels.model_name }}}} at {{{{ $labels.instance }}}} "
        f"cannot be compared with objective {objective.name}",
        description=f"{series} has no bucket edge at {latency(edge)}, so that {row.alert} cannot "
        "fire: vLLM runs with --custom-histogram-buckets, and these rules use its default edges.",
        dashboard=None,
    )


def _outages(timings: Timings) -> Iterator[Alert]:
    yield Alert(
        name="VllmDown",
        severity=Severity.PAGE,
        expression=target_down(_RUNNING, timings.window(DAY_S)),
        hold_s=2 * MINUTE_S,
        summary="vLLM at {{ $labels.instance }} does not answer",
        description=f"Every scrape failed for {timings.hold(2 * MINUTE_S)}.",
        dashboard=None,
    )
    yield Alert(
        name="VllmMissing",
        severity=Severity.PAGE,
        expression=f"absent({_RUNNING})",
        hold_s=5 * MINUTE_S,
        summary="Prometheus sees no vLLM at all",
        description=f"No series {_name(fact.REQUESTS_RUNNING)} of an engine exists: none is "
        "scraped, every one is gone, or Ray publishes them under names of its own. No other alert "
        "of this file can fire.",
        dashboard=None,
    )


def _hangs_and_restarts(timings: Timings) -> Iterator[Alert]:
    two_minutes, steps = timings.window(2 * MINUTE_S), _own(_name(fact.STEPS))
    awake = _own(_name(fact.AWAKE), (eq("sleep_state", "awake"),))
    tokens = f"{_own(_name(fact.OUTPUT_TOKENS))}[{timings.window(15 * MINUTE_S)}]"
    paged = fired(("VllmDown", "VllmSilent"), ON_PAGE, timings.window(20 * MINUTE_S))
    yield Alert(
        name="VllmSilent",
        severity=Severity.PAGE,
        expression=idle_with_work(_ON_ENGINE, _RUNNING, _WAITING, f"{steps}[{two_minutes}]")
        + f"\nunless\nmax by (instance, model_name, engine) ({awake}) == 0",
        hold_s=3 * MINUTE_S,
        summary="vLLM at {{ $labels.instance }} has requests and gives no output",
        description="{{ $value | humanize }} requests run or wait, and for "
        f"{timings.hold(3 * MINUTE_S)} no step gave output over {two_minutes}.",
        dashboard=None,
    )
    yield Alert(
        name="VllmRestarted",
        severity=Severity.TICKET,
        # The start time is missing if several processes share one exposition.
        expression=cleandoc(f"""
            max by (instance, model_name) (resets({tokens})) > 0
            unless on (instance)
            {paged}
        """),
        summary="vLLM at {{ $labels.instance }} restarted",
        description="Its counter of generated tokens was reset {{ $value }} times over "
        f"{timings.window(15 * MINUTE_S)}.",
        dashboard=None,
    )


def _errors(timings: Timings) -> Alert:
    window = timings.window(5 * MINUTE_S)
    failed = share_over(
        ERROR_PAGE_RATIO, TARGET_LABELS, window, part=f'{_FAILED}{{status="5xx"}}', whole=(_FAILED,)
    )
    return Alert(
        name="VllmAnswersErrors",
        severity=Severity.PAGE,
        # Many programs publish this series; only those that are vLLM count.
        expression=f"{failed}\nand\ncount by (job, instance) ({_RUNNING})",
        hold_s=2 * MINUTE_S,
        summary="vLLM at {{ $labels.instance }} answers with errors",
        description=f"{{{{ $value | humanizePercentage }}}} of the responses over {window} were "
        "5xx. A stream that broke after its 200 is not among them.",
        dashboard=None,
    )


def _pressure(timings: Timings) -> Iterator[Alert]:
    by = "by (instance, model_name, engine)"
    usages = (f"max {by} ({_own(row.series)})" for row in VLLM.facts[fact.KV_CACHE_USAGE])
    preempted = f"rate({_own(_name(fact.PREEMPTIONS))}[{timings.window(5 * MINUTE_S)}])"
    yield Alert(
        name="VllmQueueDeep",
        severity=Severity.TICKET,
        expression=f"sum by (instance, model_name) ({_WAITING}) > {QUEUE_REQUESTS}",
        hold_s=5 * MINUTE_S,
        summary="Requests to {{ $labels.model_name }} queue up at {{ $labels.instance }}",
        description="{{ $value | humanize }} requests wait for a place in the batch.",
        dashboard=None,
    )
    yield Alert(
        name="VllmKvCacheSaturated",
        severity=Severity.TICKET,
        expression=cleandoc(f"""
            ({" or ".join(usages)}) > {KV_CACHE_RATIO}
            and
            (sum {by} ({_WAITING}) > 0 or sum {by} ({preempted}) > 0)
        """),
        hold_s=5 * MINUTE_S,
        summary="The KV cache of {{ $labels.instance }} is too small for its load",
        description="{{ $value | humanizePercentage }} of the KV cache is held by live requests, "
        "while others wait for it or start over. They get slower; no memory runs out.",
        dashboard=None,
    )
