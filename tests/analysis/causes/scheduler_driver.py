"""Runs vLLM's own engine core on scripted requests, in virtual time and without a model.

The engine's own Python runs this script; `scheduler_runs.py` starts it. Its one argument is a file
of jobs in JSON: `{"jobs": [{"to": path, "engine": {...}, "machine": {...}, "requests": [...],
"script": {...}}]}`. Scheduler, KV cache and prefix cache, request states, statistics, exposition,
spans and the plugin's records are the real ones. What is scripted is how long a step takes, and
which tokens come out of it. Every clock that vLLM reads is the virtual one.
"""

import json
import os
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy
import torch  # type: ignore[import-not-found]
from goodput_agent_vllm import hooks
from goodput_agent_vllm.reporting import Reporter
from goodput_agent_vllm.sending import Sender
from prometheus_client import REGISTRY, generate_latest
from vllm import SamplingParams  # type: ignore[import-not-found]
from vllm.engine.arg_utils import EngineArgs  # type: ignore[import-not-found]
from vllm.v1.engine import (  # type: ignore[import-not-found]
    EngineCoreRequest,
    output_processor,
)
from vllm.v1.engine.core import EngineCore  # type: ignore[import-not-found]
from vllm.v1.executor.abstract import Executor  # type: ignore[import-not-found]
from vllm.v1.kv_cache_interface import (  # type: ignore[import-not-found]
    FullAttentionSpec,
)
from vllm.v1.metrics.loggers import (  # type: ignore[import-not-found]
    PrometheusStatLogger,
)
from vllm.v1.metrics.stats import IterationStats  # type: ignore[import-not-found]
from vllm.v1.outputs import (  # type: ignore[import-not-found]
    DraftTokenIds,
    ModelRunnerOutput,
)


class Clock:
    """The virtual time in Unix seconds: all of vLLM's clocks show it while a run goes on."""

    now = 1_800_000_000.0


def set_clocks() -> None:
    """Make the module `time` show the virtual time."""
    for name in ("time", "monotonic", "perf_counter"):
        setattr(time, name, lambda: Clock.now)
        setattr(time, f"{name}_ns", lambda: int(Clock.now * 1e9))


_VOCABULARY = 2000
_BLOCK_TOKENS = 16
Json = dict[str, Any]


class Script:
    """What is wrong with the engine, and when. Times are seconds of the run."""

    def __init__(self, given: Json) -> None:
        self._given = given
        self._stalls = sorted(given.get("stalls", ()), reverse=True)

    def at(self, name: str, at_s: float) -> list[float]:
        """The strengths of a fault at a time: each entry is (since, until, strength)."""
        every = self._given.get(name, ())
        return [strength for since, until, strength in every if since <= at_s < until]

    def stalled_s(self, at_s: float) -> float:
        """How long the engine stands still in the step that begins now."""
        stalled_s = 0.0
        while self._stalls and self._stalls[-1][0] <= at_s:
            stalled_s += self._stalls.pop()[1]
        return stalled_s


class Machine:
    """How long a step takes: a roofline of each of its two parts.

    The linear layers read all weights once, and compute for each token. Attention reads the KV
    values of each context, and computes two products with them. Reading and computing overlap: with
    `overlap` 1 not at all, and the larger it is, the more the longer of both counts alone. Then
    there are the time to launch a step, and the time to sample for each request.
    """

    def __init__(self, given: Json, script: Script) -> None:
        self._given = given
        self._script = script
        self._noise = random.Random(given.get("seed", 0))
        # Of the core's main thread: what it ran, and what it was ready and had no processor.
        self.ran_s = self.waited_s = 0.0

    def step_s(self, work: list[tuple[int, int]], began_s: float) -> float:
        """How long a step takes. `work` has of each request its new tokens and its context."""
        given = self._given
        tokens = sum(new for new, _ in work)
        products = sum(new * context for new, context in work)
        contexts = sum(context for _, context in work)
        linear_s = self._overlapped_s(given["weights_s"], tokens * given["token_s"])
        attention_s = self._overlapped_s(
            contexts * given["kv_token_s"], products * given["attention_s"]
        )
        steady_s = linear_s + attention_s + given["launch_s"] + len(work) * given["request_s"]
        steady_s *= self._noise.lognormvariate(0.0, given["noise"])
        return self._disturbed_s(steady_s, began_s)

    def _overlapped_s(self, reading_s: float, computing_s: float) -> float:
        power: float = self._given["overlap"]
        return float((reading_s**power + computing_s**power) ** (1 / power))

    def _disturbed_s(self, steady_s: float, began_s: float) -> float:
        seconds = steady_s
        for name in ("slow", "throttled"):
            for slowdown in self._script.at(name, began_s):
                seconds *= slowdown
        starved_s = 0.0
        for slowdown in self._script.at("starved", began_s):
            # Every part of the longer step is a wait for a processor.
            starved_s += (slowdown - 1) * seconds
        ran_s = self._given["processor_share"] * steady_s
        self.ran_s += ran_s
        self.waited_s += 0.01 * ran_s + starved_s
        return seconds + starved_s + self._script.stalled_s(began_s)


