"""Steps of which it is not certain yet which tokens of prompts they computed.

Unless it logs iteration details, vLLM counts all tokens of a prompt in the last of its steps. It
computes a long prompt in pieces: each fills up its step, and they follow one another.
"""

from typing import NamedTuple

from agent.analysis.causes.activity import Slice
from agent.analysis.causes.step_costs import FREE_TOKENS, Costs

# A step may take so many times its usual time by chance.
_LONGER = 1.15
# A step that had time for a smaller part of its most tokens has no piece.
_PIECE = 0.5
# From this part of its most tokens on, a step is full.
_FULL = 0.95
# No prompt has more pieces.
_MOST = 512


class CertainStep(NamedTuple):
    """A step as the engine counted it, and with the tokens that it computed."""

    counted: Slice
    done: Slice


class OpenSteps:
    """The newest steps, until it is certain what they computed. Add in the order of time."""

    def __init__(self) -> None:
        self._open: list[CertainStep] = []
        # Tokens of a prompt whose next piece is in the next step.
        self._before = 0.0

    def continued(self, step: Slice, budget: float) -> Slice:
        """A step whose own tokens are counted, with their products.

        A step that is full goes on with its last prompt in the next one.
        """
        tokens, before = step.prefill_tokens, self._before
        is_full = tokens + step.decode_tokens >= _FULL * budget
        self._before = before + tokens if is_full else 0.0
        return _with_piece(step._replace(prefill_tokens=0.0), tokens, before)

    def add(self, step: Slice, budget: float, costs: Costs | None) -> list[CertainStep]:
        """Add a step; return those that are certain now, the oldest first.

        `budget` is how many tokens a step may have, `costs` are what steps usually take.
        """
        self._open.append(CertainStep(step, step))
        if step.prefill_tokens:
            self._split(budget, costs)
            # The newest step may also have the first piece of the next prompt.
            return self._certain(len(self._open) - 1)
        return self._certain(0 if _piece(step, budget, costs) else len(self._open))

    def _certain(self, number: int) -> list[CertainStep]:
        number = max(number, len(self._open) - _MOST)
        certain, self._open = self._open[:number], self._open[number:]
        return certain

    def _split(self, budget: float, costs: Costs | None) -> None:
        """Move tokens of the newest step to those before it.

        A prompt fills up all of its steps but the last. What is left, the newest step needs room
        and time for.
        """
        newest = self._open[-1].done
        own, tokens = newest._replace(prefill_tokens=0.0), newest.prefill_tokens
        most = min(budget - own.decode_tokens, _in_time(own, costs, _LONGER))
        pieces = list[float]()
        for _, done in reversed(self._open[:-1]):
            piece = _piece(done, budget, costs)
            if piece >= tokens:
                piece = tokens - most
            if piece <= 0:
                break
            pieces.append(piece)
            tokens -= piece
        self._open[-1] = self._open[-1]._replace(done=own)
        before, first = 0.0, len(self._open) - 1 - len(pieces)
        for index, piece in enumerate((*reversed(pieces), tokens), first):
            counted, done = self._open[index]
            self._open[index] = CertainStep(counted, _with_piece(done, piece, before))
            before += piece


def _with_piece(step: Slice, tokens: float, before: float) -> Slice:
    """The step with more tokens of a prompt, of which so many were computed before."""
    return step._replace(
        prefill_tokens=step.prefill_tokens + tokens,
        products=step.products + tokens * (before + tokens / 2),
    )


def _piece(step: Slice, budget: float, costs: Costs | None) -> float:
    """The tokens of a piece in a step that is not the last of its prompt; 0 without a piece.

    It fills up the step. A step that had time for less than _PIECE of that has none.
    """
    room = max(0.0, budget - step.decode_tokens - step.prefill_tokens)
    return room if _in_time(step, costs) >= _PIECE * room else 0.0


def _in_time(step: Slice, costs: Costs | None, longer: float = 1.0) -> float:
    """How many tokens of prompts a step had time for beside those that are known.

    `longer` is how many times its usual time it may have taken.
    """
    if costs is None or not step.busy_s:
        return float("inf")
    took_s = step.busy_s * longer - costs.step_s - step.decode_tokens * costs.token_s
    took_s -= step.products * costs.product_s
    token_s, few_s = costs.prompt_token_s, FREE_TOKENS * costs.prompt_token_s
    tokens = took_s / token_s if token_s and took_s <= few_s else 0.0
    if took_s > few_s:
        token_s += costs.large_token_s
        tokens = FREE_TOKENS + (took_s - few_s) / token_s if token_s else float("inf")
    return max(0.0, tokens - step.prefill_tokens)
