"""Parts of the benchmarks of ClickHouse: a database, times, sizes, and printing a figure."""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from sqlalchemy import Engine, text

from agent.store.connection import open_engine
from agent.store.migrating import upgrade
from tests.real_parts.clickhouse import ClickHouseServer

WITHIN_S = 3600.0


@contextmanager
def opened_database() -> Iterator[tuple[Engine, psutil.Process]]:
    """A migrated database, and the process of its server."""
    with tempfile.TemporaryDirectory() as folder:
        server = ClickHouseServer(Path(folder))
        server.execute("CREATE DATABASE bench")
        engine = open_engine(server.url("bench"), statement_s=WITHIN_S)
        upgrade(engine)
        yield engine, psutil.Process(server.pid)
        engine.dispose()
        server.stop()


def timed(server: psutil.Process, work: Callable[[], int], times: int = 5) -> tuple[float, str]:
    """The fewest seconds of `times` runs, and a text with them and the processor time.

    The processor time is that of this process and the server together.
    """

    def processor_s() -> float:
        of_server = server.cpu_times()
        return time.process_time() + of_server.user + of_server.system

    taken = []
    for _ in range(times):
        before_s, began = processor_s(), time.perf_counter()
        assert work()
        taken.append((time.perf_counter() - began, processor_s() - before_s))
    seconds, used = (min(each) for each in zip(*taken, strict=True))
    return seconds, f"{seconds * 1e3:.0f} ms, {used * 1e3:.0f} ms of processors"


def url_of(engine: Engine) -> str:
    """The URL of an engine, with its password."""
    return engine.url.render_as_string(hide_password=False)


def print_figure(what: str, value: str) -> None:
    """Print a figure of ClickHouse."""
    print(f"clickhouse, {what}: {value}")


def mb_per_million(engine: Engine) -> float:
    """Megabytes on disk of a million requests, after all merges."""
    with engine.connect() as connection:
        connection.execute(text("OPTIMIZE TABLE requests FINAL"))
        rows, size = connection.execute(
            text(
                "SELECT sum(rows), sum(bytes_on_disk) FROM system.parts "
                "WHERE active AND database = currentDatabase() AND table = 'requests'"
            )
        ).one()
    return float(size) / float(rows)
