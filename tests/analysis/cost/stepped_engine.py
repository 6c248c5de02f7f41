"""An engine in steps, from first principles: who used its GPU for how long, and what agents see.

Batches are made as vLLM makes them: each step decodes a token for every running request and fills
its token budget with prompts, in chunks. A step takes as long as the roofline allows, and its
tokens pay it: by FLOPs where these bound it, else by bytes; they all share those of the weights.
Nothing of the agent is used but the records that the engine gives to it.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from agent.records.engine import EngineSample
from agent.records.request import RequestRecord, Status, Vantage
from tests.analysis.cost.engine_days import engine_sample
from tests.records.making import record

# Llama-3.1-8B in BF16: 32 layers of 4096, 32 heads, 8 KV heads of 128, 14336 in the MLP.
LAYERS, HIDDEN, KV_WIDTH, MLP, VOCABULARY = 32, 4096, 1024, 14_336, 128_256
LINEAR = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV_WIDTH + 3 * HIDDEN * MLP)
HEAD = HIDDEN * VOCABULARY
WEIGHT_BYTES = 2.0 * (LINEAR + HEAD)
KV_BYTES = 2.0 * 2 * LAYERS * KV_WIDTH
FLOPS_PER_PAIR = 4.0 * LAYERS * HIDDEN


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A GPU by its data sheet, and how an engine makes batches on it.

    A step takes `slowness` times its roofline, and `overhead_s`.
    """

    flops_per_s: float
    bytes_per_s: float
    budget: int = 8192
    most_running: int = 256
    slowness: float = 1.0
    overhead_s: float = 0.0


H100 = Machine(flops_per_s=989.4e12, bytes_per_s=3.35e12)


@dataclass(slots=True, kw_only=True)
class Job:
    """A request. Its client leaves after `leaves_at` output tokens; `has_row` even then."""

    number: int
    at: float
    prompt: int
    output: int
    cached: int = 0
    leaves_at: int | None = None
    has_row: bool = True
    begun_at: float = 0.0
    first_at: float = 0.0
    ended_at: float = 0.0
    computed: int = 0
    generated: int = 0
    prefill_gpu_s: float = 0.0
    decode_gpu_s: float = 0.0
    chunk: int = 0

    @property
    def key(self) -> tuple[str, str]:
        """Trace id and span id of its row."""
        return f"{self.number:032x}", f"{self.number:016x}"

    @property
    def gpu_s(self) -> float:
        """Its part of the seconds of all steps."""
        return self.prefill_gpu_s + self.decode_gpu_s

    @property
    def work(self) -> tuple[float, float]:
        """FLOPs and bytes of KV cache of its chunk in this step."""
        pairs = self.chunk * self.computed + self.chunk * (self.chunk + 1) / 2
        last = self.computed + self.chunk >= self.prompt
        flops = 2.0 * LINEAR * self.chunk + FLOPS_PER_PAIR * pairs + (2.0 * HEAD if last else 0.0)
        return flops, KV_BYTES * (self.computed + 2 * self.chunk)

    @property
    def over(self) -> bool:
        """Whether it has all its tokens, or its client has left."""
        return self.generated >= (self.output if self.leaves_at is None else self.leaves_at)

    def row(self) -> RequestRecord:
        """The row of its span; the proxy's, which has no queue, where its client left."""
        left = self.leaves_at is not None
        return record(
            self.number,
            vantage=Vantage.PROXY if left else Vantage.ENGINE,
            status=Status.CANCELLED if left else Status.OK,
            started_at=self.at,
            ended_at=self.ended_at,
            queue_s=None if left else self.begun_at - self.at,
            prefill_s=None if left else self.first_at - self.begun_at,
            decode_s=None if left else self.ended_at - self.first_at,
            ttft_s=self.first_at - self.at,
            e2e_s=self.ended_at - self.at,
            input_tokens=self.prompt,
            cached_tokens=None if left else self.cached,
            output_tokens=self.generated,
        )


