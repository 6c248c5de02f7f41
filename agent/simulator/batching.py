"""A model of vLLM's continuous batching, in simulated time without a clock.

In each step a request computes a piece of its prompt, within the token budget, or generates a token
once its prompt is computed. Requests are scheduled in the order of their arrival. When the KV cache
is full, the request that was scheduled last frees its blocks and starts over later (preemption by
recomputation).
"""

import math
from bisect import insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from agent.simulator.scenario import Fault, Faults, KvCache, Scenario

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineRequest:
    """One request with its planned output length; equal only to itself.

    `leaves_after_tokens` is the token after which its client leaves; None for a client that stays.
    Its client reads nothing for `client_pause_s` after the first bytes of the response.
    It joins the queue after `front_s` and is not scheduled before it has waited `deferred_s` there.
    The prefix cache has `cached_tokens` of its prompt. If it `fails`, it gets an error. `tenant` is
    whom it is for.
    """

    request_id: str
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    leaves_after_tokens: int | None = None
    client_pause_s: float = 0.0
    temperature: float = 1.0
    top_p: float = 1.0
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    deferred_s: float = 0.0
    front_s: float = 0.0
    cached_tokens: int = 0
    fails: bool = False
    tenant: str | None = None

    @property
    def queued_s(self) -> float:
        """When it joins the queue."""
        return self.arrived_s + self.front_s

    @property
    def ready_s(self) -> float:
        """When it can be scheduled."""
        return self.queued_s + self.deferred_s

    @property
    def finish_reason(self) -> FinishReason:
        """Why generation ends after `output_tokens`."""
        return "length" if self.output_tokens >= self.max_tokens else "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One generated token. `waited_s` counts from the token before it, or from the arrival."""

    request: EngineRequest
    position: int
    waited_s: float

    @property
    def is_first(self) -> bool:
        """Whether this is the first output token."""
        return self.position == 1

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why generation ended with this token; None if it goes on."""
        done = self.position == self.request.output_tokens
        return self.request.finish_reason if done else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The times of one finished request; they include its preemptions.

    `waits` are the waits for its tokens after the first: a time, and how many equal ones in a row.
    """

    request: EngineRequest
    scheduled_s: float
    first_token_s: float
    last_token_s: float
    preemptions: int
    waits: tuple[tuple[float, int], ...] = ()

    @property
    def ttft_s(self) -> float:
        """Arrival to the first token."""
        return self.first_token_s - self.request.arrived_s

    @property
    def e2e_s(self) -> float:
        """Arrival to the last token."""
        return self.last_token_s - self.request.arrived_s

    @property
    def queue_s(self) -> float:
        """From its arrival in the queue to the step that first took the request up."""
        return self.scheduled_s - self.request.queued_s

    @property
    def prefill_s(self) -> float:
        """From there to the first token."""
        return self.first_token_s - self.scheduled_s

    @property
    def decode_s(self) -> float:
        """First to last token."""
        return self.last_token_s - self.first_token_s

    @property
    def inference_s(self) -> float:
        """Taken up to the last token."""
        return self.last_token_s - self.scheduled_s

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first; 0 for a single token, as vLLM records it."""
        later_tokens = self.request.output_tokens - 1
        return self.decode_s / later_tokens if later_tokens else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLoad:
    """How full the engine is. `kv_usage` is the share of KV blocks in use, 0 to 1.

    `deferred` of the waiting requests cannot be scheduled yet, whatever room there is.
    """

    running: int
    waiting: int
    kv_usage: float
    deferred: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The results of one step, and the load after it.

    `failed` is the number of requests that got an error since the last step. `prefill_tokens` are
    all that the step computed of prompts, again after a preemption, too. The step is the last of
    `times` equal ones in a row. FLOPs and bytes are of all of them, and 0 if the scenario has no
    GPU. `lost` requests got an error.
    """

    load: BatchLoad
    tokens: tuple[Token, ...] = ()
    finished: tuple[Finished, ...] = ()
    admitted: tuple[EngineRequest, ...] = ()
    preemptions: int = 0
    failed: int = 0
    prefill_tokens: int = 0
    began_s: float = 0.0
    ended_s: float = 0.0
    times: int = 1
    flops: float = 0.0
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    lost: tuple[EngineRequest, ...] = ()


_SAME_WAIT_S = 1e-9


