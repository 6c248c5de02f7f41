"""Alerts on engines: down, dead, hanging, out of memory, restarting, full."""

from collections.abc import Iterator
from dataclasses import dataclass
from inspect import cleandoc

from agent.analysis.rank_skew import REQUESTS
from agent.catalog import engine_facts as fact
from agent.catalog import metrics as m
from agent.catalog.time_units import DAY_S, MINUTE_S
from agent.records.event import EventKind
from agent.render.alerts.alert_rule import (
    AGENT,
    ENGINE,
    OBJECTIVE,
    Alert,
    Severity,
    Timings,
    fired,
    firing,
    idle_with_work,
    not_of_presets,
    while_firing,
    worst,
)
from agent.render.alerts.thresholds import (
    CACHE_DROP_RATIO,
    CACHE_USUAL_RATIO,
    DRAFT_TOKENS,
    IN_ROTATION_RATIO,
    KV_CACHE_RATIO,
    MIN_DRAFTS,
    MIN_EVENTS,
    MIN_TOKENS,
    OFFLOAD,
    POOL_QUEUE_REQUESTS,
    POOL_SPARE_REQUESTS,
    QUEUE_REQUESTS,
    RANK_MIN_REQUESTS,
    RANK_SKEW,
    REPLICAS_NEEDED,
    RESTARTS,
)
from agent.render.links import DashboardUid
from agent.render.pool_queries import queue_by_pool
from agent.render.promql import eq, filled, none_of, sum_of, value_of

_SILENT_S = 5 * MINUTE_S
# The largest models take some minutes to load from a slow disk.
_LOADING_S = 30 * MINUTE_S
_EVENT_WINDOW_S = 10 * MINUTE_S


@dataclass(frozen=True, slots=True)
class _EventAlert:
    """An alert on events of one kind.

    An event is counted once, so the alert fires for a while after it, and until the engine is back.
    `hold_s` gives an alert that says more about the same fault the time to fire first.
    """

    name: str
    kind: EventKind
    what: str
    hold_s: float = 0.0


_EVENTS = (
    _EventAlert("LlmEngineDied", EventKind.ENGINE_DEAD, "died"),
    _EventAlert("LlmEngineHanging", EventKind.HANG, "has work and computes nothing"),
    _EventAlert("LlmCudaOutOfMemory", EventKind.CUDA_OOM, "ran out of GPU memory"),
    _EventAlert("LlmHostOutOfMemory", EventKind.HOST_OOM, "lost a process to the OOM killer"),
    _EventAlert(
        "LlmEngineGpuFault", EventKind.GPU_FAULT, "has a GPU that failed", hold_s=2.0 * MINUTE_S
    ),
    _EventAlert(
        "LlmEngineSizingError",
        EventKind.SIZING_ERROR,
        "does not start: its settings ask for more memory than there is",
    ),
)
DOWN = "LlmEngineDown"
_UP = value_of(m.ENGINE_UP)
_ABSENT = f"max by (instance, engine) ({_UP}) == 0"
# After one of these pages a restart is expected.
_PAGED = (DOWN, *(row.name for row in _EVENTS))
# Every page that names an engine, without those on how its requests end.
PAGES = (*_PAGED, "LlmEngineRestartLoop", "LlmEngineSilent")


def engine_alerts(timings: Timings) -> Iterator[Alert]:
    """Every alert on engines."""
    yield _down(timings)
    yield _never_up(timings)
    for row in _EVENTS:
        yield _event(row, timings)
    yield _restarted(timings)
    yield _restarting(timings)
    yield _silent(timings)
    yield _ejected(timings)
    yield _all_ejected(timings)
    yield _deep_queue()
    yield _too_few_replicas(timings)
    yield _uneven_ranks()
    yield _small_pool(timings)
    yield _full_cache(timings)
    yield _collapsed_cache(timings)
    yield _slow_offload(timings)
    yield _drafts_refused(timings)
    yield _fact_missing()


