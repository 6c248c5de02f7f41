"""Why our count, the engine's own and the hardware's may tell different figures of one window."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

from agent.analysis.efficiency.source_utilisation import Source, SourceUtilisation

# How much larger a figure may be than another, of which the larger is (`higher`, `lower`). What the
# requests needed at least cannot be more than what the hardware did.
MARGIN = 0.25
MARGINS = {(Source.REQUESTS, Source.HARDWARE): 0.05}

# Below this share of a peak the launch of kernels and the rounding of counters decide.
FLOOR = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What was seen in the window that can set figures apart."""

    drafts: bool = False
    preempted: bool = False
    unseen: bool = False
    long_prompts: bool = False
    experts: bool = False
    replicas: bool = False
    quantised: bool = False
    slow_clock: bool = False
    still_counters: bool = False


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A figure (`mfu` or `mbu`) that `higher` tells as so many times what `lower` does.

    `times` is None where `lower` tells 0. `causes` are likely first: those for which something was
    seen in the window, then those that leave no trace; `cause` is a short word for the first.
    """

    figure: str
    higher: Source
    lower: Source
    times: float | None
    cause: str
    causes: tuple[str, ...]


class _Cause(NamedTuple):
    """A short word and a sentence, and by what it shows; None where it leaves no trace."""

    word: str
    text: str
    shows: Callable[[Conditions], bool] | None = None


_R, _E, _H = Source.REQUESTS, Source.ENGINE, Source.HARDWARE

# After what vLLM's estimator does (vllm/v1/metrics/perf.py, 0.33), and what GPUs count.
_BEYOND_ROWS = (
    _Cause(
        "rejected_drafts",
        "drafted tokens that were rejected are work of no request",
        lambda signs: signs.drafts,
    ),
    _Cause("preemptions", "preempted requests were computed again", lambda signs: signs.preempted),
    _Cause(
        "requests_without_a_row",
        "requests without a row were at work: given up, refused, or still running",
        lambda signs: signs.unseen,
    ),
)
_SQUARE = _Cause(
    "masked_scores",
    "the engine counts attention to later tokens too, twice the scores of a long prompt",
    lambda signs: signs.long_prompts,
)
_OTHERS = _Cause(
    "padding_or_adapters", "the engine counts padding, or the work of adapters and encoders"
)
_ALL_EXPERTS = _Cause(
    "experts_counted_apart",
    "the engine takes each token to read experts of its own",
    lambda signs: signs.experts,
)
_ACTIVATIONS = _Cause(
    "activations", "the engine counts activations, which kernels mostly keep on the chip"
)
_GUESSED = _Cause(
    "guessed_weight_width",
    "the engine guesses the width of quantised weights from the method's name",
    lambda signs: signs.quantised,
)
_SPREAD = _Cause(
    "divided_by_ranks",
    "the engine divides the work of feed-forward layers by its data-parallel ranks",
    lambda signs: signs.replicas,
)
_DROPPED = _Cause(
    "part_of_the_model", "the engine leaves out a part of the model that its estimate cannot read"
)
_PADDING = _Cause(
    "padding_or_other_programs",
    "tiles and CUDA graphs are padded, other programs share the GPU, or its peak is a sparse one",
)
_REREADS = _Cause(
    "activations_or_other_programs",
    "activations and re-reads of the cache move bytes, or other programs do",
)
_CLOCK = _Cause(
    "slow_clock",
    "the clock was below its maximum, and readings caught it at another moment",
    lambda signs: signs.slow_clock,
)
_STILL = _Cause(
    "counters_stand_still",
    "the GPU's counters stand still: NVIDIA's profiling interface may need a restart",
    lambda signs: signs.still_counters,
)
_FEW_EXPERTS = _Cause(
    "fewer_experts",
    "fewer experts were read than if each token chose freely",
    lambda signs: signs.experts,
)
_L2 = _Cause("l2_cache", "the L2 cache served what we take to be read from memory")
_WRONG = _Cause(
    "wrong_configuration",
    "the model, its precision or the GPU's peak is not the one that is configured",
)

_CAUSES: Mapping[tuple[str, Source, Source], tuple[_Cause, ...]] = {
    ("mfu", _E, _R): (*_BEYOND_ROWS, _SQUARE, _OTHERS),
    ("mbu", _E, _R): (*_BEYOND_ROWS, _ALL_EXPERTS, _ACTIVATIONS),
    ("mfu", _H, _R): (*_BEYOND_ROWS, _PADDING),
    ("mbu", _H, _R): (*_BEYOND_ROWS, _REREADS),
    ("mfu", _R, _E): (_SPREAD, _DROPPED),
    ("mbu", _R, _E): (_GUESSED, _SPREAD, _DROPPED),
    ("mfu", _H, _E): (_SPREAD, _DROPPED),
    ("mbu", _H, _E): (_GUESSED, _SPREAD, _DROPPED),
    ("mfu", _R, _H): (_STILL, _CLOCK, _WRONG),
    ("mbu", _R, _H): (_STILL, _FEW_EXPERTS, _L2, _WRONG),
    ("mfu", _E, _H): (_STILL, _SQUARE, _WRONG),
    ("mbu", _E, _H): (_STILL, _ALL_EXPERTS, _ACTIVATIONS, _WRONG),
}


def disagreements(
    views: Sequence[SourceUtilisation], signs: Conditions
) -> tuple[Disagreement, ...]:
    """Each two views that differ by more than the margin on a figure that both tell."""
    return tuple(
        found
        for higher, lower in permutations(views, 2)
        for found in (
            *_compared("mfu", (higher.source, higher.mfu), (lower.source, lower.mfu), signs),
            *_compared("mbu", (higher.source, higher.mbu), (lower.source, lower.mbu), signs),
        )
    )


def _compared(
    figure: str,
    higher: tuple[Source, float | None],
    lower: tuple[Source, float | None],
    signs: Conditions,
) -> Iterator[Disagreement]:
    (more, high), (less, low) = higher, lower
    if high is None or low is None or high < FLOOR:
        return
    if high <= low * (1 + MARGINS.get((more, less), MARGIN)):
        return
    times = high / low if low > 0 else None
    likely = _likely(_CAUSES[figure, more, less], signs)
    texts = tuple(cause.text for cause in likely)
    yield Disagreement(figure, more, less, times, likely[0].word, texts)


def _likely(causes: Sequence[_Cause], signs: Conditions) -> list[_Cause]:
    shown = [cause for cause in causes if cause.shows is not None and cause.shows(signs)]
    return shown + [cause for cause in causes if cause.shows is None]