@dataclass(slots=True, eq=False)
class Sequence:
    """A request inside the engine. `computed_tokens` have their keys and values in the cache."""

    request: EngineRequest
    computed_tokens: int = 0
    generated_tokens: int = 0
    kv_blocks: int = 0
    preemptions: int = 0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    # Waits for tokens after the first: the time, and how many equal ones in a row.
    waits: list[tuple[float, int]] = field(default_factory=list)

    @property
    def known_tokens(self) -> int:
        """Of the prompt and generated."""
        return self.request.prompt_tokens + self.generated_tokens

    @property
    def uncomputed_tokens(self) -> int:
        """Those that have no keys and values in the cache."""
        return self.known_tokens - self.computed_tokens

    @property
    def decodes(self) -> bool:
        """Whether its next step gives one token."""
        return self.generated_tokens > 0 and self.uncomputed_tokens == 1

    def take_token(self, at_s: float) -> Token:
        """The token of a step that ends at `at_s`."""
        since_s = self.request.arrived_s if self.last_token_s is None else self.last_token_s
        if self.last_token_s is not None:
            self._add_waits(at_s - since_s, 1)
        self.first_token_s = at_s if self.first_token_s is None else self.first_token_s
        self.last_token_s = at_s
        self.generated_tokens += 1
        return Token(request=self.request, position=self.generated_tokens, waited_s=at_s - since_s)

    def skip(self, steps: int, each_s: float) -> None:
        """Take a token in each of `steps` equal steps."""
        assert self.last_token_s is not None
        self.generated_tokens += steps
        self.computed_tokens += steps
        self.last_token_s += steps * each_s
        self._add_waits(each_s, steps)

    def _add_waits(self, waited_s: float, count: int) -> None:
        if self.waits and abs(self.waits[-1][0] - waited_s) < _SAME_WAIT_S:
            count += self.waits.pop()[1]
        self.waits.append((waited_s, count))

    @property
    def tokens_left(self) -> int:
        """Until it is complete or its client leaves."""
        last = self.request.leaves_after_tokens or self.request.output_tokens
        return min(last, self.request.output_tokens) - self.generated_tokens

    def finished(self) -> Finished:
        """Its times, after its last token."""
        assert self.scheduled_s is not None
        assert self.first_token_s is not None
        assert self.last_token_s is not None
        return Finished(
            request=self.request,
            scheduled_s=self.scheduled_s,
            first_token_s=self.first_token_s,
            last_token_s=self.last_token_s,
            preemptions=self.preemptions,
            waits=tuple(self.waits),
        )


class KvBlocks:
    """The blocks of the KV cache, and the sequences that hold them."""

    def __init__(self, size: KvCache) -> None:
        self._size = size
        self._free = size.blocks
        self._taken = 0

    @property
    def usage(self) -> float:
        """The share of blocks in use."""
        return min(1.0, 1 - (self._free - self._taken) / self._size.blocks)

    @property
    def held_tokens(self) -> int:
        """The tokens in the blocks of sequences, which a step reads."""
        return (self._size.blocks - self._free) * self._size.block_tokens

    def take(self, share: float) -> None:
        """Reserve this share of all blocks for a fault."""
        self._taken = math.floor(share * self._size.blocks)

    def hold(self, sequence: Sequence) -> bool:
        """Reserve blocks for all known tokens of a sequence; False if too few are free."""
        missing = math.ceil(sequence.known_tokens / self._size.block_tokens) - sequence.kv_blocks
        if missing > 0 and missing > self._free - self._taken:
            return False
        self._free -= missing
        sequence.kv_blocks += missing
        return True

    def missing(self, sequences: Iterable[Sequence], tokens: int) -> bool:
        """Whether too few blocks are free for `tokens` more of each sequence."""
        wanted = sum(
            max(
                0,
                math.ceil((each.known_tokens + tokens) / self._size.block_tokens) - each.kv_blocks,
            )
            for each in sequences
        )
        return wanted > self._free - self._taken

    def release(self, sequence: Sequence) -> None:
        """Free all blocks of a sequence."""
        self._free += sequence.kv_blocks
        sequence.kv_blocks = 0


# Time until a blocked engine tries again.
_BLOCKED_S = 0.01


