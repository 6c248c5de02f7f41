"""Reads all names of the models that an engine serves, to choose among several engines."""

import logging

import requests

from agent.errors import EngineUnreachable, ExpositionUnreadable
from agent.sources.engines.fetch import fetch
from agent.sources.engines.models import SERVED_PATH, read_served

_LOG = logging.getLogger(__name__)


class ServedModels:
    """Reads the model names of one engine."""

    def __init__(
        self, name: str, url: str, session: requests.Session, *, timeout_s: float = 4.0
    ) -> None:
        self.name = name
        self._url = url.rstrip("/") + SERVED_PATH
        self._session = session
        self._timeout_s = timeout_s
        self._failing = False

    def read(self) -> frozenset[str] | None:
        """The names that the engine serves now; None when it does not list them."""
        try:
            served = read_served(fetch(self._session, self._url, timeout_s=self._timeout_s))
        except (EngineUnreachable, ExpositionUnreadable) as error:
            if not self._failing:
                _LOG.warning("engine %s does not list its models: %s", self.name, error)
            self._failing = True
            return None
        self._failing = False
        return served