def _down(timings: Timings) -> Alert:
    failed = value_of(m.SCRAPES, filled("instance"), filled("engine"), none_of("outcome", ("ok",)))
    why = worst(f"sum by (outcome) (increase({failed}[5m]))", "instance", "engine")
    return Alert(
        name=DOWN,
        severity=Severity.PAGE,
        expression=f"{_ABSENT}\nand\n({_known(timings)})",
        hold_s=2 * MINUTE_S,
        summary="Engine {{ $labels.engine }} does not answer",
        description=f"Every scrape by the agent failed for {timings.hold(2 * MINUTE_S)}.{why} "
        "Most often: {{ .Labels.outcome }}, {{ .Value | humanize }} times in 5m.{{ end }}",
        variables=("engine",),
    )


def _known(timings: Timings) -> str:
    """The engine was up within a day, or the alert on it has fired since it was."""
    return cleandoc(f"""
        max by (instance, engine) (max_over_time({_UP}[{timings.window(DAY_S)}])) == 1
        or
        max by (instance, engine) ({firing((DOWN,))})
    """)


def _never_up(timings: Timings) -> Alert:
    return Alert(
        name="LlmEngineNeverUp",
        severity=Severity.TICKET,
        # An engine that loads its model does not answer either.
        expression=f"{_ABSENT}\nunless\n({_known(timings)})",
        hold_s=_LOADING_S,
        summary="Engine {{ $labels.engine }} has not answered yet",
        description=f"Every scrape by the agent failed for {timings.hold(_LOADING_S)}, and for "
        f"{timings.window(DAY_S)} before.",
        variables=("engine",),
    )


def _event(row: _EventAlert, timings: Timings) -> Alert:
    not_back = f"({_ABSENT}\nor\n{_stands_still(timings)})"
    return Alert(
        name=row.name,
        severity=Severity.PAGE,
        expression=f"{_happened(row.kind, timings)}\nor\n"
        + while_firing(row.name, ENGINE, not_back),
        hold_s=row.hold_s,
        summary=f"Engine {{{{ $labels.engine }}}} {row.what}",
        description=_listed(row.kind, timings),
        variables=("engine",),
    )


def _happened(kind: EventKind, timings: Timings) -> str:
    events = value_of(m.ENGINE_EVENTS, eq("kind", kind))
    return f"sum by (instance, engine) (increase({events}[{timings.window(_EVENT_WINDOW_S)}])) > 0"


def _listed(kind: EventKind, timings: Timings) -> str:
    return (
        f"Events of kind {kind} over {timings.window(_EVENT_WINDOW_S)}: about "
        "{{ $value | humanize }}. Each is listed with its evidence at /api/v1/events of the agent "
        "{{ $labels.instance }}."
    )


def _restarted(timings: Timings) -> Alert:
    return Alert(
        name="LlmEngineRestarted",
        severity=Severity.TICKET,
        expression=f"{_happened(EventKind.RESTART, timings)}\nunless\n"
        + fired(_PAGED, ENGINE, timings.window(20 * MINUTE_S)),
        summary="Engine {{ $labels.engine }} restarted",
        description=_listed(EventKind.RESTART, timings),
        variables=("engine",),
    )


def _restarting(timings: Timings) -> Alert:
    window = timings.window(30 * MINUTE_S)
    restarts = value_of(m.ENGINE_EVENTS, eq("kind", EventKind.RESTART))
    return Alert(
        name="LlmEngineRestartLoop",
        severity=Severity.PAGE,
        expression=f"sum by (instance, engine) (increase({restarts}[{window}])) > {RESTARTS}",
        summary="Engine {{ $labels.engine }} restarts again and again",
        description=f"About {{{{ $value | humanize }}}} restarts over {window}.",
        variables=("engine",),
    )


