"""The timeline of one engine in bounded memory: its steps, samples, processors and requests."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence

from agent.analysis.causes.activity import (
    Activity,
    Limits,
    Slice,
    limits_of,
    shows_empty_queue,
    slices_between,
    sums_of,
)
from agent.analysis.causes.baselines import RequestBaselines, computed_tokens, front_of
from agent.analysis.causes.open_steps import OpenSteps
from agent.analysis.causes.periods import Period, Prompt, PromptLog, SampledActivity
from agent.analysis.causes.rolling import RollingQuantile, RunningSums
from agent.analysis.causes.stalls import Stall, Stalls, stands_out
from agent.analysis.causes.step_costs import ComputedWork, Costs, StepCosts, beyond_free
from agent.catalog.gpu_facts import CLOCK, THROTTLE_ACTIVE, THROTTLED_TIME
from agent.records.engine import EngineProcess, EngineSample, EngineStep, HostSample, ProcessRole
from agent.records.gpu import GpuSample
from agent.records.request import RequestRecord

# Clocks held down by heat or power. `idle`, and clocks that an operator set, are not faults.
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
        wait for it. None if nothing can be compared.
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
        ran_s = _increase(before.cpu_run_s, after.cpu_run_s)
        waited_s = _increase(before.cpu_wait_s, after.cpu_wait_s)
        if ran_s is None or waited_s is None:
            return None
        usual = self._usual.setdefault(after.role, RollingQuantile(_USUAL_WAIT))
        share = usual.value(_ENOUGH_WAITS) or 0.0
        if ran_s >= _RUNS_S:
            # The bins are made for seconds; a share fits into their range.
            usual.add(self._before.at if self._before else 0.0, waited_s / (ran_s + waited_s))
        return max(0.0, waited_s - ran_s * share / (1 - share)) if share < 1 else 0.0


def _increase(before: float | None, after: float | None) -> float | None:
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
        """The seconds of the kind `count` lost in a period; None if samples do not cover it.

        0 if no interval since its start lost NOTHING_SHARE or more.
        """
        sums = self._sums
        if not sums.first_at <= start or sums.last_at < end - _LATE_S:
            return None
        # Most engines lose nothing for hours.
        return 0.0 if start > self.until else sums.between(start, end)[1 + count]

    def lost_around(self, start: float, end: float, count: int = 0) -> float:
        """The seconds lost between the samples around a period: when in it, these do not show."""
        sums = self._sums
        since, until = sums.before(start), sums.after(end)
        return sums.between(start if since is None else since, until or end)[1 + count]


class GpuSlowness:
    """Compares the clocks of throttled GPUs with their usual ones."""

    def __init__(self) -> None:
        self._clocks: dict[str, RollingQuantile] = {}
        self._before: dict[str, GpuSample] = {}

    def slow_s(self, at: float, samples: Sequence[GpuSample]) -> tuple[float, float] | None:
        """The time of the sample before, and the seconds that throttling cost since.

        The slowest GPU counts: the other GPUs of an engine wait for it. None if nothing can be
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


# Steps are merged to slices of this length, and five minutes of them are kept: 12 MB at most.
_SLICE_S = 0.01
_MAX_SLICES = 32_768
# Without a step for this long the engine was idle, or steps were lost.
_IDLE_S = 1.0
# A source is used for a period when it covers at least this share of it.
_COVERED = 0.7
# After this time the samples of processors and GPUs around a step have come.
_MACHINE_KNOWN_S = 2.0
_MOST_UNLEARNED = 16_384
# Samples this near to a request's arrival give the share of its prompt that the prefix cache had.
_AROUND_S = 5.0
# So many steps in a row show what steps cost.
_LEARNED_AT_ONCE = 16
# Requests show it when those that ran beside them have ended, and few of them are enough.
ROWS_AFTER_S = 15.0
_ROWS_EVERY_S = 0.1
_MOST_ROWS = 4_096
_MOST_UNTIMED = 64
_NOBODY = ("", float("-inf"))
# After a step that stood still, the usual share of time that explains steps is this at least.
_SHORT_AGAIN = 0.4
# Requests that were queued so near to each other show whether all fronts are late.
_FRONTS_AROUND_S, _FEWEST_FRONTS, _MOST_FRONTS = 5.0, 4, 128
# The times of one step by its plugin and by a request.
_SAME_STEP_S = 0.005
# The first requests of an engine are slow, as it compiles and fills its caches: they do not show
# the cost of its steps.
COLD_S = 30.0
# Neither do the steps of a time in which processors or GPUs lost more than this share.
_SLOW_SHARE = 0.1


