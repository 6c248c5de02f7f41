"""The route of prefill and decode pools, by what their engines count themselves."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from pydantic import Field

from agent.analysis.efficiency.work import Role
from agent.analysis.pools import EngineKey, ModelPools, Pool, pools_by_model
from agent.outputs.api.api_context import ApiContext, ApiQueries
from agent.outputs.api.base_responses import BaseResponse, ListOf
from agent.outputs.api.figure_routes import Chosen, LastMinutes
from agent.records.minute import MINUTE_LENGTH_S


class PoolResponse(BaseResponse):
    """The engines of one role, as they counted themselves. Null is what no engine counts."""

    role: Role
    engines: Sequence[str]
    running: float | None = Field(description="mean of requests in all batches together")
    waiting: float | None = Field(
        description="mean of requests for which an engine lacks capacity, not of those that wait "
        "for KV values"
    )
    load: float | None = Field(description="1 if nobody waits, 2 if as many wait as run")
    queue_s: float | None = Field(
        description="mean wait of a request; of a decode engine, for KV values too"
    )
    input_tokens_per_s: float | None
    output_tokens_per_s: float | None
    kv_cache_usage: float | None = Field(description="of the fullest engine, 0 to 1")
    preemptions: float | None
    transfer_bytes_per_s: float | None = Field(description="by NIXL or Mooncake")
    transfer_s: float | None = Field(description="mean time of one transfer")
    transfers_failed: float | None


class ModelPoolsResponse(BaseResponse):
    """The pools of one model."""

    model: str | None
    pools: Sequence[PoolResponse]
    load_ratio: float | None = Field(description="load of prefill / load of decode")
    grow: Role | None = Field(
        description="the pool in which more than 2 requests wait in each engine, while less than "
        "1 waits in those of the other pool; null without such a one"
    )


def pool_routes(context: ApiContext) -> APIRouter:
    """The route of pools."""
    router = APIRouter(tags=["figures"])

    @router.get("/pools")
    def pools(chosen: Chosen, asked: LastMinutes) -> ListOf[ModelPoolsResponse]:
        """Prefill and decode pools of each model in whole minutes of the window.

        An engine is in a pool by its `role` in the settings. All tenants and objectives count.
        """

        def found(queries: ApiQueries) -> Sequence[ModelPools]:
            over = asked.over(
                context.now(),
                context.longest_window_s,
                lambda age_s: max(queries.grid_s(age_s), MINUTE_LENGTH_S),
            )
            return pools_by_model(queries.engine_counts(over, chosen), _roles(context.engines()))

        return ListOf[ModelPoolsResponse](
            items=[_response(each) for each in context.read(found)], next=None
        )

    return router


# A newer agent may have further ones.
_ROLES = frozenset(Role)


def _roles(engines: Sequence[Mapping[str, Any]]) -> Mapping[EngineKey, Role]:
    known = ((row["agent"], row["name"], row.get("role")) for row in engines)
    return {(agent, name): Role(role) for agent, name, role in known if role in _ROLES}


def _response(found: ModelPools) -> ModelPoolsResponse:
    return ModelPoolsResponse(
        model=found.model,
        pools=[_pool(each) for each in found.pools],
        load_ratio=found.load_ratio,
        grow=found.grow,
    )


def _pool(pool: Pool) -> PoolResponse:
    figures, queue = pool.figures, pool.figures.latencies.get("queue")
    moved = pool.transfer_bytes
    return PoolResponse(
        role=pool.role,
        engines=pool.engines,
        running=figures.running,
        waiting=pool.waiting,
        load=pool.load,
        queue_s=None if queue is None else queue.mean_ms / 1000,
        input_tokens_per_s=figures.input_tokens_per_s,
        output_tokens_per_s=figures.output_tokens_per_s,
        kv_cache_usage=figures.kv_cache_usage,
        preemptions=figures.preemptions,
        transfer_bytes_per_s=None if moved is None else moved / figures.covered_s,
        transfer_s=pool.transfer_s,
        transfers_failed=pool.transfers_failed,
    )