def _stands_still(timings: Timings) -> str:
    running, waiting = value_of(fact.REQUESTS_RUNNING), value_of(fact.REQUESTS_WAITING)
    steps = f"{value_of(fact.STEPS)}[{timings.window(2 * MINUTE_S)}]"
    return idle_with_work(ENGINE, running, waiting, steps)


def _silent(timings: Timings) -> Alert:
    return Alert(
        name="LlmEngineSilent",
        severity=Severity.PAGE,
        expression=f"{_stands_still(timings)}\nunless\n"
        f"max by (instance, engine) ({value_of(fact.AWAKE)}) == 0",
        # A long prefill may give no output for minutes. A hang has an alert of its own, which must
        # fire first.
        hold_s=_SILENT_S,
        summary="Engine {{ $labels.engine }} has requests and gives no output",
        description="{{ $value | humanize }} requests run or wait, and for "
        f"{timings.hold(_SILENT_S)} no step of the engine gave output over "
        f"{timings.window(2 * MINUTE_S)}.",
        variables=("engine",),
    )


def _ejected(timings: Timings) -> Alert:
    window = timings.window(5 * MINUTE_S)
    return Alert(
        name="LlmProxyEngineEjected",
        severity=Severity.TICKET,
        expression="max by (instance, engine) "
        f"(avg_over_time({value_of(m.PROXY_IN_ROTATION)}[{window}])) "
        f"< {IN_ROTATION_RATIO}",
        hold_s=MINUTE_S,
        summary="The proxy sends engine {{ $labels.engine }} no new requests",
        description="Workers of the proxy sent it new requests for {{ $value | humanizePercentage "
        f"}}}} of {window}. The reason is in the event ENGINE_EJECTED at /api/v1/events of the "
        "agent {{ $labels.instance }}.",
        variables=("engine",),
    )


def _all_ejected(timings: Timings) -> Alert:
    window = timings.window(2 * MINUTE_S)
    return Alert(
        name="LlmProxyNoEngineLeft",
        severity=Severity.PAGE,
        expression=f"sum by (instance) (increase({value_of(m.PROXY_FORCED)}[{window}]))"
        f" >= {MIN_EVENTS}",
        hold_s=2 * MINUTE_S,
        summary="All engines of a model are out of the rotation of the proxy at "
        "{{ $labels.instance }}",
        description=f"About {{{{ $value | humanize }}}} requests over {window} went to engines "
        "that fail, because no other engine serves their model.",
        variables=AGENT,
    )


def _deep_queue() -> Alert:
    return Alert(
        name="LlmQueueDeep",
        severity=Severity.TICKET,
        expression=f"sum by (instance, engine, model) ({value_of(fact.REQUESTS_WAITING)})"
        f" > {QUEUE_REQUESTS}",
        hold_s=5 * MINUTE_S,
        summary="Requests to {{ $labels.model }} queue up on {{ $labels.engine }}",
        description="{{ $value | humanize }} requests wait for a place in the batch. If there are "
        f"always more than {QUEUE_REQUESTS}, add a replica.",
        dashboard=DashboardUid.CAPACITY,
        variables=("engine", "model"),
    )


def _too_few_replicas(timings: Timings) -> Alert:
    # Several agents may watch one engine.
    each = f"max by (instance, engine, objective, model) ({value_of(m.SLO_REPLICAS_NEEDED)})"
    less = not_of_presets(timings.window(5 * MINUTE_S), on=("instance", "objective"))
    return Alert(
        name="LlmTooFewReplicas",
        severity=Severity.TICKET,
        expression=f"avg by (objective, model) ({each}{less}) > {REPLICAS_NEEDED}",
        hold_s=15 * MINUTE_S,
        summary="{{ $labels.model }} has too few replicas for objective {{ $labels.objective }}",
        description="Its engines get {{ $value | humanize }} times the load that they were seen to "
        f"hold within the objective, for {timings.hold(15 * MINUTE_S)}. No autoscaler has added "
        "replicas.",
        dashboard=DashboardUid.CAPACITY,
        variables=OBJECTIVE,
    )


