"""Alerts on what an engine is doing: gone, hanging, out of memory, full."""

from collections.abc import Iterator
from dataclasses import dataclass

from agent.catalog import engine_facts as fact
from agent.catalog import metrics as m
from agent.records.event import EventKind
from agent.render.alerts.alert_conditions import conditions, while_told, worst
from agent.render.alerts.alert_rule import ENGINE, ENGINE_MODEL, Alert, Severity
from agent.render.alerts.timings import Timings
from agent.render.links import DashboardUid
from agent.render.promql import by, eq, filled, none_of, value_of

_MINUTE_S = 60
_DAY_S = 24 * 60 * _MINUTE_S
_SILENT_S = 5 * _MINUTE_S
# The largest models take some minutes from a slow disk.
_LOADING_S = 30 * _MINUTE_S

# Requirements on capacity: a queue that stays above this is the time for another replica.
_DEEP_QUEUE = 10
# Of the KV cache. Full is normal under load; full with requests that wait or start over is not.
_FULL_CACHE = 0.95
# Of the cache's usual hit ratio; where that is lower than the least, there is nothing to collapse.
_COLLAPSED, _LEAST_HIT_RATIO, _LEAST_TOKENS = 0.5, 0.1, 10_000


@dataclass(frozen=True, slots=True)
class _Told:
    """An alert on events of some kind; events are told once, so it lasts for a while after one.

    It lasts longer while the engine is not back. Where something else tells more of the same fault,
    `hold_s` gives that the time to be first.
    """

    name: str
    kind: EventKind
    what: str
    hold_s: float = 0.0


_EVENTS = (
    _Told("LlmEngineDied", EventKind.ENGINE_DEAD, "died"),
    _Told("LlmEngineHanging", EventKind.HANG, "has work and computes nothing"),
    _Told("LlmCudaOutOfMemory", EventKind.CUDA_OOM, "ran out of GPU memory"),
    _Told("LlmHostOutOfMemory", EventKind.HOST_OOM, "lost a process to the OOM killer"),
    _Told(
        "LlmEngineGpuFault", EventKind.GPU_FAULT, "has a GPU that failed", hold_s=2.0 * _MINUTE_S
    ),
    _Told(
        "LlmEngineSizingError",
        EventKind.SIZING_ERROR,
        "does not start: its settings ask for more memory than there is",
    ),
)
DOWN = "LlmEngineDown"
# Whoever was paged for one of these knows that the engine starts anew.
_PAGED = (DOWN, *(told.name for told in _EVENTS))
# Every page that names an engine, but for those on how its requests end.
PAGES = (*_PAGED, "LlmEngineRestartLoop", "LlmEngineSilent")

# What the remaining kinds stand for is told by alerts on the figures themselves.
TOLD_BY_FIGURES = {
    EventKind.KV_PRESSURE: "LlmKvCacheSaturated",
    EventKind.ADMISSION_LIMIT: "LlmAdmissionRejections",
    EventKind.UNREACHABLE: "LlmEngineDown",
    # Somebody asked for it.
    EventKind.SLEEP: None,
}


def engine_alerts(timings: Timings) -> Iterator[Alert]:
    """Every alert on engines."""
    yield _down(timings)
    yield _never_up(timings)
    for told in _EVENTS:
        yield _event(told, timings)
    yield _restarted(timings)
    yield _restarting(timings)
    yield _silent(timings)
    yield _deep_queue()
    yield _full_cache(timings)
    yield _collapsed_cache(timings)


def _down(timings: Timings) -> Alert:
    failed = value_of(m.SCRAPES, filled("instance"), filled("engine"), none_of("outcome", ("ok",)))
    why = worst(by(("outcome",), f"increase({failed}[5m])"), "instance", "engine")
    return Alert(
        name=DOWN,
        severity=Severity.PAGE,
        expression=conditions(_absent(), f"({_known(timings)})"),
        hold_s=2 * _MINUTE_S,
        summary="Engine {{ $labels.engine }} does not answer",
        description=f"The agent could not read its page at any try for "
        f"{timings.hold(2 * _MINUTE_S)}.{why} Most often: {{{{ .Labels.outcome }}}}, "
        "{{ .Value | humanize }} times in 5m.{{ end }}",
        variables=("engine",),
    )


