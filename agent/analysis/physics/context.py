"""How many tokens a token attends to, and how many the KV cache stores."""


def attended_pairs(new: int, cached: int, window: int | None) -> int:
    """Pairs of a query token and a token that it attends to, itself included.

    Of `new` consecutive tokens after `cached` ones, causally, no further back than the sliding
    window. The sum over consecutive pieces equals that of the whole.
    """
    if window is None:
        return new * cached + new * (new + 1) // 2
    growing = min(max(window - cached, 0), new)
    return growing * cached + growing * (growing + 1) // 2 + (new - growing) * window


def cached_tokens(context: int, window: int | None) -> int:
    """How many tokens of a context a layer's KV cache stores."""
    return context if window is None else min(context, window)
