"""What the steps of an engine take, learned by least squares from its past, and what they took."""

from collections import deque
from typing import NamedTuple

import numpy as np

# The last hour is learned from, in slots of this length.
_SLOT_S = 5.0
_MEMORY_S = 3600.0
# The newest minute may be the one in which something changed, or half of what is known.
_NEWEST_S = 60.0
# With fewer observations nothing is known.
_ENOUGH = 8
# An observation that is off by more than this share counts less, so that faults teach little.
_OFF = 0.3
# Keeps costs finite that the observations do not tell apart; as a share of their squares.
_RIDGE = 1e-4
# Attention takes a smaller part than this of a token's time for each token before it: some 1/6 of
# the hidden size's inverse, if a layer has 12 weights for each of its square.
_MOST_OF_TOKEN = 1 / 5_000


# While a step has few tokens, it takes as long as it takes to read the weights, and its prompt
# tokens cost little. GPUs compute as long as they read at some 150 to 400 tokens.
FREE_TOKENS = 256


def beyond_free(tokens: float, budget: float | None) -> float:
    """The tokens of a prompt beyond the first FREE_TOKENS of each of its steps.

    `budget` is how many tokens a step may have; None if that is unknown.
    """
    steps = 1.0 if not budget else max(1.0, -(-tokens // budget))
    return max(0.0, tokens - steps * FREE_TOKENS)


class ComputedWork(NamedTuple):
    """What steps computed: how many steps, generated tokens, prompt tokens and prompts.

    `large_tokens` are prompt tokens beyond the first FREE_TOKENS of a step. `products` are each
    prompt token times the prompt before it, which attention reads. `seconds` is how long the steps
    took.
    """

    steps: float
    tokens: float
    prompt_tokens: float
    prompts: float
    large_tokens: float
    products: float
    seconds: float


class Costs(NamedTuple):
    """The seconds of a step, of each token, prompt token and prompt in it, how much more each of
    many prompt tokens takes, and how much more for each token before it."""

    step_s: float
    token_s: float
    prompt_token_s: float
    prompt_s: float
    large_token_s: float
    product_s: float

    def of(self, work: ComputedWork) -> float:
        """The seconds that the work usually takes."""
        return work.steps * self.step_s + work.tokens * self.token_s + self.of_prompts(work)

    def of_prompts(self, work: ComputedWork) -> float:
        """The seconds that its prompts make steps longer."""
        tokens_s = work.prompt_tokens * self.prompt_token_s + work.prompts * self.prompt_s
        tokens_s += work.large_tokens * self.large_token_s
        return tokens_s + work.products * self.product_s


class _Slot(NamedTuple):
    number: int
    sums: list[float]


class StepCosts:
    """Learns Costs from work, the newest minute not yet."""

    def __init__(self) -> None:
        self._slots: deque[_Slot] = deque()
        # Sums of the slots that count: products of each two figures, and how many.
        self._sums = [0.0] * (len(_PAIRS) + 1)
        self._learned: deque[_Slot] = deque()
        self._first_at: float | None = None
        self._costs: Costs | None = None

    @property
    def costs(self) -> Costs | None:
        """What steps usually take; None until enough is known."""
        return self._costs

    def learn(self, at: float, work: ComputedWork) -> None:
        """Learn from work that was done at a Unix time."""
        if work.seconds <= 0 or work.steps <= 0:
            return
        if self._first_at is None:
            self._first_at = at
        number = int(at // _SLOT_S)
        if not self._slots or number > self._slots[-1].number:
            self._slots.append(_Slot(number, [0.0] * (len(_PAIRS) + 1)))
            self._settle(at)
        weight = self._weight(work) / work.steps
        sums = self._slots[-1].sums
        for index, (row, column) in enumerate(_PAIRS):
            sums[index] += weight * work[row] * work[column]
        sums[-1] += 1

    def _weight(self, work: ComputedWork) -> float:
        if self._costs is None:
            return 1.0
        usual_s = self._costs.of(work)
        off_s = abs(work.seconds - usual_s)
        return 1.0 if off_s <= _OFF * usual_s else _OFF * usual_s / off_s

    def _settle(self, now: float) -> None:
        """Count the slots that are old enough, and drop those that are too old."""
        newest_s = min(_NEWEST_S, (now - (self._first_at or now)) / 2)
        until, since = (now - newest_s) // _SLOT_S, (now - _MEMORY_S) // _SLOT_S
        before = len(self._learned)
        while self._slots and self._slots[0].number < until:
            self._learned.append(self._slots.popleft())
            self._add(self._learned[-1], 1)
        changed = len(self._learned) > before
        while self._learned and self._learned[0].number < since:
            self._add(self._learned.popleft(), -1)
        if changed and self._sums[-1] >= _ENOUGH:
            self._costs = _solved(self._sums)

    def _add(self, slot: _Slot, sign: int) -> None:
        self._sums = [
            known + sign * each for known, each in zip(self._sums, slot.sums, strict=True)
        ]


# The figures of ComputedWork whose products are summed up: the last is explained by the others.
_EXPLAINED = len(ComputedWork._fields) - 1
_EXPLAINING = range(_EXPLAINED)
_PAIRS = tuple(
    [(row, column) for row in _EXPLAINING for column in _EXPLAINING if column <= row]
    + [(row, _EXPLAINED) for row in _EXPLAINING]
)


def _solved(sums: list[float]) -> Costs | None:
    """The costs of least squares, none of them below 0."""
    squares, products = np.zeros((_EXPLAINED, _EXPLAINED)), np.zeros(_EXPLAINED)
    for (row, column), value in zip(_PAIRS, sums, strict=False):
        if column == _EXPLAINED:
            products[row] = value
        else:
            squares[row, column] = squares[column, row] = value
    squares += np.diag(_RIDGE * squares.diagonal())
    used = [index for index in _EXPLAINING if squares[index, index] > 0]
    while used:
        found = np.linalg.solve(squares[np.ix_(used, used)], products[used])
        costs = np.zeros(_EXPLAINED)
        costs[used] = found
        known = Costs(*costs.tolist())
        if found.min() < 0:
            del used[int(found.argmin())]
        elif known.product_s > _MOST_OF_TOKEN * (known.prompt_token_s + known.large_token_s):
            used.remove(Costs._fields.index("product_s"))
        else:
            return known
    return None
