"""Arrays with a figure of each of many things, and the requests of a minute as such columns."""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.records.minute import LONGEST_REQUEST_S
from agent.records.request import Status, Vantage

Array = NDArray[np.float64]
Integers = NDArray[np.signedinteger[Any]]
Mask = NDArray[np.bool_]


def over(part: NDArray[Any], whole: NDArray[Any]) -> Array:
    """The quotients; 0 if nothing is divided by."""
    found: Array = np.divide(part, whole, out=np.zeros(np.shape(whole)), where=whole > 0)
    return found


STATUSES, VANTAGES = tuple(Status), tuple(Vantage)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MinuteRequests:
    """The requests of a minute; each column has a value for each. Unknown numbers are NaN.

    - `rows` are the ids of their rows, in order.
    - `statuses` and `vantages` are indices into STATUSES and VANTAGES, `verdicts` into
      `met_objectives`: the names of the objectives that a request met. `met` are the requests that
      met all of theirs.
    - `one_prompt`: the route takes a single prompt. `priced`: stored minutes charged it before.
    """

    rows: Integers
    vantages: Integers
    statuses: Integers
    started_at: Array
    ended_at: Array
    ttft_s: Array
    queue_s: Array
    prefill_s: Array
    decode_s: Array
    input_tokens: Array
    cached_tokens: Array
    output_tokens: Array
    choices: Array
    aborted: Mask
    one_prompt: Mask
    priced: Mask
    met: Mask
    verdicts: Integers
    met_objectives: tuple[tuple[str, ...], ...]

    @property
    def from_at(self) -> Array:
        """From when on minutes count each request, in Unix seconds."""
        found: Array = np.maximum(self.started_at, self.ended_at - LONGEST_REQUEST_S)
        return found

    @property
    def succeeded(self) -> Mask:
        """Whether each request ended well."""
        return self.have(Status.OK) & ~self.aborted

    def have(self, *statuses: Status) -> Mask:
        """Whether each request has one of these statuses."""
        return np.isin(self.statuses, [STATUSES.index(status) for status in statuses])

    def indices_of(self, rows: Integers) -> Integers:
        """The indices of the requests with these row ids."""
        return np.searchsorted(self.rows, rows)

    def chosen(self, which: Mask | Integers) -> "MinuteRequests":
        """A part of the requests."""
        columns = [each.name for each in fields(self) if each.name != "met_objectives"]
        return replace(self, **{name: getattr(self, name)[which] for name in columns})