def _work_of(steps: Sequence[Slice], limits: Limits) -> ComputedWork:
    return ComputedWork(
        steps=len(steps),
        tokens=sum(each.decode_tokens for each in steps),
        prompt_tokens=sum(each.prefill_tokens for each in steps),
        prompts=sum(each.prefill_tokens > 0 for each in steps),
        large_tokens=sum(beyond_free(each.prefill_tokens, limits.step_tokens) for each in steps),
        products=sum(each.products for each in steps),
        seconds=sum(each.busy_s or 0.0 for each in steps),
    )


class EngineTimeline:
    """What is known of one engine. Add in the order of time; not for several threads."""

    def __init__(self) -> None:
        self.baselines = RequestBaselines()
        self.limits = Limits()
        self.ready_at: float | None = None
        self.ready_by = "start"
        self.died_at: deque[tuple[float, str]] = deque(maxlen=64)
        self._costs = {"plugin": StepCosts(), "samples": StepCosts()}
        self.stalls = Stalls()
        columns = len(Activity.__struct_fields__) - 1
        self._steps = RunningSums(columns, max_rows=_MAX_SLICES, width_s=_SLICE_S)
        self.sampled = SampledActivity()
        self.processor_waits = Slowness(2)
        self.gpu_slowness = Slowness(1)
        self._gpus = GpuSlowness()
        self._has_ranks = False
        # Whether the plugin reports steps.
        self.has_steps = False
        self._unlearned: deque[Slice] = deque(maxlen=_MOST_UNLEARNED)
        # The times between samples that are not learned from yet.
        self._intervals: deque[tuple[float, float]] = deque(maxlen=_MOST_UNTIMED)
        # When requests were queued, and how much longer than usual their front took.
        self._fronts: deque[tuple[float, float]] = deque(maxlen=_MOST_FRONTS)
        # Of these the first and the last time, and the delays in their order; None after a change.
        self._lates: tuple[float, float, list[float]] | None = None
        # Steps after an idle time, of which only requests tell when they began.
        self._untimed: deque[Slice] = deque(maxlen=_MOST_UNTIMED)
        self._open = OpenSteps()
        # Requests whose work shows what steps cost, once those that ran beside them have ended.
        self._rows: deque[tuple[RequestRecord, float, int]] = deque(maxlen=_MOST_ROWS)
        self.steps_have_tokens = False
        self._sample: EngineSample | None = None
        self._processors = ProcessorWaits()
        self.prompts = PromptLog()

    def step(self, step: EngineStep) -> None:
        """Add a step that the plugin reported."""
        if step.rank:
            # The rank of a request is unknown, so the samples are used, which merge all ranks.
            self._steps = RunningSums(len(Activity.__struct_fields__) - 1, max_rows=1)
            self._has_ranks = True
            self.has_steps = False
        if self._has_ranks:
            return
        last_at = self._steps.last_at
        since = step.ended_at - (step.duration_s or 0.0)
        if since - last_at <= _IDLE_S:
            since = last_at
        elif step.duration_s is None:
            since = step.ended_at - _IDLE_S
        done = Slice(
            since=since,
            until=step.ended_at,
            steps=1.0,
            prefill_tokens=step.prefill_tokens,
            decode_tokens=step.decode_tokens,
            running=step.running,
            waiting_capacity=step.waiting_capacity,
            waiting_deferred=step.waiting_deferred,
            kv_usage=step.kv_usage,
            preempted=step.preempted,
            busy_s=step.duration_s,
        )
        self.steps_have_tokens = step.tokens_of_step
        budget = self.limits.step_tokens
        if step.tokens_of_step and budget is not None:
            done = self._open.continued(done, budget)
        self._steps.add(done.since, done.until, self._sums_of(done))
        self.has_steps = True
        if step.tokens_of_step or budget is None:
            self._add_certain(done)
            return
        for counted, known in self._open.add(done, budget, self._costs["plugin"].costs):
            self._correct(counted, known)
            self._add_certain(known)

    def _sums_of(self, done: Slice) -> tuple[float, ...]:
        return sums_of(done, done.until - done.since, self.limits)

    def _correct(self, counted: Slice, done: Slice) -> None:
        """Count the tokens of a step in it that were counted in another one."""
        if done is not counted:
            before = self._sums_of(counted)
            by = [new - old for new, old in zip(self._sums_of(done), before, strict=True)]
            self._steps.correct(done.until, by)

    def _add_certain(self, done: Slice) -> None:
        self._unlearned.append(done)
        if done.busy_s:
            self.stalls.add(done, self._costs["plugin"].costs, self.limits.step_tokens)
        else:
            self._untimed.append(done)

    def _time_first_step(self, scheduled_at: float, first_at: float) -> None:
        """Time the step after an idle time by the request whose prompt began it."""
        for done in reversed(self._untimed):
            if done.until <= scheduled_at:
                return
            if done.until <= first_at + _SAME_STEP_S:
                timed = done._replace(since=scheduled_at, busy_s=done.until - scheduled_at)
                self.stalls.add(timed, self._costs["plugin"].costs, self.limits.step_tokens)
                self._untimed.remove(done)
                return

    def sample(self, sample: EngineSample) -> None:
        """Add a sample of the engine's exposition."""
        before, self._sample = self._sample, sample
        self.limits = limits_of(sample)
        started_at = sample.process_started_at
        if before is None or before.process_started_at != started_at:
            # An engine loads its model for minutes after its start. Of an engine that started
            # before the agent, it is unknown when this ended.
            self.ready_at, self.ready_by = started_at, "start"
            if before is not None:
                self.ready_at, self.ready_by = sample.at, "first sample since its start"
        self._learn_steps(sample.at)
        self._learn_samples(sample.at)
        if before is not None:
            self._intervals.append((before.at, sample.at))
        for done in slices_between(before, sample):
            sums = sums_of(done, done.until - done.since, self.limits)
            self.sampled.add(done, sums, queue_empty=shows_empty_queue(sample, done))

    def _learn_steps(self, now: float) -> None:
        """Learn from steps, once the samples show whether the machine was slow.

        Several in a row count as one: vLLM tells the tokens of a prompt in its last step alone.
        """
        steps = self._unlearned
        while len(steps) >= _LEARNED_AT_ONCE and steps[0].until < now - _MACHINE_KNOWN_S:
            together = [steps.popleft() for _ in range(_LEARNED_AT_ONCE)]
            since, until = together[0].since, together[-1].until
            if all(each.busy_s for each in together) and not self._disturbed(since, until):
                self._costs["plugin"].learn(until, _work_of(together, self.limits))

    def host(self, sample: HostSample) -> None:
        """Add a sample of the engine's processes."""
        lost = self._processors.lost_s(sample)
        if lost is not None:
            self.processor_waits.add(lost[0], sample.at, lost[1])

    def gpu(self, at: float, samples: Sequence[GpuSample]) -> None:
        """Add one read of the engine's GPUs at a Unix time."""
        slow = self._gpus.slow_s(at, samples)
        if slow is not None:
            self.gpu_slowness.add(slow[0], at, (slow[1],))

    def request(self, record: RequestRecord) -> None:
        """Add a request that ended, met or missed."""
        missing = self.baselines.missing_tokens(record)
        self.baselines.learn(record)
        tokens, front_s = self.computed(record), front_of(record)
        if tokens is None or front_s is None:
            return
        usual_front_s = self.baselines.usual(record).front_s or 0.0
        self._fronts.append((record.started_at + front_s, front_s - usual_front_s))
        self._lates = None
        first_at = record.started_at + front_s + (record.queue_s or 0.0) + (record.prefill_s or 0.0)
        if not self._rows or record.ended_at >= self._rows[-1][0].ended_at + _ROWS_EVERY_S:
            self._rows.append((record, first_at, tokens))
        self._learn_rows(record.ended_at)
        if self._untimed:
            self._time_first_step(first_at - (record.prefill_s or 0.0), first_at)
        prefill_s = record.prefill_s or 0.0
        large = self.beyond_free(tokens)
        self.prompts.add(Prompt(record.span_id, first_at, prefill_s, tokens, missing, large))

    def computed(self, record: RequestRecord) -> int | None:
        """The request's computed prompt tokens.

        If its cached tokens are unknown, the cache's share of all prompts of that time counts.
        """
        tokens = computed_tokens(record)
        if tokens is None or record.cached_tokens is not None:
            return tokens
        began_at = record.started_at
        hits = self.sampled.between(began_at - _AROUND_S, began_at + _AROUND_S)
        return max(1, round(tokens * (1 - (hits.hit_share or 0.0))))

    def _learn_rows(self, now: float) -> None:
        """Learn the cost of steps from requests, for periods without steps of the plugin.

        If their cached tokens are unknown, samples tell what steps computed.
        """
        while self._rows and self._rows[0][0].ended_at < now - ROWS_AFTER_S:
            record, first_at, tokens = self._rows.popleft()
            if record.cached_tokens is None or self._disturbed(record.started_at, record.ended_at):
                continue
            prefill_s, decode_s = record.prefill_s or 0.0, record.decode_s or 0.0
            self._learn_phase(record, first_at - prefill_s, first_at, own=tokens)
            self._learn_phase(record, first_at, first_at + decode_s)

    def _learn_phase(self, record: RequestRecord, start: float, end: float, own: int = 0) -> None:
        """Learn from a request's prefill of `own` tokens, or from its decode."""
        done = self.sampled.between(start, end)
        steps = self.steps_of_prompt(own) if own else (record.output_tokens or 0) - 1.0
        if steps <= 0 or end <= start or done.seconds < _COVERED * (end - start):
            return
        others = self.prompts.within(start, end, (record.span_id, end if own else start))
        work = ComputedWork(
            steps=steps,
            tokens=max(done.decode_tokens, 0.0 if own else steps),
            prompt_tokens=others.tokens + own,
            prompts=0.0,
            large_tokens=others.large + self.beyond_free(own),
            products=0.0,
            seconds=end - start,
        )
        self._costs["samples"].learn(record.ended_at, work)

    def _learn_samples(self, now: float) -> None:
        """Learn from the steps between two samples, once the prompts of that time are known."""
        while self._intervals and self._intervals[0][1] < now - ROWS_AFTER_S:
            since, until = self._intervals.popleft()
            done = self.sampled.between(since, until)
            if done.timed and not self._disturbed(since, until):
                prompts = self.prompts.within(since, until, _NOBODY)
                large = prompts.large / max(1, prompts.tokens) * done.prefill_tokens
                work = ComputedWork(
                    steps=done.steps * (1 + (done.accepted_share or 0.0)),
                    tokens=done.decode_tokens,
                    prompt_tokens=done.prefill_tokens,
                    prompts=0.0,
                    large_tokens=large,
                    products=0.0,
                    seconds=done.busy_s,
                )
                self._costs["samples"].learn(until, work)

    @property
    def knows_pieces(self) -> bool:
        """Whether it is known of each step which tokens of prompts it computed."""
        return self.steps_have_tokens or self.limits.step_tokens is not None

    def beyond_free(self, tokens: float) -> float:
        """The large tokens (ComputedWork) of a prompt with so many computed tokens."""
        return beyond_free(tokens, self.limits.step_tokens) if tokens else 0.0

    def steps_of_prompt(self, tokens: float) -> float:
        """The steps of a prompt with so many computed tokens."""
        budget = self.limits.step_tokens
        return max(1.0, tokens // budget + 1) if budget else 1.0

    def _disturbed(self, start: float, end: float) -> bool:
        """Whether a cold start, processors or GPUs slowed the steps of a time."""
        if self.ready_at is not None and abs(start - self.ready_at) < COLD_S:
            return True
        lost_s = self.processor_waits.lost_s(start, end) or 0.0
        lost_s += self.gpu_slowness.lost_s(start, end) or 0.0
        return lost_s > _SLOW_SHARE * (end - start)

    def died(self, at: float, event: str) -> None:
        """Add an event that ended the engine's requests."""
        self.died_at.append((at, event))

    def period(self, start: float, end: float) -> Period:
        """What the engine did from `start` to `end` (Unix time), by steps if they cover it."""
        enough_s = _COVERED * (end - start)
        if self.has_steps:
            sums = self._steps.between(start, end)
            if sums[0] >= enough_s > 0:
                return Period(start, end, Activity(*sums), "plugin")
        sums = self.sampled.sums.between(start, end)
        source = "samples" if sums[0] >= enough_s > 0 else None
        return Period(start, end, Activity(*sums), source)

    def stalled(self, start: float, end: float) -> Iterator[Stall]:
        """The steps that stood out and overlap a period, the newest first.

        Not those that the core's wait for a processor explains.
        """
        for stall in self.stalls.between(start, end):
            usual_s = self._usual_with_told_later(stall)
            if usual_s is None or not stands_out(known := stall._replace(usual_s=usual_s)):
                continue
            if known.lost_s > self.processor_waits.lost_around(stall.since, stall.until):
                yield known

    def _usual_with_told_later(self, stall: Stall) -> float | None:
        """What a step takes with a piece of a prompt whose tokens the engine counts in a later one.

        None if the steps after it take long as well: they have the next pieces.
        """
        costs, took_s = self._costs["plugin"].costs, stall.until - stall.since
        if self.knows_pieces or costs is None:
            return stall.usual_s
        after = self.period(stall.until, stall.until + took_s).activity
        if after.steps * stall.usual_s < _SHORT_AGAIN * after.seconds:
            return None
        tokens_s = after.prefill_tokens * costs.prompt_token_s
        return stall.usual_s + tokens_s + after.large_tokens * costs.large_token_s

    def fronts_were_late(self, queued_at: float, late_s: float) -> bool:
        """Whether most requests that were queued around a time were about as late as one of them.

        True of too few. A core that takes no requests for a while delays only some.
        """
        if self._lates is None:
            times = [at for at, _ in self._fronts] or [0.0]
            self._lates = min(times), max(times), sorted([late for _, late in self._fronts])
        first_at, last_at, lates = self._lates
        if not first_at - _FRONTS_AROUND_S <= queued_at <= last_at + _FRONTS_AROUND_S:
            return True
        if max(queued_at - first_at, last_at - queued_at) > _FRONTS_AROUND_S:
            lates = sorted(
                [late for at, late in self._fronts if abs(at - queued_at) <= _FRONTS_AROUND_S]
            )
        many = len(lates) - bisect_left(lates, late_s / 4)
        return len(lates) < _FEWEST_FRONTS or 2 * many > len(lates)

    def costs(self, source: str | None) -> Costs | None:
        """What steps usually take, by the steps of a source; None if that is unknown."""
        return None if source is None else self._costs[source].costs