Pieces = tuple[tuple[Sequence, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """A step that runs: the tokens of each sequence, and the end of the step."""

    begins_s: float
    ends_s: float
    pieces: Pieces
    admitted: tuple[EngineRequest, ...] = ()
    preemptions: int = 0
    lost: tuple[EngineRequest, ...] = ()
    times: int = 1


class Batch:
    """The requests of one engine. `planned` are future requests in the order of their arrival."""

    def __init__(
        self,
        scenario: Scenario,
        planned: Iterable[EngineRequest] = (),
        faults: Faults | None = None,
    ) -> None:
        self._scenario = scenario
        self._faults = faults or Faults(scenario.faults)
        self._kv = KvBlocks(scenario.kv_cache)
        self._planned = iter(planned)
        self._next_planned = next(self._planned, None)
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._free_from_s = 0.0

    @property
    def load(self) -> BatchLoad:
        """How full the engine is after its last step."""
        queued = [each.request for each in self._waiting]
        queued = [request for request in queued if request.queued_s <= self._free_from_s]
        return BatchLoad(
            running=len(self._running),
            waiting=len(queued),
            kv_usage=self._kv.usage,
            deferred=sum(request.ready_s > self._free_from_s for request in queued),
        )

    def submit(self, request: EngineRequest) -> None:
        """Queue a request for the first step after its arrival."""
        self._queue(Sequence(request))

    def abort(self, request: EngineRequest) -> bool:
        """Remove a request whose client left; False if the engine does not have it."""
        for queue in (self._running, self._waiting):
            for sequence in queue:
                if sequence.request is request:
                    queue.remove(sequence)
                    self._kv.release(sequence)
                    return True
        return False

    def next_start_s(self) -> float:
        """When the next step can start; infinity without requests."""
        if self._running:
            return self._free_from_s
        arrivals = [sequence.request.ready_s for sequence in self._waiting[:1]]
        if self._next_planned is not None:
            arrivals.append(self._next_planned.arrived_s)
        return max(self._free_from_s, min(arrivals, default=math.inf))

    def begin(self, at_s: float) -> StepWork:
        """Start the step of `at_s`, a time not before `next_start_s()`."""
        fault = self._faults.at(at_s)
        self._kv.take(fault.kv_taken)
        lost = self._take_planned(at_s)
        preemptions = self._make_room()
        slots = min(self._scenario.max_num_seqs, fault.max_num_seqs or math.inf)
        admitted = tuple(self._admit(at_s, slots))
        pieces = tuple(self._pieces())
        return StepWork(
            begins_s=at_s,
            ends_s=at_s + self._took_s(pieces, fault),
            pieces=pieces,
            admitted=admitted,
            preemptions=preemptions,
            lost=lost,
        )

    def _took_s(self, pieces: Pieces, fault: Fault) -> float:
        if not pieces and self._waiting:
            # Every request waits for blocks that a fault holds.
            return _BLOCKED_S
        prompt_tokens = sum(tokens for sequence, tokens in pieces if not sequence.decodes)
        decoding = sum(sequence.decodes for sequence, _ in pieces)
        prefill_s = self._scenario.prefill.duration_s(prompt_tokens) * fault.prefill_slowdown
        decode_s = self._scenario.decode.duration_s(decoding) * fault.decode_slowdown
        return (prefill_s + decode_s) * fault.step_slowdown * fault.gpu_slowdown

    def end(self, work: StepWork) -> Step:
        """The results of the step; requests that were aborted during it get no token."""
        self._free_from_s = work.ends_s
        prefill_tokens = sum(computed for each, computed in work.pieces if not each.decodes)
        tokens: list[Token] = []
        finished: list[Finished] = []
        for sequence, computed in work.pieces:
            if sequence not in self._running:
                continue
            sequence.computed_tokens += computed
            if sequence.uncomputed_tokens == 0:
                tokens.append(sequence.take_token(work.ends_s))
                finished.extend(self._retired(sequence))
        return Step(
            load=self.load,
            tokens=tuple(tokens),
            finished=tuple(finished),
            admitted=work.admitted,
            preemptions=work.preemptions,
            failed=len(work.lost),
            lost=work.lost,
            prefill_tokens=prefill_tokens,
            began_s=work.begins_s,
            ended_s=work.ends_s,
            times=work.times,
            **self._hardware_work(prefill_tokens, len(tokens), work.times),
        )

    def _hardware_work(self, prefilled: int, decoded: int, times: int) -> dict[str, float]:
        gpu = self._scenario.gpu
        if gpu is None:
            return {}
        computed = prefilled + decoded
        read_bytes = gpu.weight_bytes + gpu.kv_bytes_per_token * self._kv.held_tokens
        return {
            "flops": 2 * gpu.parameters * computed * times,
            "read_bytes": read_bytes * times,
            "written_bytes": gpu.kv_bytes_per_token * computed * times,
        }

    def run(self, start_s: float, until_s: float) -> Step:
        """The step of `start_s`, together with the equal ones after it that start by `until_s`.

        Until a request arrives or ends, all steps of a batch that only decodes are equal.
        """
        work = self.begin(start_s)
        step_s = work.ends_s - start_s
        times = self._equal_steps(work, step_s, until_s)
        for sequence, _ in work.pieces if times > 1 else ():
            sequence.skip(times - 1, step_s)
            self._kv.hold(sequence)
        last_s = start_s + (times - 1) * step_s
        return self.end(replace(work, begins_s=last_s, ends_s=last_s + step_s, times=times))

    def _equal_steps(self, work: StepWork, step_s: float, until_s: float) -> int:
        sequences = [sequence for sequence, _ in work.pieces]
        if self._waiting or not sequences or not all(each.decodes for each in sequences):
            return 1
        until_s = min(until_s, self._next_planned.arrived_s if self._next_planned else math.inf)
        in_time = math.ceil((until_s - work.begins_s) / step_s)
        times = max(1, min(in_time, *(each.tokens_left for each in sequences)))
        return 1 if self._kv.missing(sequences, times - 1) else times

    def drop_all(self) -> tuple[EngineRequest, ...]:
        """Lose every request, as an engine that dies."""
        lost = [each.request for queue in (self._running, self._waiting) for each in queue]
        for sequence in (*self._running, *self._waiting):
            self._kv.release(sequence)
        self._running, self._waiting = [], []
        return tuple(lost)

    def end_plan(self, at_s: float) -> None:
        """Take no planned requests that arrive from now on; others send them."""
        self._planned = iter([*self._planned_before(at_s)])
        self._next_planned = next(self._planned, None)

    def _planned_before(self, at_s: float) -> Iterator[EngineRequest]:
        while self._next_planned is not None and self._next_planned.arrived_s < at_s:
            yield self._next_planned
            self._next_planned = next(self._planned, None)

    def skip_planned(self, until_s: float) -> None:
        """Leave out planned requests that arrive before `until_s`."""
        while self._next_planned is not None and self._next_planned.arrived_s < until_s:
            self._next_planned = next(self._planned, None)

    def _queue(self, sequence: Sequence) -> None:
        insort(self._waiting, sequence, key=lambda waiting: waiting.request.ready_s)

    def _take_planned(self, at_s: float) -> tuple[EngineRequest, ...]:
        """Queue the planned requests that have arrived; returns those that fail instead."""
        failed = []
        while self._next_planned is not None and self._next_planned.arrived_s <= at_s:
            if self._next_planned.fails:
                failed.append(self._next_planned)
            else:
                self.submit(self._next_planned)
            self._next_planned = next(self._planned, None)
        return tuple(failed)

    def _make_room(self) -> int:
        """Reserve blocks for the next token of each request; returns the number of preemptions."""
        preemptions = 0
        for sequence in tuple(self._running):
            while sequence in self._running and not self._kv.hold(sequence):
                self._preempt(self._running[-1])
                preemptions += 1
        return preemptions

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._kv.release(sequence)
        sequence.computed_tokens = 0
        sequence.preemptions += 1
        self._queue(sequence)

    def _admit(self, at_s: float, slots: float) -> Iterator[EngineRequest]:
        """Fill the batch from the queue; yields requests that are scheduled for the first time."""
        while self._waiting and len(self._running) < slots:
            sequence = self._waiting[0]
            if sequence.request.ready_s > at_s or not self._kv.hold(sequence):
                return
            self._running.append(self._waiting.pop(0))
            if sequence.scheduled_s is None:
                sequence.scheduled_s = at_s
                sequence.computed_tokens = sequence.request.cached_tokens
                yield sequence.request

    def _pieces(self) -> Iterator[tuple[Sequence, int]]:
        budget = self._scenario.max_num_batched_tokens
        budget -= sum(sequence.decodes for sequence in self._running)
        for sequence in self._running:
            if sequence.decodes:
                yield sequence, 1
            elif budget:
                piece = min(sequence.uncomputed_tokens, budget)
                budget -= piece
                yield sequence, piece

    def _retired(self, sequence: Sequence) -> Iterator[Finished]:
        """Remove a request that is complete, or whose client leaves after this token."""
        request = sequence.request
        if sequence.generated_tokens in (request.output_tokens, request.leaves_after_tokens):
            self._running.remove(sequence)
            self._kv.release(sequence)
            if sequence.generated_tokens == request.output_tokens:
                yield sequence.finished()
