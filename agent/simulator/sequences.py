"""The requests inside a batch, and the blocks of the KV cache that they hold."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from agent.simulator.engine_steps import EngineRequest, Finished, Token
from agent.simulator.scenario import KvCache

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
