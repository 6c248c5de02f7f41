"""The result of writing a batch of requests."""

from collections.abc import Sequence
from typing import NamedTuple

from agent.records.objective import JudgedRequest


class WriteResult(NamedTuple):
    """`new` were not stored before; `counted` are counted from this write on.

    A request that waits for its other view is new and not counted yet. A joined request is counted
    once, as a record of its own. `refused` can never be stored: the database takes others, but not
    these.
    """

    new: list[JudgedRequest]
    counted: list[JudgedRequest]
    refused: Sequence[JudgedRequest] = ()
