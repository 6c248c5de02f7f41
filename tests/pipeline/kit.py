"""Makes inventories of GPUs, hides tables of a database, and reads stored columns."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine, select, text

from agent.catalog import gpu_facts as fact
from agent.pipeline.gpu_inventory import GpuInventory
from agent.records.gpu import Facts, GpuSample, GpuSamples, ProcessMemory, XidError

NOW = 60.0


class Inventory(GpuInventory):
    """A GpuInventory with short calls for tests."""

    def read(
        self, *samples: GpuSample, failures: Sequence[str] = (), now: float = NOW
    ) -> list[str]:
        """Update with these samples and without Xids; returns the failures to count."""
        return self.update(GpuSamples(samples, (), tuple(failures)), now)

    def xid(self, error: XidError) -> None:
        self.update(GpuSamples(xids=(error,)), NOW)


A, B, C = "GPU-aaaa", "GPU-bbbb", "GPU-cccc"


def sample(
    gpu: str,
    index: int,
    processes: ProcessMemory | None = None,
    problem: str | None = None,
    at: float = 1.0,
    pods: Iterable[str] | None = None,
) -> GpuSample:
    used, total = (fact.MEMORY_USED.name, ()), (fact.MEMORY_TOTAL.name, ())
    facts: Facts = {} if problem else {used: 60.0 + index, total: 80.0}
    return GpuSample(
        gpu=gpu,
        index=index,
        name="NVIDIA H200",
        at=at,
        facts=facts,
        processes=processes,
        problem=problem,
        pods=None if pods is None else frozenset(pods),
    )


def xid(gpu: str, number: int = 79) -> XidError:
    return XidError(gpu=gpu, xid=number, at=1.0, count=1)


def inventory(**configured: tuple[int | str, ...]) -> Inventory:
    """An inventory of the GPUs A, B and C."""
    gpus = Inventory(configured)
    gpus.read(*(sample(gpu, index) for index, gpu in enumerate((A, B, C))))
    return gpus


def remembering(*remembered: GpuSample, **configured: tuple[int | str, ...]) -> Inventory:
    """An inventory that remembers the GPUs of an earlier run."""
    gpus = Inventory(configured)
    gpus.remember(remembered)
    return gpus


def taken(gpus: Inventory, engine: str, *pids: int) -> tuple[str, ...]:
    gpus.take(engine, pids)
    return tuple(sample.gpu for sample in gpus.samples_of(engine))


def gpus_of(gpus: Inventory, *engines: str) -> list[tuple[str, ...]]:
    return [taken(gpus, engine) for engine in engines]


@contextmanager
def without(database: Engine, table: str) -> Iterator[None]:
    """The database while this table is missing."""
    rename(database, table, "elsewhere")
    try:
        yield
    finally:
        rename(database, "elsewhere", table)


def rename(database: Engine, table: str, name: str) -> None:
    with database.begin() as connection:
        connection.execute(text(f"ALTER TABLE {table} RENAME TO {name}"))


def stored(database: Engine, column: Any) -> list[Any]:
    """The values of a column, oldest row first."""
    with database.connect() as connection:
        return list(connection.scalars(select(column).order_by(column.table.c.id)))
