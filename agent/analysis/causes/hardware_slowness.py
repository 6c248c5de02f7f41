"""Seconds that an engine lost between two samples to busy processors or throttled GPUs."""

from collections.abc import Sequence

from agent.analysis.causes.rolling_quantile import RollingQuantile
from agent.analysis.causes.running_sums import RunningSums
from agent.catalog.gpu_facts import CLOCK, THROTTLE_ACTIVE, THROTTLED_TIME
from agent.records.gpu import GpuSample
from agent.records.host import EngineProcess, HostSample, ProcessRole

# Clocks held down by heat or power. `idle`, and clocks that an operator set, are no fault.
BAD_REASONS = ("hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake", "sw_power_cap")
_SM = "sm"
_USUAL_CLOCK = 0.8
# A process that ran this long between two samples shows the usual share of waiting.
_RUNS_S = 0.02
# The usual values are these quantiles.
_USUAL_WAIT = 0.5
_ENOUGH_WAITS = 10
_ENOUGH_CLOCKS = 10
_MAX_INTERVAL_S = 60.0
_MAX_SAMPLES = 4_096
# A sample may be this late after the end of a period.
_LATE_S = 2.0
# A loss below this share of an interval slows nothing.
NOTHING_SHARE = 0.03


class ProcessorWaits:
    """Computes how much longer than usual an engine's processes wait for a processor."""

    def __init__(self) -> None:
        self._before: HostSample | None = None
        self._usual: dict[ProcessRole, RollingQuantile] = {}

    def lost_s(self, sample: HostSample) -> tuple[float, tuple[float, float]] | None:
        """The time of the sample before, and the seconds that core and front lost since.

        A process loses its run delay (kernel, main thread) beyond the usual delay for as much time
        on a processor. Of several processes that compute, the one that lost most counts: the others
        wait for it. None where nothing can be compared.
        """
        before, self._before = self._before, sample
        if before is None or before.processes is None or not sample.processes:
            return None
        known = {process.identity: process for process in before.processes}
        lost: dict[ProcessRole, float] = {}
        for process in sample.processes:
            earlier = known.get(process.identity)
            if earlier is not None and (seconds := self._lost_s(earlier, process)) is not None:
                lost[process.role] = max(lost.get(process.role, 0.0), seconds)
        if not lost:
            return None
        core_s = max(lost.get(ProcessRole.CORE, 0.0), lost.get(ProcessRole.WORKER, 0.0))
        return before.at, (core_s, lost.get(ProcessRole.FRONT, 0.0))

    def _lost_s(self, before: EngineProcess, after: EngineProcess) -> float | None:
        ran_s = _grown(before.cpu_run_s, after.cpu_run_s)
        waited_s = _grown(before.cpu_wait_s, after.cpu_wait_s)
        if ran_s is None or waited_s is None:
            return None
        usual = self._usual.setdefault(after.role, RollingQuantile(_USUAL_WAIT))
        share = usual.value(_ENOUGH_WAITS) or 0.0
        if ran_s >= _RUNS_S:
            # The bins are made for seconds; a share fits into their range.
            usual.add(self._before.at if self._before else 0.0, waited_s / (ran_s + waited_s))
        return max(0.0, waited_s - ran_s * share / (1 - share)) if share < 1 else 0.0


def _grown(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else max(0.0, after - before)


class Slowness:
    """The lost seconds of any period, one sum for each of `counts` kinds of loss."""

    def __init__(self, counts: int) -> None:
        self._sums = RunningSums(counts, max_rows=_MAX_SAMPLES)
        # The end of the last interval in which at least NOTHING_SHARE was lost.
        self.until = float("-inf")

    def add(self, since: float, at: float, lost_s: Sequence[float]) -> None:
        """Add the seconds that were lost from `since` to `at`."""
        self._sums.add(since, at, lost_s)
        if max(lost_s) >= NOTHING_SHARE * (at - since):
            self.until = at

    def lost_s(self, start: float, end: float, count: int = 0) -> float | None:
        """The seconds of the kind `count` lost in a period; None where samples do not cover it.

        0 where no interval since its start lost NOTHING_SHARE or more.
        """
        sums = self._sums
        if not sums.first_at <= start or sums.last_at < end - _LATE_S:
            return None
        # Most engines lose nothing for hours.
        return 0.0 if start > self.until else sums.between(start, end)[1 + count]


class GpuSlowness:
    """Compares the clocks of throttled GPUs with their usual ones."""

    def __init__(self) -> None:
        self._clocks: dict[str, RollingQuantile] = {}
        self._before: dict[str, GpuSample] = {}

    def slow_s(self, at: float, samples: Sequence[GpuSample]) -> tuple[float, float] | None:
        """The time of the sample before, and the seconds that throttling cost since.

        The slowest GPU counts: the other GPUs of an engine wait for it. None where nothing can be
        compared.
        """
        slow: list[tuple[float, float]] = []
        for sample in samples:
            before = self._before.get(sample.gpu)
            self._before[sample.gpu] = sample
            if before is not None and 0 < sample.at - before.at <= _MAX_INTERVAL_S:
                slow.append((before.at, self._slow_s(before, sample)))
        return max(slow, key=lambda item: item[1]) if slow else None

    def _slow_s(self, before: GpuSample, after: GpuSample) -> float:
        throttled = _throttled_share(before, after)
        clock = after.fact(CLOCK.name, _SM)
        if clock is None:
            return 0.0
        clocks = self._clocks.setdefault(after.gpu, RollingQuantile(_USUAL_CLOCK))
        if not throttled:
            # In MHz: the bins of the quantile end at 1e5.
            clocks.add(after.at, clock / 1e6)
            return 0.0
        usual = clocks.value(_ENOUGH_CLOCKS)
        if usual is None:
            return 0.0
        return (after.at - before.at) * throttled * max(0.0, 1 - clock / 1e6 / usual)


def _throttled_share(before: GpuSample, after: GpuSample) -> float:
    shares = [0.0]
    for reason in BAD_REASONS:
        first, last = (each.fact(THROTTLED_TIME.name, reason) for each in (before, after))
        if first is not None and last is not None:
            shares.append(min(1.0, max(0.0, last - first) / (after.at - before.at)))
        else:
            shares.append(after.fact(THROTTLE_ACTIVE.name, reason) or 0.0)
    return max(shares)
