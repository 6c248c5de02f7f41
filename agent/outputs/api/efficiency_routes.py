"""The API route `/efficiency`: use and cost of the GPUs by step, from the booked minutes."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import Field

from agent.outputs.api.base_response import BaseResponse
from agent.outputs.api.efficiency_response import (
    CostResponse,
    EfficiencyResponse,
    ReadMinutes,
    efficiency_and_cost_of,
)
from agent.outputs.api.query_parameters import (
    StepText,
    WindowText,
    selection,
    step_s,
    window_before,
    window_s,
)
from agent.outputs.api.responses import ListOf
from agent.records.minute import BOOK_EVERY_S, MinuteRow
from agent.records.queries import Selection, Window


class EfficiencyStepResponse(BaseResponse):
    """The booked minutes that began in a step, which starts at `at`."""

    at: datetime
    mfu: float | None = Field(description="of the requests, over all counted time")
    mbu: float | None = Field(description="of the requests, over all counted time")
    efficiency: EfficiencyResponse
    cost: CostResponse | None = Field(description="null without a price")


def efficiency_routes(
    minutes: ReadMinutes,
    now: Callable[[], float],
    grid_s: Callable[[float], int],
    longest_s: float,
) -> APIRouter:
    """The route, in windows of up to `longest_s`."""
    router = APIRouter(tags=["figures"])

    @router.get("/efficiency")
    def efficiency(
        chosen: Annotated[Selection, Depends(selection)],
        window: WindowText = "1h",
        step: StepText = "1m",
    ) -> ListOf[EfficiencyStepResponse]:
        """MFU, MBU and cost by step; steps without a booked minute are left out.

        Empty for one tenant or objective: GPUs work for all requests at once.
        """
        length_s = window_s(window, longest_s)
        each_s = step_s(step, length_s, max(grid_s(length_s), BOOK_EVERY_S))
        if chosen.tenant is not None or chosen.objective is not None:
            return ListOf[EfficiencyStepResponse](items=[])
        over = window_before(now(), length_s, each_s)
        return ListOf[EfficiencyStepResponse](
            items=list(_steps(minutes(over, chosen, each_s), over, each_s))
        )

    return router


def _steps(
    minutes: Sequence[MinuteRow], over: Window, step_s: int
) -> Iterator[EfficiencyStepResponse]:
    by_step: defaultdict[int, list[MinuteRow]] = defaultdict(list)
    for minute in minutes:
        since_begin = max(minute.starts_at - over.from_s, 0)
        by_step[over.from_s + since_begin // step_s * step_s].append(minute)
    for start in sorted(by_step):
        figures = efficiency_and_cost_of(by_step[start])
        if figures:
            yield EfficiencyStepResponse(at=datetime.fromtimestamp(start, UTC), **figures)