def _known(timings: Timings) -> str:
    """The engine was up within a day, or has been told as down ever since it was."""
    lately = f"max_over_time({value_of(m.ENGINE_UP)}[{timings.window(_DAY_S)}])"
    told = f'ALERTS{{alertname="{DOWN}",alertstate="firing"}}'
    return f"{by(ENGINE, lately, 'max')} == 1\nor\n{by(ENGINE, told, 'max')}"


def _never_up(timings: Timings) -> Alert:
    return Alert(
        name="LlmEngineNeverUp",
        severity=Severity.TICKET,
        # One that loads its model has not answered yet either, and needs nobody.
        expression=f"{_absent()}\nunless\n({_known(timings)})",
        hold_s=_LOADING_S,
        summary="Engine {{ $labels.engine }} has not answered yet",
        description=f"The agent has tried for {timings.hold(_LOADING_S)} to read its page and "
        f"never could, nor within {timings.window(_DAY_S)} before.",
        variables=("engine",),
    )


def _event(told: _Told, timings: Timings) -> Alert:
    not_back = f"({_absent()}\nor\n{_stands_still(timings)})"
    return Alert(
        name=told.name,
        severity=Severity.PAGE,
        expression=f"{_happened(told.kind, timings)}\nor\n"
        + while_told(told.name, ENGINE, not_back),
        hold_s=told.hold_s,
        summary=f"Engine {{{{ $labels.engine }}}} {told.what}",
        description=_listed(told.kind, timings),
        variables=("engine",),
    )


def _happened(kind: EventKind, timings: Timings) -> str:
    events = value_of(m.ENGINE_EVENTS, eq("kind", kind))
    return f"{by(ENGINE, f'increase({events}[{timings.window(10 * _MINUTE_S)}])')} > 0"


def _listed(kind: EventKind, timings: Timings) -> str:
    return (
        f"Events of kind {kind} over {timings.window(10 * _MINUTE_S)}: about "
        "{{ $value | humanize }}. Each is listed with its evidence at /api/v1/events of the agent "
        "{{ $labels.instance }}."
    )


def _absent() -> str:
    return f"{by(ENGINE, value_of(m.ENGINE_UP), 'max')} == 0"


def _restarted(timings: Timings) -> Alert:
    paged = (
        f'ALERTS{{alertname=~"{"|".join(_PAGED)}",alertstate="firing"}}'
        f"[{timings.window(20 * _MINUTE_S)}]"
    )
    return Alert(
        name="LlmEngineRestarted",
        severity=Severity.TICKET,
        expression=f"{_happened(EventKind.RESTART, timings)}\nunless\n"
        + by(ENGINE, f"max_over_time({paged})", "max"),
        hold_s=0.0,
        summary="Engine {{ $labels.engine }} restarted",
        description=_listed(EventKind.RESTART, timings),
        variables=("engine",),
    )


def _restarting(timings: Timings) -> Alert:
    window = timings.window(30 * _MINUTE_S)
    restarts = value_of(m.ENGINE_EVENTS, eq("kind", EventKind.RESTART))
    return Alert(
        name="LlmEngineRestartLoop",
        severity=Severity.PAGE,
        expression=f"{by(ENGINE, f'increase({restarts}[{window}])')} > 2.5",
        hold_s=0.0,
        summary="Engine {{ $labels.engine }} restarts again and again",
        description=f"About {{{{ $value | humanize }}}} restarts over {window}.",
        variables=("engine",),
    )


def _stands_still(timings: Timings) -> str:
    work = (
        f"{by(ENGINE, value_of(fact.REQUESTS_RUNNING))} + "
        f"{by(ENGINE, value_of(fact.REQUESTS_WAITING))}"
    )
    steps = f"rate({value_of(fact.STEPS)}[{timings.window(2 * _MINUTE_S)}])"
    return conditions(f"{work} > 0", f"{by(ENGINE, steps)} == 0")