@dataclass(slots=True)
class SteppedEngine:
    """Runs the jobs; a sample is stamped every `every_s` and rendered up to `late_s` after that.

    Agents wait for all of `late_s`.
    """

    machine: Machine
    jobs: Iterable[Job]
    every_s: float = 5.0
    late_s: float = 0.0
    seed: int = 0
    now: float = 0.0
    busy_s: float = 0.0
    counts: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(
            ("steps", "input", "cached", "output", "first", "finished"), 0.0
        )
    )
    waiting: list[Job] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)
    ended: list[Job] = field(default_factory=list)
    samples: list[EngineSample] = field(default_factory=list)

    def run(self, until: float) -> "SteppedEngine":
        """Serve until this second."""
        chance = random.Random(self.seed)
        stamp, coming = 0.0, sorted(self.jobs, key=lambda job: -job.at)
        rendered = chance.uniform(0.0, self.late_s)
        while self.now < until:
            while coming and coming[-1].at <= self.now:
                self.waiting.append(coming.pop())
            batch = self._schedule()
            ends_at = self.now + self._compute(batch)
            if not batch:
                ends_at = coming[-1].at if coming else until
            # A sample that is rendered during a step does not have the tokens of that step.
            while rendered < ends_at:
                self._sample(stamp)
                stamp += self.every_s
                rendered = stamp + chance.uniform(0.0, self.late_s)
            self.busy_s += ends_at - self.now if batch else 0.0
            self.now = ends_at
            self._end_step(batch)
        return self

    def _sample(self, at: float) -> None:
        counts = {**self.counts, "running": float(len(self.running)), "waiting": len(self.waiting)}
        self.samples.append(engine_sample(at, **counts, scrape=self.late_s))

    def _schedule(self) -> list[Job]:
        left = self.machine.budget
        for job in self.running:
            job.chunk = min(max(job.prompt - job.computed, 1), left)
            left -= job.chunk
        while self.waiting and left > 0 and len(self.running) < self.machine.most_running:
            job = self.waiting.pop(0)
            job.begun_at, job.computed = self.now, job.cached
            job.chunk = min(job.prompt - job.cached, left)
            left -= job.chunk
            self.running.append(job)
        return [job for job in self.running if job.chunk]

    def _compute(self, batch: list[Job]) -> float:
        """Seconds of a step, which its requests pay."""
        if not batch:
            return 0.0
        works = [job.work for job in batch]
        flops = sum(work[0] for work in works)
        moved = WEIGHT_BYTES + sum(work[1] for work in works)
        compute_s, memory_s = flops / self.machine.flops_per_s, moved / self.machine.bytes_per_s
        took_s = self.machine.slowness * max(compute_s, memory_s) + self.machine.overhead_s
        tokens = sum(job.chunk for job in batch)
        for job, (its_flops, its_bytes) in zip(batch, works, strict=True):
            shared = its_bytes + WEIGHT_BYTES * job.chunk / tokens
            part = its_flops / flops if compute_s >= memory_s else shared / moved
            if job.generated:
                job.decode_gpu_s += part * took_s
            else:
                job.prefill_gpu_s += part * took_s
        return took_s

    def _end_step(self, batch: list[Job]) -> None:
        generated = 0
        for job in batch:
            job.computed += job.chunk
            if job.computed < job.prompt:
                continue
            if not job.generated:
                job.first_at = self.now
                self.counts["input"] += job.prompt
                self.counts["first"] += 1
                self.counts["cached"] += job.cached
            job.generated += 1
            generated += 1
        self.counts["output"] += generated
        self.counts["steps"] += bool(generated)
        for job in [job for job in batch if job.over]:
            job.ended_at = self.now
            self.counts["finished"] += job.leaves_at is None
            self.running.remove(job)
            self.ended.append(job)
