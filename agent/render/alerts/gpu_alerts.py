"""Alerts on GPUs.

Temperature and used memory have no alert: both are high by design under an engine. Their problems
show as throttling and as a lack of free memory.
"""

from collections.abc import Iterator
from functools import partial
from inspect import cleandoc

from agent.catalog import gpu_facts as fact
from agent.catalog import metrics as m
from agent.catalog.gpu_problems import UNSEEN, XIDS, XidGrade
from agent.catalog.time_units import HOUR_S, MINUTE_S
from agent.render.alerts.alert_rule import (
    AGENT,
    GPU,
    Alert,
    Severity,
    Timings,
    while_firing,
)
from agent.render.alerts.thresholds import (
    GPU_FREE_RATIO,
    GPU_HELD_RATIO,
    GPU_IDLE_RATIO,
    GPU_THROTTLED_RATIO,
    GPU_XIDS,
)
from agent.render.links import DashboardUid
from agent.render.promql import Matcher, among, eq, none_of, value_of

_XID = (*GPU, "xid")
_XID_CRITICAL = "GpuXidCritical"

# A software power cap is normal under full load.
_HARMFUL_REASONS = ("sw_thermal", "hw_thermal", "hw_power_brake")
# Critical Xids on memory errors, which the ECC counters count as well.
MEMORY_XIDS = (48, 64, 95, 140)
# The most that ECC counters follow later: a read of the GPU and some scrapes.
_ECC_LATE_S = 5 * MINUTE_S
# NVLink corrects these by sending again; now and then they are normal.
_EXPECTED_NVLINK_ERRORS = ("crc_flit",)


# An alert on one GPU.
_alert = partial(Alert, dashboard=DashboardUid.GPUS, variables=("gpu",))
_THIS_GPU = "GPU {{ $labels.gpu }}"
_HAD_XID = f"{_THIS_GPU} had Xid {{{{ $labels.xid }}}}"


def gpu_alerts(timings: Timings) -> Iterator[Alert]:
    """Every alert on GPUs."""
    yield _unseen(timings)
    for part in (_faults, _xids, _memory, _links, _throttling, _use):
        yield from part(timings)


# The newest value of each GPU.
_MAX = "max by (instance, gpu)"
_UP = value_of(fact.UP)
# Failed reads whose reason is that the agent can see no GPU at all, broken or not.
_BLIND = value_of(m.GPU_FAILURES, among("reason", UNSEEN))


def _unseen(timings: Timings) -> Alert:
    window = timings.window(3 * MINUTE_S)
    return Alert(
        name="GpuUnseen",
        severity=Severity.TICKET,
        expression=cleandoc(f"""
            sum by (instance, reason) (increase({_BLIND}[{window}])) > 0
            and on (instance) max by (instance) ({_UP}) == 0
        """),
        hold_s=5 * MINUTE_S,
        summary="The agent {{ $labels.instance }} cannot see its GPUs: {{ $labels.reason }}",
        description="It read them before; their state is unknown now. "
        f"About {{{{ $value | humanize }}}} reads failed over {window}.",
        variables=AGENT,
    )


def _lost(timings: Timings) -> str:
    """The agent cannot read a GPU, and can see other GPUs.

    One GPU that was read within the hold time proves that the agent can see GPUs, so that a poll of
    all GPUs that fails now and then hides no loss.
    """
    window, lately = timings.window(3 * MINUTE_S), timings.hold(MINUTE_S)
    return cleandoc(f"""
        {_MAX} ({_UP}) == 0
        unless on (instance) (
        sum by (instance) (increase({_BLIND}[{window}])) > 0
        unless on (instance) max by (instance) (max_over_time({_UP}[{lately}])) > 0
        )
    """)


def _faults(timings: Timings) -> Iterator[Alert]:
    yield _alert(
        name="GpuLost",
        severity=Severity.PAGE,
        expression=_lost(timings),
        hold_s=MINUTE_S,
        summary=f"{_THIS_GPU} cannot be read any more",
        description="It fell off the bus, needs a reset, was removed, or its driver does not "
        "answer. The log of the agent {{ $labels.instance }} has the reason.",
    )
    yield _alert(
        name="GpuRecoveryWanted",
        severity=Severity.TICKET,
        expression=f"{_MAX} ({value_of(fact.RECOVERY_ACTION)}) > 0",
        hold_s=5 * MINUTE_S,
        summary=f"{_THIS_GPU} needs an action before it is sound again",
        description="The driver asks for action {{ $value }}: 1 reset, 2 reboot, 3 drain, 4 drain "
        "and reset.",
    )


def _xids(timings: Timings) -> Iterator[Alert]:
    critical = among("xid", _numbers(XidGrade.CRITICAL))
    # Xids that the table does not know are included.
    other = none_of("xid", _numbers(XidGrade.CRITICAL, XidGrade.APPLICATION, XidGrade.INFORMATION))
    program = among("xid", _numbers(XidGrade.APPLICATION))
    hour = timings.window(HOUR_S)
    errors = value_of(fact.XID_ERRORS, program)
    lately = "The driver reported it {{ $value | humanizeDuration }} ago."
    yield _alert(
        name=_XID_CRITICAL,
        severity=Severity.PAGE,
        expression=_seen_within(timings.seconds(15 * MINUTE_S), critical)
        + "\nor\n"
        + while_firing(_XID_CRITICAL, _XID, f"on (instance, gpu) {_MAX} ({_UP}) == 0"),
        summary=f"{_HAD_XID}, which means broken hardware or a hung driver",
        description=f"The driver reported it within {timings.window(15 * MINUTE_S)}, or the GPU "
        "is lost since.",
    )
    yield _alert(
        name="GpuXidWarning",
        severity=Severity.TICKET,
        expression=_seen_within(timings.seconds(HOUR_S), other),
        summary=f"{_HAD_XID}, which needs a check",
        description=lately,
    )
    yield _alert(
        name="GpuXidApplication",
        severity=Severity.TICKET,
        expression=f"max by (instance, gpu, xid) (increase({errors}[{hour}])) >= {GPU_XIDS}",
        summary=f"{_HAD_XID} again and again, which a program causes",
        description=f"About {{{{ $value | humanize }}}} times over {hour}.",
    )


