"""What became of requests that were handed to the store."""

from typing import NamedTuple

from agent.records.objective import JudgedRequest


class Written(NamedTuple):
    """`new` were not stored before; `counted` are the requests that are counted by this.

    What waits for another view is new and not counted yet. What is joined is counted as one
    request, which is neither of its two views.
    """

    new: list[JudgedRequest]
    counted: list[JudgedRequest]
