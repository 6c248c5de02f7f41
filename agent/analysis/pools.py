"""Pools of prefill and decode engines: their load by metrics alone, and which one to grow."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum

from agent.analysis.efficiency.work import Role
from agent.analysis.engine_counts import counted, total_counts
from agent.analysis.engine_figures import EngineFigures, figures_of_rows
from agent.catalog import engine_facts as fact
from agent.catalog.definitions import ROOM_POOL_QUEUE, SHORT_POOL_QUEUE
from agent.records.engine_counts import CountsRow, EngineCounts
from agent.records.gpu import FactKey

# An engine and its agent.
EngineKey = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The engines of one model and role in a window. What no engine counts is None.

    `waiting` counts the requests for which an engine lacks capacity, not those that wait for KV
    values. `load` is 1 if nobody waits, and 2 if as many wait as run. Transfers are counted where
    the connector counts them: NIXL at the receiver, Mooncake at the sender.
    """

    model: str | None
    role: Role
    engines: Sequence[str]
    figures: EngineFigures
    waiting: float | None
    transfer_bytes: float | None
    transfer_s: float | None
    transfers_failed: float | None

    @property
    def load(self) -> float | None:
        """Requests that run or wait, over those that run."""
        running = self.figures.running
        if self.waiting is None or not running:
            return None
        return (running + self.waiting) / running

    @property
    def waiting_per_engine(self) -> float | None:
        """The mean queue of one engine."""
        return None if self.waiting is None else self.waiting / len(self.engines)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPools:
    """The pools of one model, `load_ratio` of prefill to decode, and the pool to grow."""

    model: str | None
    pools: Sequence[Pool]
    load_ratio: float | None
    grow: Role | None


def pools_by_model(
    rows: Sequence[CountsRow], roles: Mapping[EngineKey, Role]
) -> Sequence[ModelPools]:
    """The pools of each model of which any engine has one of the two roles."""
    by_pool: defaultdict[tuple[str | None, Role], list[CountsRow]] = defaultdict(list)
    for row in rows:
        role = roles.get((row.agent, row.engine), Role.BOTH)
        if role is not Role.BOTH:
            by_pool[row.model, role].append(row)
    by_model: defaultdict[str | None, list[Pool]] = defaultdict(list)
    for (model, role), each in sorted(by_pool.items(), key=lambda item: str(item[0])):
        by_model[model].append(_pool(model, role, each))
    return [_of_model(model, pools) for model, pools in by_model.items()]


def _of_model(model: str | None, pools: Sequence[Pool]) -> ModelPools:
    by_role = {pool.role: pool for pool in pools}
    prefill, decode = by_role.get(Role.PREFILL), by_role.get(Role.DECODE)
    ratio = None
    if prefill is not None and decode is not None:
        loads = prefill.load, decode.load
        ratio = loads[0] / loads[1] if loads[0] is not None and loads[1] else None
    return ModelPools(model=model, pools=pools, load_ratio=ratio, grow=_to_grow(pools))


def _to_grow(pools: Sequence[Pool]) -> Role | None:
    """The pool in which requests wait while the other one has room; None without such a one."""
    queues = {pool.role: pool.waiting_per_engine for pool in pools}
    known = {role: queue for role, queue in queues.items() if queue is not None}
    if len(known) < 2:
        return None
    short, other = sorted(known, key=lambda role: known[role], reverse=True)
    return short if known[short] > SHORT_POOL_QUEUE and known[other] < ROOM_POOL_QUEUE else None


def _pool(model: str | None, role: Role, rows: Sequence[CountsRow]) -> Pool:
    figures = figures_of_rows(rows, ())
    by_engine: defaultdict[EngineKey, list[EngineCounts]] = defaultdict(list)
    for row in rows:
        by_engine[row.agent, row.engine].append(row.counts)
    each = [total for parts in by_engine.values() if (total := total_counts(parts)) is not None]
    counts = total_counts(each)
    assert figures is not None, "there are rows"
    assert counts is not None, "there are rows"
    transfers = counts.histograms.get(fact.KV_TRANSFER_TIME.name)
    return Pool(
        model=model,
        role=role,
        engines=sorted({name for _, name in by_engine}),
        figures=figures,
        waiting=_total([_waiting(one, figures.covered_s) for one in each]),
        transfer_bytes=counted(counts, fact.KV_TRANSFER_BYTES),
        transfer_s=transfers.sum / transfers.counts[-1]
        if transfers is not None and transfers.counts[-1]
        else None,
        transfers_failed=counted(counts, fact.KV_TRANSFERS_FAILED),
    )


_FOR_CAPACITY: FactKey = (fact.REQUESTS_WAITING_BY_REASON.name, ("capacity",))
_FOR_ANYTHING: FactKey = (fact.REQUESTS_WAITING.name, ())


def _waiting(counts: EngineCounts, covered_s: float) -> float | None:
    """The mean queue of an engine over the covered time."""
    found = counts.gauges.get(_FOR_CAPACITY) or counts.gauges.get(_FOR_ANYTHING)
    if found is None or not found.known_s:
        return None
    return found.mean * counts.covered_s / covered_s


def _total(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fsum(known) if known else None