def _numbers(*grades: XidGrade) -> tuple[int, ...]:
    return tuple(xid.number for xid in XIDS.values() if xid.grade in grades)


def _seen_within(seconds: float, xids: Matcher) -> str:
    # The time of the last Xid: increase() does not count the first increment of a new series, and a
    # gauge with the newest Xid would never go back.
    last_seen = value_of(fact.XID_LAST_SEEN, xids)
    return f"time() - max by (instance, gpu, xid) ({last_seen}) < {seconds:g}"


def _memory(timings: Timings) -> Iterator[Alert]:
    window = timings.window(HOUR_S)
    uncorrected = value_of(fact.ECC_ERRORS, eq("severity", "uncorrected"))
    xid = value_of(fact.XID_LAST_SEEN, among("xid", MEMORY_XIDS))
    # The counter rises at a later read than the Xid, and so stays in the window for longer.
    paged = f"time() - {_MAX} ({xid}) < {timings.window_s(HOUR_S + _ECC_LATE_S):g}"
    yield _alert(
        name="GpuEccUncorrected",
        severity=Severity.PAGE,
        # The counter goes up a moment after the Xid, and its increase lasts longer.
        expression=f"{_MAX} (increase({uncorrected}[{window}])) > 0\nunless\n{paged}",
        summary=f"{_THIS_GPU} had memory errors that ECC could not correct",
        description=f"About {{{{ $value | humanize }}}} errors over {window}.",
    )
    yield _alert(
        name="GpuRowRemapFailed",
        severity=Severity.PAGE,
        expression=f"{_MAX} ({value_of(fact.ROW_REMAP_FAILED)}) == 1",
        summary=f"{_THIS_GPU} could not replace a bad row of its memory",
        description="No spare row is left: the GPU must be exchanged.",
    )
    yield _alert(
        name="GpuRowRemapPending",
        severity=Severity.TICKET,
        expression=cleandoc(f"""
            {_MAX} ({value_of(fact.ROW_REMAP_PENDING)}) == 1
            or
            {_MAX} ({value_of(fact.PAGE_RETIREMENT_PENDING)}) == 1
        """),
        hold_s=5 * MINUTE_S,
        summary=f"{_THIS_GPU} needs a reset to replace bad memory",
        description="A row or a page of its memory is bad and stays in use until the reset.",
    )


def _links(timings: Timings) -> Iterator[Alert]:
    window = timings.window(HOUR_S)
    errors = value_of(fact.NVLINK_ERRORS, none_of("error", _EXPECTED_NVLINK_ERRORS))
    yield _alert(
        name="GpuNvlinkErrors",
        severity=Severity.TICKET,
        expression=f"max by (instance, gpu, error) (increase({errors}[{window}])) > 0",
        summary=f"{_THIS_GPU} had errors on its NVLinks: {{{{ $labels.error }}}}",
        description=f"About {{{{ $value | humanize }}}} of them over {window}.",
    )


def _throttling(timings: Timings) -> Iterator[Alert]:
    window = timings.window(10 * MINUTE_S)
    throttled = value_of(fact.THROTTLED_TIME, among("reason", _HARMFUL_REASONS))
    yield _alert(
        name="GpuThrottled",
        severity=Severity.TICKET,
        expression=f"max by (instance, gpu, reason) (rate({throttled}[{window}]))"
        f" > {GPU_THROTTLED_RATIO}",
        hold_s=5 * MINUTE_S,
        summary=f"{_THIS_GPU} is slowed down by {{{{ $labels.reason }}}}",
        description="{{ $value | humanizePercentage }} of the time over "
        f"{window} its clocks were held down.",
    )


def _use(timings: Timings) -> Iterator[Alert]:
    free, used = value_of(fact.MEMORY_FREE), value_of(fact.MEMORY_USED)
    memory = value_of(fact.MEMORY_TOTAL)
    yield _alert(
        name="GpuMemoryShort",
        severity=Severity.TICKET,
        expression=cleandoc(f"""
            {_MAX} ({free})
              / {_MAX} ({memory})
              < {GPU_FREE_RATIO}
        """),
        hold_s=10 * MINUTE_S,
        summary=f"{_THIS_GPU} has almost no free memory",
        description="{{ $value | humanizePercentage }} of its memory is free; larger allocations "
        "of the engine or the driver fail.",
    )
    yield _alert(
        name="GpuIdle",
        severity=Severity.TICKET,
        expression=cleandoc(f"""
            {_MAX} ({value_of(fact.UTILIZATION)}) < {GPU_IDLE_RATIO}
            and
            {_MAX} ({used})
              / {_MAX} ({memory})
              > {GPU_HELD_RATIO}
        """),
        hold_s=HOUR_S,
        summary=f"{_THIS_GPU} is held and not used",
        description="It is busy for {{ $value | humanizePercentage }} of the time, at every sample "
        f"for {timings.hold(HOUR_S)}, while its memory is in use.",
    )
