"""Which models an engine serves, for whoever must choose among several engines."""

import logging

import requests

from agent.errors import EngineUnreachable, PageUnreadable
from agent.sources.engines.directory import EngineDirectory
from agent.sources.engines.fetch import fetch
from agent.sources.engines.models import SERVED_PATH, read_served

_LOG = logging.getLogger(__name__)


class ServedModels:
    """Asks one engine for all names of its models, and writes them into the directory."""

    def __init__(
        self,
        name: str,
        url: str,
        session: requests.Session,
        directory: EngineDirectory,
        *,
        timeout_s: float = 4.0,
    ) -> None:
        self.name = name
        self._url = url.rstrip("/") + SERVED_PATH
        self._session = session
        self._directory = directory
        self._timeout_s = timeout_s
        self._failing = False

    def poll(self, _now: float) -> None:
        """Ask once; what was known stays known where no answer came."""
        try:
            served = read_served(fetch(self._session, self._url, timeout_s=self._timeout_s))
        except (EngineUnreachable, PageUnreadable) as error:
            if not self._failing:
                _LOG.warning("engine %s does not list its models: %s", self.name, error)
            self._failing = True
            return
        self._failing = False
        self._directory.learn_served(self.name, served)
