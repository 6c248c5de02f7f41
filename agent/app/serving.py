"""The API over a database, without an engine or a running agent: `serve`, and commands.

It reads the database and writes nothing.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlencode

from sqlalchemy import Engine

import agent
from agent.app.jobs import Jobs
from agent.app.listeners import API, ConnectionLimits, Listeners, raise_descriptors
from agent.app.processes import begin_to_try, listen_of, plan_text, try_listening
from agent.app.running import until_stopped
from agent.app.supervising import EXIT_WITHIN_S, Trial, within
from agent.catalog.own_health import OK
from agent.errors import SettingsInvalid, StoreUnavailable
from agent.outputs.api.api_context import ApiContext
from agent.outputs.api.middleware import AccessGuard
from agent.outputs.api.routes import LiveFigures, live_figures, make_api
from agent.outputs.web.documents import Documents, documents
from agent.settings import Settings
from agent.settings.access import AccessPolicy
from agent.store.connection import open_engine
from agent.store.health import StoreHealth
from agent.store.migrating import require_newest
from agent.store.sqlite_place import sqlite_path
from agent.store.store_queries import engines_of
from agent.store.stored_queries import stored_queries
from agent.store.time_limits import open_query_engine
from agent.store.unreadable import UNREADABLE

# A command may take longer than a page: its user can stop it.
_QUERY_LIMIT_S = 600.0
_ADVICE = "give the agent's settings with --config, or the address of a running agent with --url"


class StoredApi:
    """The API of a database that is open."""

    def __init__(self, api: AccessGuard) -> None:
        self._api = api

    def __call__(self, route: str, **parameters: str | int) -> dict[str, Any]:
        """The response of `/api/v1/ROUTE`. Raises StoreUnavailable and SettingsInvalid."""
        status, body = asyncio.run(_called(self._api, f"/api/v1/{route}", urlencode(parameters)))
        response: dict[str, Any] = json.loads(body)
        if status == 200:
            return response
        if status < 500:
            raise SettingsInvalid([str(response["detail"])])
        raise StoreUnavailable(str(response["detail"]))


@contextmanager
def stored_api(settings: Settings) -> Iterator[StoredApi]:
    """The API of the settings' database, which is only read and must be migrated.

    Raises SettingsInvalid if there is none, and StoreUnavailable.
    """
    engine = open_engine(settings.storage.read_url)
    try:
        require_stored(engine, _ADVICE)
        context = stored_context(engine, settings)
        # The rows of a demo are figures of a simulator also when it has ended.
        simulated = any(each["simulated"] for each in stored_queries(engine).agents())
        context = replace(context, simulated=simulated)
        yield StoredApi(make_api(context, live_figures(context)))
    finally:
        engine.dispose()


def require_stored(engine: Engine, advice: str) -> None:
    """Raises SettingsInvalid, with advice, without a database, StoreUnavailable if it is not read.

    That is so if it does not answer, or is at another revision.
    """
    path = sqlite_path(engine.url)
    if path is not None and not path.exists():
        raise SettingsInvalid([f"storage.file: there is no database {str(path)!r}; {advice}"])
    require_newest(engine)


def stored_context(engine: Engine, settings: Settings) -> ApiContext:
    """What the API serves from if only a database is there, and no running agent."""
    queries = stored_queries(engine)
    return ApiContext(
        read=lambda work: work(queries),
        now=time.time,
        longest_window_s=settings.storage.keep_rollups,
        rows_kept_s=settings.storage.keep_requests,
        query_limit_s=_QUERY_LIMIT_S,
        metrics=lambda _accepted: (b"", "text/plain"),
        engines=tuple,
        problems=tuple,
        parts=dict,
        access=AccessPolicy(),
        documents=Documents(None),
        tenant_budgets=settings.tenant_budgets,
        version=agent.__version__,
        simulated=False,
        trace_url=settings.trace_url,
    )


async def _called(api: AccessGuard, path: str, query: str) -> tuple[int, bytes]:
    """The status and body of one GET."""
    scope: dict[str, Any] = {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [],
        "scheme": "http",
        "server": ("store", 80),
        "client": None,
        "http_version": "1.1",
        "root_path": "",
    }
    messages: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        messages.append(message)

    await api(scope, receive, send)
    return messages[0]["status"], b"".join(each.get("body", b"") for each in messages[1:])


Row = Mapping[str, Any]

ASK_EVERY_S = 5.0

_METRICS = b"# `goodput-agent serve` publishes no metrics: Prometheus scrapes the agents.\n"


class DatabaseServer:
    """The API and the page of a database that agents write to."""

    _live: LiveFigures | None = None

    def __init__(self, settings: Settings, now: Callable[[], float]) -> None:
        """Raises SettingsInvalid, and StoreUnavailable for a database that cannot be read."""
        self._settings, self._now = settings, now
        self._listeners = Listeners(settings, ConnectionLimits(raise_descriptors()))
        self._database = _open(settings)
        require_stored(self._database, "start an agent that writes to it first")
        self._queries = stored_queries(self._database)
        self._health = StoreHealth()
        self._agents: Sequence[Row] = self._queries.agents()
        self._jobs = Jobs(now)

    async def start(self) -> None:
        """Listen. Raises SettingsInvalid for a taken port."""
        context = self._context()
        self._live = live_figures(context)
        listen = self._settings.listen
        self._listeners.serve(API, make_api(context, self._live), listen.host, listen.port)
        self._jobs.every(ASK_EVERY_S, "ask the database", self._ask)
        self._jobs.start()

    async def stop(self, within_s: float) -> None:
        """Take no more queries, and close everything in at most `within_s`."""
        if self._live is not None:
            self._live.stop()
        works = [self._jobs.stop(), self._listeners.stop(within_s / 2)]
        await within(within_s - 2 * EXIT_WITHIN_S, "open queries", *works)
        self._database.dispose()

    def _context(self) -> ApiContext:
        return replace(
            stored_context(self._database, self._settings),
            now=self._now,
            query_limit_s=self._settings.storage.query_timeout,
            metrics=lambda _accepted: (_METRICS, "text/plain; version=0.0.4; charset=utf-8"),
            engines=lambda: engines_of(self._queries.agents()),
            problems=self._problems,
            parts=self._parts,
            access=self._listeners.access,
            documents=documents(),
            simulated=any(agent["simulated"] for agent in self._agents),
        )

    def _ask(self, _now: float) -> None:
        with suppress(StoreUnavailable), self._health.write("a query", probe=True):
            require_newest(self._database)
            self._agents = self._queries.agents()

    def _problems(self) -> Sequence[str]:
        problem = self._health.problem()
        return [] if problem is None else [problem]

    def _parts(self) -> Mapping[str, str]:
        problem = self._health.problem()
        return {
            "database": problem or UNREADABLE.status() or OK,
            "agents": self._in_time() if problem is None else "unknown",
        }

    def _in_time(self) -> str:
        overdue = sum(bool(agent["overdue"]) for agent in self._agents)
        return OK if not overdue else f"{overdue} of {len(self._agents)} are overdue"


def _open(settings: Settings) -> Engine:
    """The database of the settings, for queries."""
    storage = settings.storage
    if storage.publish_to is None and "file" not in storage.model_fields_set:
        raise SettingsInvalid(
            [
                "neither storage.publish_to nor storage.file is set; set publish_to to the "
                "database that agents publish to, or file to the SQLite file of one agent"
            ]
        )
    return open_query_engine(storage.read_url, storage.query_timeout)


async def serve(settings: Settings) -> None:
    """Serve until a signal. Raises SettingsInvalid, and StoreUnavailable if there is no data."""
    begin_trial = partial(Trial.of_this_program, {listen_of(settings)})
    await until_stopped(lambda: DatabaseServer(settings, time.time), begin_trial=begin_trial)


def try_serving(settings: Settings) -> str:
    """Do what the start of a server does, and return its plan. Raises what `serve` raises."""
    taken = begin_to_try()
    DatabaseServer(settings, time.time)
    try_listening([(API, listen_of(settings))], taken)
    return plan_text(None, 0)
