"""The timeline of one engine in bounded memory: its steps, samples, processors and requests."""

from collections import deque
from collections.abc import Sequence

from agent.analysis.causes.activity import Activity, Limits, Slice, StepCosts, sums_of
from agent.analysis.causes.baselines import RequestBaselines, computed_tokens, front_of
from agent.analysis.causes.hardware_slowness import GpuSlowness, ProcessorWaits, Slowness
from agent.analysis.causes.periods import Period
from agent.analysis.causes.prompt_log import Prompt, PromptLog
from agent.analysis.causes.running_sums import RunningSums
from agent.analysis.causes.sample_slices import limits_of, shows_empty_queue, slices_between
from agent.analysis.causes.sampled_activity import SampledActivity
from agent.records.engine import EngineSample, EngineStep
from agent.records.gpu import GpuSample
from agent.records.host import HostSample
from agent.records.request import RequestRecord

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
# A prompt of this many tokens shows what a prompt token costs.
_PROMPT_TOKENS = 128
# The first requests of an engine are slow, as it compiles and fills its caches: they do not show
# the cost of its steps.
COLD_S = 30.0
# Neither do the steps of a time in which processors or GPUs lost more than this share.
_SLOW_SHARE = 0.1


class EngineTimeline:
    """What is known of one engine. Add in the order of time; not for several threads."""

    def __init__(self) -> None:
        self.baselines = RequestBaselines()
        self.limits = Limits()
        self.ready_at: float | None = None
        self.ready_by = "start"
        self.died_at: deque[tuple[float, str]] = deque(maxlen=64)
        self._costs = {"plugin": StepCosts(), "samples": StepCosts()}
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
        if step.tokens_of_step or not step.prefill_tokens:
            self._unlearned.append(done)
        sums = sums_of(done, done.until - done.since, self.limits, self._costs["plugin"])
        self._steps.add(done.since, done.until, sums)
        self.has_steps = True

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
        for done in slices_between(before, sample):
            sums = sums_of(done, done.until - done.since, self.limits, self._costs["samples"])
            self.sampled.add(done, sums, queue_empty=shows_empty_queue(sample, done))

    def _learn_steps(self, now: float) -> None:
        """Learn from steps, once the samples show whether the machine was slow."""
        while self._unlearned and self._unlearned[0].until < now - _MACHINE_KNOWN_S:
            done = self._unlearned.popleft()
            if not self._disturbed(done.since, done.until):
                self._costs["plugin"].learn(done)

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
        first_at = record.started_at + front_s + (record.queue_s or 0.0) + (record.prefill_s or 0.0)
        self._learn_costs(record, first_at, tokens)
        prefill_s = record.prefill_s or 0.0
        self.prompts.add(Prompt(record.span_id, first_at, prefill_s, tokens, missing))

    def computed(self, record: RequestRecord) -> int | None:
        """The request's computed prompt tokens.

        Where its cached tokens are unknown, the cache's share of all prompts of that time counts.
        """
        tokens = computed_tokens(record)
        if tokens is None or record.cached_tokens is not None:
            return tokens
        began_at = record.started_at
        hits = self.sampled.between(began_at - _AROUND_S, began_at + _AROUND_S)
        return max(1, round(tokens * (1 - (hits.hit_share or 0.0))))

    def _learn_costs(self, record: RequestRecord, first_at: float, tokens: int) -> None:
        """Learn the cost of steps from a request, for periods without steps of the plugin."""
        costs, at = self._costs["samples"], record.ended_at
        if self._disturbed(record.started_at, at):
            return
        if record.prefill_s and tokens >= _PROMPT_TOKENS:
            costs.learn_prompt(at, record.prefill_s / tokens)
            if not self.steps_have_tokens:
                self._costs["plugin"].learn_prompt(at, record.prefill_s / tokens)
        generated = (record.output_tokens or 0) - 1
        if record.decode_s and generated > 0:
            done = self.sampled.between(first_at, first_at + record.decode_s)
            if done.seconds >= _COVERED * record.decode_s:
                costs.learn_decode(at, done.running, record.decode_s / generated)

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

    def prefill_token_s(self, source: str | None) -> float | None:
        """Seconds of one prompt token, by the steps of a source; None where that is unknown."""
        return None if source is None else self._costs[source].prefill_token_s

    def alone_s(self) -> float | None:
        """Seconds of a step for one request, by the plugin, or by samples if unknown there."""
        by_steps = self._costs["plugin"].alone_s
        return self._costs["samples"].alone_s if by_steps is None else by_steps