def _uneven_ranks() -> Alert:
    by = "by (instance, engine, model)"
    skewed = value_of(m.RANK_SKEW, eq("measure", REQUESTS))
    running, waiting = value_of(fact.REQUESTS_RUNNING), value_of(fact.REQUESTS_WAITING)
    return Alert(
        name="LlmRanksUneven",
        severity=Severity.TICKET,
        expression=cleandoc(f"""
            max {by} ({skewed}) > {RANK_SKEW}
            and
            sum {by} ({running}) + sum {by} ({waiting})
              >= {RANK_MIN_REQUESTS} * max {by} ({value_of(fact.DATA_PARALLEL_RANKS)})
        """),
        hold_s=10 * MINUTE_S,
        summary="The data-parallel ranks of {{ $labels.engine }} are loaded unevenly",
        description="The busiest rank has {{ $value | humanize }} times as many requests as the "
        "mean of all ranks, over 5m. Its requests wait while other ranks have room.",
        variables=("engine", "model"),
    )


def _small_pool(timings: Timings) -> Alert:
    queue = queue_by_pool(
        value_of(fact.REQUESTS_WAITING_BY_REASON, eq("reason", "capacity")),
        value_of(fact.REQUESTS_WAITING),
        value_of(m.ENGINE_ROLE),
        timings.window(5 * MINUTE_S),
    )
    return Alert(
        name="LlmPoolTooSmall",
        severity=Severity.TICKET,
        expression=f"{queue} > {POOL_QUEUE_REQUESTS}\n"
        f"unless on (model) min by (model) ({queue}) >= {POOL_SPARE_REQUESTS}",
        hold_s=15 * MINUTE_S,
        summary="Too few {{ $labels.role }} engines for {{ $labels.model }}",
        description="{{ $value | humanize }} requests wait in each of its {{ $labels.role }} "
        f"engines for {timings.hold(15 * MINUTE_S)}, and less than {POOL_SPARE_REQUESTS} in each "
        "of the other pool.",
        dashboard=DashboardUid.OPERATIONS,
        variables=("model",),
    )


def _full_cache(timings: Timings) -> Alert:
    usage, waiting = value_of(fact.KV_CACHE_USAGE), value_of(fact.REQUESTS_WAITING)
    preempted = f"rate({value_of(fact.PREEMPTIONS)}[{timings.window(5 * MINUTE_S)}])"
    by = "by (instance, engine, model)"
    return Alert(
        name="LlmKvCacheSaturated",
        severity=Severity.TICKET,
        expression=cleandoc(f"""
            max {by} ({usage}) > {KV_CACHE_RATIO}
            and
            (sum {by} ({waiting}) > 0 or sum {by} ({preempted}) > 0)
        """),
        hold_s=5 * MINUTE_S,
        summary="The KV cache of {{ $labels.engine }} is too small for its load",
        description="{{ $value | humanizePercentage }} of the KV cache is held by live requests, "
        "while others wait for it or start over. They get slower; no request is lost and no memory "
        "runs out.",
        dashboard=DashboardUid.CAPACITY,
        variables=("engine", "model"),
    )


def _collapsed_cache(timings: Timings) -> Alert:
    now, usual = timings.window(30 * MINUTE_S), timings.window(DAY_S)
    looked_up = value_of(fact.PREFIX_CACHE_QUERY_TOKENS)
    found = value_of(fact.PREFIX_CACHE_HIT_TOKENS)
    by = "sum by (instance, engine, model)"
    return Alert(
        name="LlmPrefixCacheCollapsed",
        severity=Severity.TICKET,
        expression=cleandoc(f"""
            ({by} (rate({found}[{now}]))
              / ({by} (rate({looked_up}[{now}])) > 0))
              < {CACHE_DROP_RATIO} * (({by} (rate({found}[{usual}] offset {now}))
              / ({by} (rate({looked_up}[{usual}] offset {now})) > 0)) > {CACHE_USUAL_RATIO})
            and
            {by} (increase({looked_up}[{now}])) > {MIN_TOKENS}
        """),
        hold_s=15 * MINUTE_S,
        summary="The prefix cache of {{ $labels.engine }} serves far less than it did",
        description=f"{{{{ $value | humanizePercentage }}}} of the tokens looked up over {now} "
        f"were found, less than {CACHE_DROP_RATIO.percent} of what is usual over {usual}.",
        dashboard=DashboardUid.CAPACITY,
        variables=("engine", "model"),
    )


