"""The source of routers' metrics: queue, rejections and healthy engines of what is in front."""

import logging
from pathlib import Path
from urllib.parse import urlsplit

from agent.catalog.other_programs import other_program
from agent.catalog.own_health import OK
from agent.catalog.reasons import ExpositionFault
from agent.catalog.routers import ROUTER_UP, ROUTERS
from agent.errors import ExpositionUnreadable, ReadFailed
from agent.records.gpu import Facts
from agent.sources.engines.exposition import read_exposition
from agent.sources.engines.fetch import fetch, open_session, shown_url
from agent.sources.engines.translate import translate, wanted_series

_LOG = logging.getLogger(__name__)
_PATH = "/metrics"
_WANTED = wanted_series(ROUTERS)
_UP: Facts = {(ROUTER_UP.name, ()): 1.0}
_KNOWN = tuple(router.engine for router in ROUTERS)
_UNKNOWN = f"has no series of a known router ({', '.join(_KNOWN)})"
_DOWN: Facts = {(ROUTER_UP.name, ()): 0.0}


class RouterSource:
    """Reads one router. `poll` must not run in two threads at once."""

    def __init__(
        self, *, name: str, url: str, ca: Path | None = None, timeout_s: float = 4.0
    ) -> None:
        """The path of `url` may be left out. `ca` is a file of authorities that it trusts."""
        self.name = name
        self._url = url if urlsplit(url).path.strip("/") else url.rstrip("/") + _PATH
        self._session = open_session(ca)
        self._timeout_s = timeout_s
        self._facts: Facts = {}
        self._failing: str | None = None
        self._problem = "is not read yet"

    def status_text(self) -> str:
        """The result of the last poll, for /readyz, which anybody may read: without an address."""
        return self._problem

    @property
    def facts(self) -> Facts:
        """The facts of the last poll, `llm_router_up` alone if it failed; none before it."""
        return self._facts

    def poll(self, _now: float) -> None:
        """Read the router once."""
        try:
            self._facts = self._read()
        except ReadFailed as error:
            self._facts, self._problem = _DOWN, error.public
            if error.reason != self._failing:
                _LOG.warning("router %s cannot be read: %s", self.name, error)
            self._failing = error.reason
        else:
            if self._failing is not None:
                _LOG.info("router %s can be read again", self.name)
            self._failing, self._problem = None, OK

    def _read(self) -> Facts:
        text = fetch(self._session, self._url, timeout_s=self._timeout_s)
        try:
            facts = translate(read_exposition(text, _WANTED), ROUTERS).facts
        except ExpositionUnreadable as error:
            if error.reason != ExpositionFault.NO_KNOWN_SERIES:
                raise
            # Before its first request a router may have none of the series.
            if other_program(text) not in _KNOWN:
                where = shown_url(self._url)
                raise ExpositionUnreadable(error.reason, _UNKNOWN, where=where) from error
            facts = {}
        return {**facts, **_UP}

    def close(self) -> None:
        """Close the connections."""
        self._session.close()
