"""How many tokens a token can look at."""


def attended_pairs(new: int, cached: int, window: int | None) -> int:
    """Pairs of a query token and a token that it attends to, itself included.

    Of `new` tokens in a row after `cached` ones, causally, none further back than the window. The
    sum over consecutive pieces is that of the whole.
    """
    if window is None:
        return new * cached + new * (new + 1) // 2
    growing = min(max(window - cached, 0), new)
    return growing * cached + growing * (growing + 1) // 2 + (new - growing) * window


def kept(context: int, window: int | None) -> int:
    """How many tokens of a context a layer's cache must keep."""
    return context if window is None else min(context, window)