def _silent(timings: Timings) -> Alert:
    window = timings.window(2 * _MINUTE_S)
    return Alert(
        name="LlmEngineSilent",
        severity=Severity.PAGE,
        expression=f"{_stands_still(timings)}\nunless\n"
        + f"{by(ENGINE, value_of(fact.AWAKE), 'max')} == 0",
        # A long prefill may give no output for minutes, and a hang has an alert of its own, which
        # must be the first.
        hold_s=_SILENT_S,
        summary="Engine {{ $labels.engine }} has requests and gives no output",
        description="{{ $value | humanize }} requests run or wait, and for "
        f"{timings.hold(_SILENT_S)} no step of the engine gave output over {window}.",
        variables=("engine",),
    )


def _deep_queue() -> Alert:
    waiting = by(ENGINE_MODEL, value_of(fact.REQUESTS_WAITING))
    return Alert(
        name="LlmQueueDeep",
        severity=Severity.TICKET,
        expression=f"{waiting} > {_DEEP_QUEUE}",
        hold_s=5 * _MINUTE_S,
        summary="Requests to {{ $labels.model }} queue up on {{ $labels.engine }}",
        description="{{ $value | humanize }} requests wait for a place in the batch; more than "
        f"{_DEEP_QUEUE} all the time is the sign to add a replica.",
        dashboard=DashboardUid.CAPACITY,
        variables=("engine", "model"),
    )


def _full_cache(timings: Timings) -> Alert:
    window = timings.window(5 * _MINUTE_S)
    waiting = by(ENGINE_MODEL, value_of(fact.REQUESTS_WAITING))
    preempted = by(ENGINE_MODEL, f"rate({value_of(fact.PREEMPTIONS)}[{window}])")
    return Alert(
        name="LlmKvCacheSaturated",
        severity=Severity.TICKET,
        expression=conditions(
            f"{by(ENGINE_MODEL, value_of(fact.KV_CACHE_USAGE), 'max')} > {_FULL_CACHE}",
            f"({waiting} > 0 or {preempted} > 0)",
        ),
        hold_s=5 * _MINUTE_S,
        summary="The KV cache of {{ $labels.engine }} is too small for its load",
        description="{{ $value | humanizePercentage }} of the KV cache is held by live requests, "
        "while others wait for it or are thrown back to start over. They get slower; none is lost "
        "and no memory runs out.",
        dashboard=DashboardUid.CAPACITY,
        variables=("engine", "model"),
    )


def _collapsed_cache(timings: Timings) -> Alert:
    now, usual = timings.window(30 * _MINUTE_S), timings.window(_DAY_S)
    asked = value_of(fact.PREFIX_CACHE_QUERY_TOKENS)
    baseline = _hit_ratio(f"{usual}] offset {now}")
    return Alert(
        name="LlmPrefixCacheCollapsed",
        severity=Severity.TICKET,
        expression=conditions(
            f"{_hit_ratio(f'{now}]')}\n  < {_COLLAPSED} * ({baseline} > {_LEAST_HIT_RATIO})",
            f"{by(ENGINE_MODEL, f'increase({asked}[{now}])')} > {_LEAST_TOKENS}",
        ),
        hold_s=15 * _MINUTE_S,
        summary="The prefix cache of {{ $labels.engine }} serves far less than it did",
        description=f"{{{{ $value | humanizePercentage }}}} of the tokens looked up over {now} "
        f"were found, less than half of what is usual over {usual}.",
        dashboard=DashboardUid.CAPACITY,
        variables=("engine", "model"),
    )


def _hit_ratio(range_: str) -> str:
    hits = by(ENGINE_MODEL, f"rate({value_of(fact.PREFIX_CACHE_HIT_TOKENS)}[{range_})")
    asked = by(ENGINE_MODEL, f"rate({value_of(fact.PREFIX_CACHE_QUERY_TOKENS)}[{range_})")
    return f"({hits}\n  / ({asked} > 0))"
