"""What one engine did lately, in bounded memory: its steps, samples, processors and requests."""

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence

from agent.analysis.causes.activity import Activity, Limits, Slice, StepCosts, sums_of
from agent.analysis.causes.baselines import RequestBaselines, computed_tokens, front_of
from agent.analysis.causes.hardware_slowness import GpuSlowness, ProcessorWaits, Slowness
from agent.analysis.causes.periods import Change, MissedHits, Period
from agent.analysis.causes.prompt_log import PromptLog
from agent.analysis.causes.running_sums import RunningSums
from agent.analysis.causes.sample_slices import limits_of, slices_between
from agent.records.engine import EngineSample
from agent.records.engine_step import EngineStep
from agent.records.gpu import GpuSample
from agent.records.host import HostSample
from agent.records.request import RequestRecord

# Steps are merged to slices of this length, of which five minutes are kept: at most 12 MB.
_SLICE_S = 0.01
_MAX_SLICES = 32_768
_MAX_SAMPLES = 4_096
# Without a step for this long the engine was idle, or steps were lost.
_IDLE_S = 1.0
# How far the usual rates look back, and how much of that must be known.
_USUAL_S = 600.0
_USUAL_AT_LEAST_S = 20.0
_COVERED = 0.7
_MOST_USUAL = 256
# Samples of processors and GPUs come at least this often.
_MACHINE_KNOWN_S = 2.0
_MOST_UNLEARNED = 16_384
# The prefix cache served half of what it usually does, and that was worth anything.
_HITS_LEFT = 0.5
_USUAL_HITS = 0.2
# Hits of so few requests as come in less time are chance.
_HITS_AT_LEAST_S = 4.0
# Samples this near to a request's arrival tell its prefix hits.
_AROUND_S = 5.0
# A prompt of this many tokens shows what a prompt token costs.
_PROMPT_TOKENS = 128
# An engine that has just started is slower, which is not what its steps cost.
_COLD_S = 30.0
# An engine that waits for its processor or is throttled for this share of the time, too.
_SLOW_SHARE = 0.1