def _slow_offload(timings: Timings) -> Alert:
    window, by = timings.window(30 * MINUTE_S), "by (instance, engine, model)"

    def rate(selector: str) -> str:
        return f"sum {by} (rate({selector}[{window}]))"

    into_gpu = rate(value_of(fact.KV_OFFLOAD_LOAD_TIME))
    from_tier = rate(value_of(fact.KV_OFFLOAD_TIER_READ_TIME))
    loaded = value_of(fact.EXTERNAL_CACHE_HIT_TOKENS)
    prompts, cached = value_of(fact.INPUT_TOKENS), value_of(fact.CACHED_INPUT_TOKENS)
    return Alert(
        name="LlmKvOffloadSlow",
        severity=Severity.TICKET,
        expression=cleandoc(f"""
            ({into_gpu} + ({from_tier} or 0 * {into_gpu}))
              / ({rate(loaded)} * {rate(sum_of(fact.PREFILL_TIME))} > 0)
              * ({rate(prompts)} - {rate(cached)})
              > {OFFLOAD}
            and
            sum {by} (increase({loaded}[{window}])) > {MIN_TOKENS}
        """),
        hold_s=15 * MINUTE_S,
        summary="Loading KV values takes {{ $labels.engine }} longer than computing them",
        description=f"Over {window}, loading took {{{{ $value | humanize }}}} times the prefill "
        "that it saved, by an estimate: the loaded tokens at the prefill time of a computed token.",
        dashboard=DashboardUid.CAPACITY,
        variables=("engine", "model"),
    )


def _drafts_refused(timings: Timings) -> Alert:
    window, by = timings.window(30 * MINUTE_S), "by (instance, engine, model)"
    drafts = value_of(fact.SPEC_DECODE_DRAFTS)
    accepted = value_of(fact.SPEC_DECODE_ACCEPTED_TOKENS)
    return Alert(
        name="LlmDraftsRefused",
        severity=Severity.TICKET,
        expression=cleandoc(f"""
            sum {by} (rate({accepted}[{window}]))
              / (sum {by} (rate({drafts}[{window}])) > 0) < {DRAFT_TOKENS}
            and
            sum {by} (increase({drafts}[{window}])) > {MIN_DRAFTS}
        """),
        hold_s=15 * MINUTE_S,
        summary="Speculative decoding of {{ $labels.engine }} gives almost no tokens",
        description=f"Over {window}, a draft gave {{{{ $value | humanizePercentage }}}} of a "
        "token. Even if drafts took no time, decode would hardly be faster.",
        variables=("engine", "model"),
    )


def _fact_missing() -> Alert:
    gone = value_of(fact.FACT_MISSING, filled("instance"), filled("engine"))
    names = f"query (printf `max by (fact) ({gone}) == 1` $labels.instance $labels.engine)"
    return Alert(
        name="LlmEngineFactMissing",
        severity=Severity.TICKET,
        expression="count by (instance, engine) "
        f"(max by (instance, engine, fact) ({value_of(fact.FACT_MISSING)}) == 1)",
        hold_s=10 * MINUTE_S,
        summary="Engine {{ $labels.engine }} lacks facts that it gave before",
        description="{{ $value }} facts are gone, and no alert on them can fire: "
        f'{{{{ range {names} | sortByLabel "fact" }}}}{{{{ .Labels.fact }}}} {{{{ end }}}}',
        variables=("engine",),
    )
