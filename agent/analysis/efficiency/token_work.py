"""Tokens with the work that they are: of one thing, or in columns of many."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from agent.records.columns import Array, Mask, Places


class TokenWork(NamedTuple):
    """Tokens with their FLOPs and bytes of KV cache, which are 0 where the model is unknown."""

    tokens: float = 0.0
    flops: float = 0.0
    kv_bytes: float = 0.0

    def times(self, factor: float) -> "TokenWork":
        """This work, multiplied by a factor."""
        return TokenWork(*[value * factor for value in self])

    def plus(self, other: "TokenWork") -> "TokenWork":
        """The sum of both."""
        return TokenWork(*[mine + yours for mine, yours in zip(self, other, strict=True)])


class TokenWorks(NamedTuple):
    """The work of many requests: one value for each."""

    tokens: Array
    flops: Array
    kv_bytes: Array

    @classmethod
    def none(cls, count: int) -> "TokenWorks":
        """No work for each of `count` requests."""
        return cls(*np.zeros((3, count)))

    @classmethod
    def of(cls, works: Sequence[TokenWork]) -> "TokenWorks":
        """The work of each."""
        return cls(*np.array(works, dtype=np.float64).reshape(-1, 3).T)

    def times(self, factors: Array) -> "TokenWorks":
        """The work of each request, multiplied by its factor."""
        return TokenWorks(*[values * factors for values in self])

    def plus(self, other: "TokenWorks") -> "TokenWorks":
        """The sums of both."""
        return TokenWorks(*[mine + yours for mine, yours in zip(self, other, strict=True)])

    def where(self, some: Mask) -> "TokenWorks":
        """The work of the requests in `some`, and none for the others."""
        return TokenWorks(*[np.where(some, values, 0.0) for values in self])

    def chosen(self, which: Mask | Places) -> "TokenWorks":
        """Some of them."""
        return TokenWorks(*[values[which] for values in self])

    def total(self) -> TokenWork:
        """The sum."""
        return TokenWork(*[float(values.sum()) for values in self])
