"""The API over a database, without a running agent: commands read figures through it."""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

from sqlalchemy import Engine

import agent
from agent.errors import SettingsInvalid, StoreUnavailable
from agent.outputs.api.api_context import ApiContext
from agent.outputs.api.middleware import AccessGuard
from agent.outputs.api.routes import live_figures, make_api
from agent.settings import Settings
from agent.settings.access import AccessPolicy
from agent.store.connection import open_engine
from agent.store.migrating import require_newest
from agent.store.sqlite_place import sqlite_path
from agent.store.stored_queries import stored_queries

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
        simulated = any(each["simulated"] for each in context.queries.agents())
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
    queries, minutes = stored_queries(engine)
    return ApiContext(
        queries=queries,
        minutes=minutes.minutes,
        now=time.time,
        longest_window_s=settings.storage.keep_rollups,
        rows_kept_s=settings.storage.keep_requests,
        query_limit_s=_QUERY_LIMIT_S,
        metrics=lambda _accepted: (b"", "text/plain"),
        engines=tuple,
        problems=tuple,
        parts=dict,
        access=AccessPolicy(),
        documentation="",
        runbooks={},
        version=agent.__version__,
        simulated=False,
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
