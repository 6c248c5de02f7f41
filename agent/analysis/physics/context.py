"""How many tokens a token attends to, and how many the KV cache stores."""

from agent.records.model import Reach


def attended_pairs(new: int, cached: int, window: int | None, reach: Reach = Reach.WINDOW) -> int:
    """Pairs of a query token and a token that it attends to, itself included.

    Of `new` consecutive tokens after `cached` ones, causally, no further than the window lets it.
    The sum over consecutive pieces equals that of the whole.
    """
    if window is None:
        return new * cached + new * (new + 1) // 2
    if reach is Reach.CHUNK:
        return _pairs_in_chunks(cached + new, window) - _pairs_in_chunks(cached, window)
    growing = min(max(window - cached, 0), new)
    return growing * cached + growing * (growing + 1) // 2 + (new - growing) * window


def _pairs_in_chunks(tokens: int, size: int) -> int:
    """Pairs of the first tokens, each with those before it in its chunk."""
    whole, rest = divmod(tokens, size)
    return whole * size * (size + 1) // 2 + rest * (rest + 1) // 2


def cached_tokens(context: int, window: int | None, reach: Reach = Reach.WINDOW) -> int:
    """How many tokens of a context a layer's KV cache stores."""
    if window is None or reach is Reach.SELECTION:
        return context
    if reach is Reach.CHUNK:
        return (context - 1) % window + 1 if context else 0
    return min(context, window)
