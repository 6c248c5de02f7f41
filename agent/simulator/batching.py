"""A model of vLLM's continuous batching, in simulated time without a clock.

In each step a request computes a piece of its prompt, within the token budget, or generates a token
once its prompt is computed. Requests are scheduled in the order of their arrival. When the KV cache
is full, the request that was scheduled last frees its blocks and starts over later (preemption by
recomputation).
"""

import math
from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from agent.simulator.engine_steps import BatchLoad, EngineRequest, Finished, Step, Token
from agent.simulator.faults import Faults
from agent.simulator.scenario import Fault, KvCache, Scenario

# Time until a blocked engine tries again.
_BLOCKED_S = 0.01


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request inside the engine. `computed_tokens` have their keys and values in the cache."""

    request: EngineRequest
    computed_tokens: int = 0
    generated_tokens: int = 0
    kv_blocks: int = 0
    preemptions: int = 0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None

    @property
    def known_tokens(self) -> int:
        return self.request.prompt_tokens + self.generated_tokens

    @property
    def uncomputed_tokens(self) -> int:
        return self.known_tokens - self.computed_tokens

    @property
    def decodes(self) -> bool:
        return self.generated_tokens > 0 and self.uncomputed_tokens == 1

    def take_token(self, at_s: float) -> Token:
        since_s = self.request.arrived_s if self.last_token_s is None else self.last_token_s
        self.first_token_s = at_s if self.first_token_s is None else self.first_token_s
        self.last_token_s = at_s
        self.generated_tokens += 1
        return Token(request=self.request, position=self.generated_tokens, waited_s=at_s - since_s)

    def finished(self) -> Finished:
        assert self.scheduled_s is not None
        assert self.first_token_s is not None
        assert self.last_token_s is not None
        return Finished(
            request=self.request,
            scheduled_s=self.scheduled_s,
            first_token_s=self.first_token_s,
            last_token_s=self.last_token_s,
            preemptions=self.preemptions,
        )


class _KvBlocks:
    """The blocks of the KV cache, and the sequences that hold them."""

    def __init__(self, size: KvCache) -> None:
        self._size = size
        self._free = size.blocks
        self._taken = 0

    @property
    def usage(self) -> float:
        return min(1.0, 1 - (self._free - self._taken) / self._size.blocks)

    def take(self, share: float) -> None:
        """Reserve this share of all blocks for a fault."""
        self._taken = math.floor(share * self._size.blocks)

    def hold(self, sequence: _Sequence) -> bool:
        """Reserve blocks for all known tokens of a sequence; False if too few are free."""
        missing = math.ceil(sequence.known_tokens / self._size.block_tokens) - sequence.kv_blocks
        if missing > 0 and missing > self._free - self._taken:
            return False
        self._free -= missing
        sequence.kv_blocks += missing
        return True

    def release(self, sequence: _Sequence) -> None:
        self._free += sequence.kv_blocks
        sequence.kv_blocks = 0


Pieces = tuple[tuple[_Sequence, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """A step that runs: the tokens of each sequence, and the end of the step."""

    begins_s: float
    ends_s: float
    pieces: Pieces
    admitted: tuple[EngineRequest, ...] = ()
    preemptions: int = 0
    failed: int = 0


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
        self._kv = _KvBlocks(scenario.kv_cache)
        self._planned = iter(planned)
        self._next_planned = next(self._planned, None)
        self._waiting: list[_Sequence] = []
        self._running: list[_Sequence] = []
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
        self._queue(_Sequence(request))

    def abort(self, request: EngineRequest) -> bool:
        """Remove a request whose client left; False if the engine does not have it."""
        for place in (self._running, self._waiting):
            for sequence in place:
                if sequence.request is request:
                    place.remove(sequence)
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
        failed = self._take_planned(at_s)
        preemptions = self._make_room()
        places = min(self._scenario.max_num_seqs, fault.max_num_seqs or math.inf)
        admitted = tuple(self._admit(at_s, places))
        pieces = tuple(self._pieces())
        return StepWork(
            begins_s=at_s,
            ends_s=at_s + self._took_s(pieces, fault),
            pieces=pieces,
            admitted=admitted,
            preemptions=preemptions,
            failed=failed,
        )

    def _took_s(self, pieces: Pieces, fault: Fault) -> float:
        if not pieces and self._waiting:
            # Every request waits for blocks that a fault holds.
            return _BLOCKED_S
        prompt_tokens = sum(tokens for sequence, tokens in pieces if not sequence.decodes)
        decoding = sum(sequence.decodes for sequence, _ in pieces)
        took_s = self._scenario.prefill.duration_s(prompt_tokens) * fault.prefill_slowdown
        return (took_s + self._scenario.decode.duration_s(decoding)) * fault.step_slowdown

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
            failed=work.failed,
            prefill_tokens=prefill_tokens,
            began_s=work.begins_s,
            ended_s=work.ends_s,
        )

    def _queue(self, sequence: _Sequence) -> None:
        insort(self._waiting, sequence, key=lambda waiting: waiting.request.ready_s)

    def _take_planned(self, at_s: float) -> int:
        """Queue the planned requests that have arrived; returns how many fail instead."""
        failed = 0
        while self._next_planned is not None and self._next_planned.arrived_s <= at_s:
            if self._next_planned.fails:
                failed += 1
            else:
                self.submit(self._next_planned)
            self._next_planned = next(self._planned, None)
        return failed

    def _make_room(self) -> int:
        """Reserve blocks for the next token of each request; returns the number of preemptions."""
        preemptions = 0
        for sequence in tuple(self._running):
            while sequence in self._running and not self._kv.hold(sequence):
                self._preempt(self._running[-1])
                preemptions += 1
        return preemptions

    def _preempt(self, sequence: _Sequence) -> None:
        self._running.remove(sequence)
        self._kv.release(sequence)
        sequence.computed_tokens = 0
        sequence.preemptions += 1
        self._queue(sequence)

    def _admit(self, at_s: float, places: float) -> Iterator[EngineRequest]:
        """Fill the batch from the queue; yields requests that are scheduled for the first time."""
        while self._waiting and len(self._running) < places:
            sequence = self._waiting[0]
            if sequence.request.ready_s > at_s or not self._kv.hold(sequence):
                return
            self._running.append(self._waiting.pop(0))
            if sequence.scheduled_s is None:
                sequence.scheduled_s = at_s
                sequence.computed_tokens = sequence.request.cached_tokens
                yield sequence.request

    def _pieces(self) -> Iterator[tuple[_Sequence, int]]:
        budget = self._scenario.max_num_batched_tokens
        budget -= sum(sequence.decodes for sequence in self._running)
        for sequence in self._running:
            if sequence.decodes:
                yield sequence, 1
            elif budget:
                piece = min(sequence.uncomputed_tokens, budget)
                budget -= piece
                yield sequence, piece

    def _retired(self, sequence: _Sequence) -> Iterator[Finished]:
        """Remove a request that is complete, or whose client leaves after this token."""
        request = sequence.request
        if sequence.generated_tokens in (request.output_tokens, request.leaves_after_tokens):
            self._running.remove(sequence)
            self._kv.release(sequence)
            if sequence.generated_tokens == request.output_tokens:
                yield sequence.finished()