class EngineTimeline:
    """Takes in what is known of one engine, in the order of time. Not for use by two threads."""

    def __init__(self) -> None:
        self.baselines = RequestBaselines()
        self.limits = Limits()
        self.ready_at: float | None = None
        self.died_at: deque[tuple[float, str]] = deque(maxlen=64)
        self._costs = {"plugin": StepCosts(), "samples": StepCosts()}
        columns = len(Activity._fields) - 1
        self._steps = RunningSums(columns, max_rows=_MAX_SLICES, width_s=_SLICE_S)
        self._samples = RunningSums(columns, max_rows=_MAX_SAMPLES)
        self.processor_waits = Slowness(2)
        self.gpu_slowness = Slowness(1)
        self._gpus = GpuSlowness()
        self._has_ranks = self._drafts = False
        self._unlearned: deque[Slice] = deque(maxlen=_MOST_UNLEARNED)
        self._usual_before: dict[float, Activity] = {}
        self.steps_tell_tokens = False
        self._empty_at = array("d")
        self._sample: EngineSample | None = None
        self._processors = ProcessorWaits()
        self.prompts = PromptLog()

    def step(self, step: EngineStep) -> None:
        """Take in a step that the plugin told."""
        if step.rank:
            # Which rank a request ran on is not known: the merged samples tell of all.
            self._steps = RunningSums(len(Activity._fields) - 1, max_rows=1)
            self._has_ranks = True
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
        self.steps_tell_tokens = step.tokens_of_step
        if step.tokens_of_step or not step.prefill_tokens:
            self._unlearned.append(done)
        self._add(self._steps, done, self._costs["plugin"])

    def sample(self, sample: EngineSample) -> None:
        """Take in a sample of the engine's exposition."""
        before, self._sample = self._sample, sample
        self.limits = limits_of(sample)
        started_at = sample.process_started_at
        if before is None or before.process_started_at != started_at:
            self.ready_at = sample.at if before is not None else started_at
        self._learn_steps(sample.at)
        for done in slices_between(before, sample):
            self._add(self._samples, done, self._costs["samples"])
            self._drafts |= done.drafts > 0
            if not done.waiting_capacity and not done.waiting_deferred:
                self._empty_at.append(done.until)
        if len(self._empty_at) > 2 * _MAX_SAMPLES:
            del self._empty_at[:-_MAX_SAMPLES]

    def _learn_steps(self, now: float) -> None:
        """Learn from steps, once it is known whether the machine was slow."""
        while self._unlearned and self._unlearned[0].until < now - _MACHINE_KNOWN_S:
            done = self._unlearned.popleft()
            if not self._disturbed(done.since, done.until):
                self._costs["plugin"].learn(done)

    def host(self, sample: HostSample) -> None:
        """Take in a sample of the engine's processes."""
        lost = self._processors.lost_s(sample)
        if lost is not None:
            self.processor_waits.add(lost[0], sample.at, lost[1])

    def gpu(self, at: float, samples: Sequence[GpuSample]) -> None:
        """Take in one read of the engine's GPUs."""
        slow = self._gpus.slow_s(at, samples)
        if slow is not None:
            self.gpu_slowness.add(slow[0], at, (slow[1],))

    def request(self, record: RequestRecord) -> None:
        """Take in a request that ended, whatever its verdict."""
        self.baselines.learn(record)
        tokens, front_s = self.computed(record), front_of(record)
        if tokens is None or front_s is None:
            return
        first_at = record.started_at + front_s + (record.queue_s or 0.0) + (record.prefill_s or 0.0)
        self._learn_costs(record, first_at, tokens)
        missed = self.baselines.missed_tokens(record)
        self.prompts.add(first_at, record.prefill_s or 0.0, tokens, missed)

    def computed(self, record: RequestRecord) -> int | None:
        """The request's computed prompt tokens; by the hits of all where its own are unknown."""
        tokens = computed_tokens(record)
        if tokens is None or record.cached_tokens is not None:
            return tokens
        began_at = record.started_at
        hits = Activity(*self._samples.between(began_at - _AROUND_S, began_at + _AROUND_S))
        return max(1, round(tokens * (1 - (hits.hit_share or 0.0))))

    def _learn_costs(self, record: RequestRecord, first_at: float, tokens: int) -> None:
        """Learn from a request what steps cost where the plugin does not tell of them."""
        costs, at = self._costs["samples"], record.ended_at
        if self._disturbed(record.started_at, at):
            return
        if record.prefill_s and tokens >= _PROMPT_TOKENS:
            costs.learn_prompt(at, record.prefill_s / tokens)
            if not self.steps_tell_tokens:
                self._costs["plugin"].learn_prompt(at, record.prefill_s / tokens)
        generated = (record.output_tokens or 0) - 1
        if record.decode_s and generated > 0:
            sums = self._samples.between(first_at, first_at + record.decode_s)
            done = Activity(*sums)
            if done.seconds >= _COVERED * record.decode_s:
                costs.learn_decode(at, done.running, record.decode_s / generated)

    def _disturbed(self, start: float, end: float) -> bool:
        """Whether steps of a time are slower than their tokens explain."""
        if self.ready_at is not None and abs(start - self.ready_at) < _COLD_S:
            return True
        lost_s = self.processor_waits.lost_s(start, end) or 0.0
        lost_s += self.gpu_slowness.lost_s(start, end) or 0.0
        return lost_s > _SLOW_SHARE * (end - start)

    def died(self, at: float, event: str) -> None:
        """Take in an event that ended the engine's requests."""
        self.died_at.append((at, event))

    @property
    def sampled_until(self) -> float:
        """The time of the newest sample; minus infinity without any."""
        return self._samples.last_at

    def period(self, start: float, end: float) -> Period:
        """What the engine did from `start` to `end`, from the finest source that covers it."""
        source, sums = self._covering(start, end)
        return Period(start, end, Activity(*sums), source)

    def _covering(self, start: float, end: float) -> tuple[str | None, list[float]]:
        sums: list[float] = []
        for source, known in (("plugin", self._steps), ("samples", self._samples)):
            sums = known.between(start, end)
            if sums[0] >= _COVERED * (end - start) > 0:
                return source, sums
        return None, sums

    def prefill_token_s(self, source: str | None) -> float | None:
        """Seconds of one prompt token by the steps of a source."""
        return None if source is None else self._costs[source].prefill_token_s

    def alone_s(self) -> float | None:
        """Seconds of a step for one request, by the finest source."""
        values = (costs.alone_s for costs in self._costs.values())
        return next((value for value in values if value is not None), None)

    def change(self, arrived_at: float, until: float) -> Change | None:
        """What came since the queue that a request found began; None with too little known."""
        index = bisect_right(self._empty_at, arrived_at)
        since = self._empty_at[index - 1] if index else self._samples.first_at
        next_sample = self._samples.after(arrived_at)
        if next_sample is None:
            return None
        now = Activity(*self._samples.between(since, min(max(next_sample, since), until + 5.0)))
        usual = self._usual(since)
        if usual.seconds < _USUAL_AT_LEAST_S or not now.seconds:
            return None
        share = now.seconds / usual.seconds
        return Change(
            since,
            now.seconds,
            now.arrivals,
            usual.arrivals * share,
            now.prefill_tokens,
            usual.prefill_tokens * share,
            usual.running,
        )

    def missed_hits(self, start: float, end: float) -> MissedHits | None:
        """How much less the prefix cache had than usual around a period; None if not much less.

        New prompts, which no cache can have, lower the share of hits, but not the hits of each
        request.
        """
        since = self._samples.before(start - _HITS_AT_LEAST_S)
        until = self._samples.after(end)
        if since is None or until is None:
            return None
        usual = self._usual(since)
        if (usual.hit_share or 0.0) < _USUAL_HITS:
            return None
        now = Activity(*self._samples.between(since, until))
        if now.hit_share is None or now.hit_share >= _HITS_LEFT * (usual.hit_share or 0.0):
            return None
        expected = now.arrivals * usual.hit_tokens / max(1.0, usual.arrivals)
        if not expected or now.hit_tokens >= _HITS_LEFT * expected:
            return None
        lost = (expected - now.hit_tokens) / max(1.0, now.query_tokens - now.hit_tokens)
        return MissedHits(now.hit_share, usual.hit_share or 0.0, min(1.0, lost))

    def accepted_share(self, start: float, end: float) -> float | None:
        """Accepted tokens per draft in a period; only samples tell of drafts."""
        if not self._drafts:
            return None
        return Activity(*self._samples.between(start, end)).accepted_share

    def usual_accepted_share(self, at: float) -> float | None:
        """Accepted tokens per draft in the time before."""
        since = self._samples.before(at)
        usual = None if since is None else self._usual(since)
        if usual is None or usual.seconds < _USUAL_AT_LEAST_S:
            return None
        return usual.accepted_share

    def _usual(self, before: float) -> Activity:
        """What the engine did in the time before a sample, in which many requests came."""
        usual = self._usual_before.get(before)
        if usual is None:
            if len(self._usual_before) >= _MOST_USUAL:
                self._usual_before.clear()
            usual = Activity(*self._samples.between(before - _USUAL_S, before))
            self._usual_before[before] = usual
        return usual

    def rejected(self, start: float, end: float) -> float:
        """Requests that the engine refused between the samples around a period."""
        until = self._samples.after(end)
        return Activity(*self._samples.between(start - 1.0, until or end)).rejected

    def _add(self, sums: RunningSums, done: Slice, costs: StepCosts) -> None:
        values = sums_of(done, done.until - done.since, self.limits, costs)
        sums.add(done.since, done.until, values)
