"""Sentences of evidence that several rules use."""

import numpy as np

from agent.analysis.causes.periods import MissedHits, Period, Prompts

# At most this many of the largest prompts are named.
_NAMED = 3
_SOURCES = {"plugin": "by its plugin", "samples": "by its samples", None: "source unknown"}


def source_text(period: Period) -> str:
    """The source of a period's figures."""
    return _SOURCES[period.source]


def prompts_text(prompts: Prompts) -> str:
    """How many prompts of other requests were prefilled, with how many tokens."""
    largest = np.sort(prompts.sizes)[-_NAMED - 1 :].tolist()
    if prompts.own in largest:
        largest.remove(prompts.own)
    named = ", ".join([f"{size:,}" for size in largest[: -_NAMED - 1 : -1]])
    many = f"{prompts.many} prompts" if prompts.many > 1 else "1 prompt"
    return (
        f"{many} of other requests with {prompts.tokens:,} computed tokens were prefilled "
        f"meanwhile, the largest of {named} tokens (by their rows)"
    )


def missed_text(missed: MissedHits) -> str:
    """The share of prompt tokens that the prefix cache had, and usually has."""
    return (
        f"the prefix cache had {missed.now:.0%} of the looked-up prompt tokens, usually "
        f"{missed.usual:.0%} (by the engine's samples)"
    )


def seconds(value_s: float) -> str:
    """A duration in a readable unit."""
    return f"{1000 * value_s:.3g} ms" if abs(value_s) < 1 else f"{value_s:.3g} s"
