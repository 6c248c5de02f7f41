"""The GPUs that an agent has read."""

from sqlalchemy import Engine, select

from agent.records.gpu import GpuSample
from agent.store.connection import reading
from agent.store.tables import gpu_samples


def gpus_read_since(engine: Engine, agent: str, since: float) -> list[GpuSample]:
    """The last good sample of each GPU that an agent read since a Unix time, without its facts.

    Raises StoreUnavailable.
    """
    # Each step finds one GPU in the index, and then its last good row: GROUP BY would read all.
    found: list[GpuSample] = []
    rows = gpu_samples.c
    good = (rows.agent == agent, rows.at >= since, rows.problem.is_(None))
    following = select(rows.gpu).order_by(rows.gpu).limit(1)
    newest = select(rows.gpu_index, rows.name, rows.at).where(*good)
    newest = newest.order_by(rows.at.desc()).limit(1)
    with reading(engine) as connection:
        gpu = connection.scalar(following)
        while gpu is not None:
            row = connection.execute(newest.where(rows.gpu == gpu)).first()
            if row is not None:
                index, name, at = row
                found.append(GpuSample(gpu=gpu, index=index, name=name, at=at, facts={}))
            gpu = connection.scalar(following.where(rows.gpu > gpu))
    return found
