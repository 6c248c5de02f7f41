"""Columns: arrays with a figure, a place or a mark of each of many things."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Places = NDArray[np.signedinteger[Any]]
Mask = NDArray[np.bool_]


def over(part: NDArray[Any], whole: NDArray[Any]) -> Array:
    """The quotients; 0 where nothing is divided by."""
    found: Array = np.divide(part, whole, out=np.zeros(np.shape(whole)), where=whole > 0)
    return found
