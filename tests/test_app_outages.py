"""PostgreSQL or the clock fails while an agent publishes: nothing is lost, nothing is twice."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path

import psycopg
import pytest

from tests.real_parts.postgres import PostgresServer
from tests.real_parts.span_sender import ConstantLoad, constant_load
from tests.real_parts.storing_process import (
    PART,
    WITHIN_S,
    StoringProcess,
    all_published,
    has_all_once,
    kill,
)
from tests.real_parts.waiting import eventually

pytestmark = pytest.mark.slow

PAUSE_S = 0.1
BATCHES_OF_EACH = 5
CONNECTIONS = 8
# A slow server works for a tenth of the time.
STOPS_S, WORKS_S = 0.09, 0.01
HOUR_S = 3600.0


class Site:
    """A running store with its shared database, and every load so far."""

    def __init__(self, folder: Path, url: str) -> None:
        self.url = url
        self.file = folder / "agent.db"
        storage = {"publish_to": url, "file": str(self.file)}
        self.storing = StoringProcess(folder, PART, storage)
        self.loads: list[ConstantLoad] = []

    def rows(self) -> int:
        """How many requests the shared database has."""
        return self._number("SELECT count(*) FROM requests")

    def _number(self, query: str) -> int:
        with psycopg.connect(self.url.replace("+psycopg", "")) as connection:
            found = connection.execute(query.encode()).fetchone()
        return int(found[0] or 0) if found else 0

    def publishes(self) -> None:
        """Return when requests that come now are published, too."""
        before = self.rows()
        eventually(lambda: self.rows() > before, within_s=WITHIN_S, what="new rows")

    def folds(self) -> None:
        """Return when the job that folds rollups has run again, and they are published."""
        newest = "SELECT max(changed) FROM rollups"
        before = eventually(lambda: self._number(newest), within_s=WITHIN_S, what="a rollup")
        eventually(lambda: self._number(newest) > before, within_s=WITHIN_S, what="newer rollups")

    def whole_and_once(self) -> None:
        """Both databases have every request of all loads."""
        all_published(self.file)
        has_all_once(f"sqlite:///{self.file}", *self.loads)
        has_all_once(self.url, *self.loads)


@pytest.fixture(scope="module")
def site(
    tmp_path_factory: pytest.TempPathFactory, postgres_server: PostgresServer
) -> Iterator[Site]:
    with postgres_server.new_database() as url:
        site = Site(tmp_path_factory.mktemp("outages"), url)
        process = site.storing.start()
        try:
            with constant_load(site.storing.port, PAUSE_S) as load:
                load.more_acknowledged(1)
                site.loads.append(load)
            all_published(site.file)
            yield site
        finally:
            kill(process)


@contextmanager
def stopped(server: PostgresServer, _url: str) -> Iterator[None]:
    server.stop()
    try:
        yield
    finally:
        server.restart()


@contextmanager
def frozen(server: PostgresServer, _url: str) -> Iterator[None]:
    with server.frozen():
        yield


@contextmanager
def slow(server: PostgresServer, _url: str) -> Iterator[None]:
    ended = threading.Event()

    def stop_again_and_again() -> None:
        while not ended.is_set():
            with server.frozen():
                ended.wait(STOPS_S)
            ended.wait(WORKS_S)

    thread = threading.Thread(target=stop_again_and_again)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def out_of_connections(server: PostgresServer, url: str) -> Iterator[None]:
    with server.with_connections(CONNECTIONS), ExitStack() as taken:
        place = url.replace("+psycopg", "")
        own: list[psycopg.Connection] = []

        def takes_one() -> bool:
            try:
                own.append(psycopg.connect(place, autocommit=True))
            except psycopg.OperationalError:
                return False
            taken.enter_context(closing(own[-1]))
            return True

        def has_all() -> bool:
            while takes_one():
                pass
            others = (
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
                "WHERE backend_type = 'client backend' AND pid <> ALL(%s)"
            )
            pids = [connection.info.backend_pid for connection in own]
            return bool(own) and own[0].execute(others, (pids,)).fetchone() == (0,)

        eventually(has_all, within_s=WITHIN_S, what="every connection")
        yield


Outage = Callable[[PostgresServer, str], AbstractContextManager[None]]


@pytest.mark.parametrize("outage", [stopped, out_of_connections, slow, frozen])
def test_nothing_is_lost_or_twice_and_new_requests_are_acknowledged(
    site: Site, postgres_server: PostgresServer, outage: Outage
) -> None:
    with constant_load(site.storing.port, PAUSE_S) as load:
        site.loads.append(load)
        load.more_acknowledged(BATCHES_OF_EACH, of_each=True)
        with outage(postgres_server, site.url):
            load.more_acknowledged(BATCHES_OF_EACH, of_each=True)
        # New rows keep coming while it catches up.
        site.publishes()
    site.whole_and_once()


def test_when_the_clock_is_set_and_set_back_nothing_is_lost_or_twice_and_jobs_go_on(
    site: Site,
) -> None:
    with constant_load(site.storing.port, PAUSE_S) as load:
        site.loads.append(load)
        for seconds in (HOUR_S, -HOUR_S, 0.0):
            site.storing.clock.set_by(seconds)
            load.more_acknowledged(BATCHES_OF_EACH, of_each=True)
            site.publishes()
            site.folds()
    site.whole_and_once()