class Later(Future):  # type: ignore[type-arg]
    """A result that comes at a virtual time: to wait for it takes until then."""

    def __init__(self, at: float, value: object) -> None:
        super().__init__()
        self._at = at
        self.set_result(value)

    def result(self, timeout: float | None = None) -> Any:
        Clock.now = max(Clock.now, self._at)
        return super().result()


class _Sequence:
    """What the workers know of a request."""

    def __init__(self, request_id: str, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.sampled = 0
        self.draws = random.Random(request_id)


class ScriptedExecutor(Executor):  # type: ignore[misc]
    """The workers of an engine: they have no model, and each step takes as long as scripted."""

    machine: Machine
    script: Script
    began_at = Clock.now
    drafts = 0

    @staticmethod
    def supports_async_scheduling() -> bool:
        return True

    def _init_executor(self) -> None:
        self._sequences: dict[str, _Sequence] = {}
        self._free_at = Clock.now
        self._result: tuple[float, ModelRunnerOutput] | None = None
        self._drafting: list[str] = []

    def collective_rpc(self, method: object, *args: object, **options: object) -> list[Any]:
        answers = {
            "get_kv_cache_spec": {
                "layer.0.attn": FullAttentionSpec(
                    block_size=_BLOCK_TOKENS, num_kv_heads=1, head_size=16, dtype=torch.float16
                )
            },
            "determine_available_memory": 1 << 40,
            "get_supported_kv_cache_layouts": ["NHD"],
            "get_supported_tasks": ("generate",),
        }
        if method == "compile_or_warm_up_model":
            return []
        return [answers.get(str(method))]

    def check_health(self) -> None:
        return

    def execute_model(self, scheduled: Any, non_block: bool = False) -> Any:
        """Begin a step, as soon as the step before has ended."""
        began_at = max(Clock.now, self._free_at)
        began_s = began_at - self.began_at
        work = self._work(scheduled)
        output = self._output(scheduled, work, began_s)
        if work:
            self._free_at = began_at + self.machine.step_s(
                [(new, computed + new) for _, new, computed in work], began_s
            )
        self._result = self._free_at, output
        if not work:
            return Later(began_at, output) if non_block else output
        return Later(self._free_at, None) if non_block else None

    def sample_tokens(self, grammar: object, non_block: bool = False) -> Any:
        assert self._result is not None
        at, output = self._result
        later = Later(at, output)
        return later if non_block else later.result()

    def _work(self, scheduled: Any) -> list[tuple[str, int, int]]:
        """Of each request of a step: its id, its new tokens, and the tokens that it has already."""
        for each in scheduled.scheduled_new_reqs:
            if each.req_id not in self._sequences:
                self._sequences[each.req_id] = _Sequence(each.req_id, len(each.prompt_token_ids))
        computed = {each.req_id: each.num_computed_tokens for each in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return [(req, new, computed[req]) for req, new in scheduled.num_scheduled_tokens.items()]

    def _output(self, scheduled: Any, work: list[tuple[str, int, int]], at_s: float) -> Any:
        sampled = []
        self._drafting = []
        for request_id, new, computed in work:
            known = self._sequences[request_id]
            drafts = len(scheduled.scheduled_spec_decode_tokens.get(request_id, ()))
            tokens: list[int] = []
            if computed + new - drafts >= known.prompt_tokens + known.sampled:
                tokens = self._tokens(known, drafts, at_s)
                self._drafting.append(request_id)
            sampled.append(tokens)
        for request_id in scheduled.finished_req_ids:
            self._sequences.pop(request_id, None)
        ids = [request_id for request_id, _, _ in work]
        return ModelRunnerOutput(ids, {each: i for i, each in enumerate(ids)}, sampled)

    def _tokens(self, known: _Sequence, drafts: int, at_s: float) -> list[int]:
        chance = min([self._accepts, *self.script.at("accepted", at_s)])
        number = 1
        while number <= drafts and known.draws.random() < chance:
            number += 1
        known.sampled += number
        return [known.draws.randrange(_VOCABULARY) for _ in range(number)]

    @property
    def _accepts(self) -> float:
        """The chance of a draft token without a fault."""
        return 0.75

    def take_draft_token_ids(self) -> Any:
        if not self.drafts:
            return None
        return DraftTokenIds(self._drafting, [[1] * self.drafts for _ in self._drafting])


class Records(Sender):
    """Keeps the plugin's records in place of sending them."""

    def __init__(self) -> None:
        self.records: list[bytes] = []

    def add(self, record: bytes) -> None:
        self.records.append(record)

    def send(self) -> None:
        return

    def flush(self) -> None:
        return


class Front:
    """vLLM's front: request states, statistics, exposition, spans, and the plugin's reporters."""

    def __init__(self, config: Any) -> None:
        self.processor = output_processor.OutputProcessor(
            None, log_stats=True, tracing_enabled=True
        )
        self._prometheus = PrometheusStatLogger(config, [0])
        self._prometheus.log_engine_initialized()
        self.default, self.detailed = Records(), Records()
        self._by_default = Reporter(self.default, lambda: Clock.now)
        self._with_details = Reporter(self.detailed, lambda: Clock.now)
        self.spans: list[tuple[float, float, Json]] = []
        self.expositions: list[tuple[float, str]] = []

    def take(self, outputs: Any) -> None:
        """What vLLM's front does with the outputs of a step."""
        # The Prometheus logger of vLLM's front is told of a step when its outputs were processed.
        stats = IterationStats() if outputs.outputs else None
        with self._spans():
            self.processor.process_outputs(outputs.outputs, outputs.timestamp, stats)
        scheduler = outputs.scheduler_stats
        self._prometheus.record(scheduler, stats)
        if scheduler is None:
            return
        self._with_details.step(scheduler, stats, 0)
        scheduler.iteration_details = None
        self._by_default.step(scheduler, stats, 0)

    @contextmanager
    def _spans(self) -> Iterator[None]:
        def keep(*, start_time: int, attributes: Json, **_: object) -> None:
            self.spans.append((start_time / 1e9, Clock.now, attributes))

        output_processor.instrument_manual = keep
        yield

    def scrape(self) -> None:
        """Keep the exposition, without the buckets of its histograms."""
        lines = generate_latest(REGISTRY).decode().splitlines()
        kept = [
            line for line in lines if line.startswith("vllm:") and "_bucket{" not in line
            and "_created{" not in line
        ]  # fmt: skip
        self.expositions.append((Clock.now, "\n".join(kept) + "\n"))


class Run:
    """One job: an engine, its requests, and what went wrong."""

    def __init__(self, job: Json) -> None:
        self._script = Script(job["script"])
        self._requests = job["requests"]
        self._scrape_every_s = job["scrape_every_s"]
        self._began_at = Clock.now
        self._parts: dict[int, list[int]] = {}
        self._taken: list[Any] = []
        config = EngineArgs(**job["engine"], enable_logging_iteration_details=True)
        config = config.create_engine_config()
        # For CPUs vLLM switches it off; on GPUs it is the default.
        config.scheduler_config.async_scheduling = bool(job["engine"]["async_scheduling"])
        self._machine = Machine(job["machine"], self._script)
        members = {"machine": self._machine, "script": self._script, "began_at": self._began_at}
        members["drafts"] = config.num_speculative_tokens
        executor = type("Executor", (ScriptedExecutor,), members)
        self._core = EngineCore(config, executor, log_stats=True)
        self._places = self._core.scheduler.max_num_running_reqs
        self._front = Front(config)
        self._machine_reads: list[tuple[float, float, float]] = []

    def result(self) -> Json:
        """Everything that could be seen of the run."""
        upcoming = list(reversed(self._requests))
        scrape_at = self._began_at
        while True:
            self._arrive(upcoming)
            if not self._core.scheduler.has_requests() and not self._core.batch_queue:
                if not upcoming:
                    break
                self._scrape_until(scrape_at, upcoming[-1]["queued_s"] + self._began_at)
                Clock.now = max(Clock.now, self._began_at + upcoming[-1]["queued_s"])
                continue
            self._apply()
            outputs, executed = self._core.step_fn()
            self._core.post_step(executed)
            scrape_at = self._scrape_until(scrape_at, Clock.now)
            for each in (outputs or {}).values():
                self._front.take(each)
        front = self._front
        return {
            "began_at": self._began_at,
            "default": front.default.records,
            "detailed": front.detailed.records,
            "spans": front.spans,
            "expositions": front.expositions,
            "processor": self._machine_reads,
        }

    def _scrape_until(self, scrape_at: float, now: float) -> float:
        """Scrape at all times until now; return the next one. A scrape sees the steps before."""
        while scrape_at <= now:
            before, Clock.now = Clock.now, scrape_at
            self._front.scrape()
            self._machine_reads.append((scrape_at, self._machine.ran_s, self._machine.waited_s))
            Clock.now = before
            scrape_at += self._scrape_every_s
        return scrape_at

    def _arrive(self, upcoming: list[Json]) -> None:
        """Requests that came while a step ran are queued when it has ended."""
        while upcoming and upcoming[-1]["queued_s"] + self._began_at <= Clock.now:
            given = upcoming.pop()
            params = SamplingParams(
                max_tokens=given["output_tokens"], ignore_eos=True, detokenize=False
            )
            request = EngineCoreRequest(
                request_id=given["id"],
                prompt_token_ids=[token for part in given["prompt"] for token in self._part(*part)],
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=self._began_at + given["arrived_s"],
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
                external_req_id=given["id"],
            )
            self._front.processor.add_request(request, None)
            self._core.add_request(*self._core.preprocess_add_request(request))

    def _part(self, seed: int, tokens: int) -> list[int]:
        """The tokens of a part of a prompt: a longer part of the same seed begins with them."""
        known = self._parts.get(seed, [])
        if len(known) < tokens:
            draws = numpy.random.default_rng(seed)
            known = draws.integers(0, _VOCABULARY, max(tokens, 64)).tolist()
            self._parts[seed] = known
        return known[:tokens]

    def _apply(self) -> None:
        """What a fault does to the engine itself."""
        at_s = Clock.now - self._began_at
        scheduler = self._core.scheduler
        places = min([self._places, *self._script.at("places", at_s)])
        scheduler.max_num_active_reqs = int(places)
        pool = scheduler.kv_cache_manager.block_pool
        wanted = round(max([0.0, *self._script.at("blocks_taken", at_s)]) * pool.num_gpu_blocks)
        more = min(wanted - len(self._taken), pool.get_num_free_blocks())
        if more > 0:
            self._taken += pool.get_new_blocks(more)
        elif wanted < len(self._taken):
            pool.free_blocks(self._taken[wanted:])
            del self._taken[wanted:]
        if self._script.at("cache_lost", at_s):
            for block in pool.blocks:
                if block.block_hash is not None and not block.ref_cnt:
                    pool._maybe_evict_cached_block(block)


def main(jobs: Path) -> None:
    """Run all jobs; each writes its result when it is done."""
    set_clocks()
    hooks.watch_first_tokens(IterationStats, Reporter(Records()))
    for job in json.loads(jobs.read_text())["jobs"]:
        Clock.now = 1_800_000_000.0
        result = msgspec.msgpack.encode(Run(job).result())
        to = Path(job["to"])
        unfinished = to.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(result)
        unfinished.rename(to)
    # An orderly exit prints what the extension modules leak.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[-1]))
