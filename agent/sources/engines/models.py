"""The models that an engine names, and those that it serves."""

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import requests

from agent.catalog.reasons import ExpositionFault
from agent.errors import EngineUnreachable, ExpositionUnreadable
from agent.sources.engines.exposition import bounded_label
from agent.sources.engines.fetch import fetch

SERVED_PATH = "/v1/models"


def read_model(path: str, body: bytes) -> str | None:
    """The model named by the response at `path`, None when it is unknown.

    Raises ExpositionUnreadable (`json_malformed`) for a body that is not JSON.
    """
    response = _read(path, body)
    name = _READERS[path](response) if isinstance(response, dict) else None
    return bounded_label(name) if isinstance(name, str) and name else None


def read_served(body: bytes) -> frozenset[str]:
    """Every model name in the response of SERVED_PATH, adapters included.

    Raises ExpositionUnreadable (`json_malformed`) for a body that is not JSON.
    """
    response = _read(SERVED_PATH, body)
    listed = response.get("data") if isinstance(response, dict) else None
    entries = listed if isinstance(listed, list) else []
    names = [entry.get("id") for entry in entries if isinstance(entry, dict)]
    return frozenset(bounded_label(name) for name in names if isinstance(name, str) and name)


def _read(path: str, body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ExpositionUnreadable(
            ExpositionFault.JSON_MALFORMED, f"{path} is not JSON: {error}"
        ) from error


def _only_base_model(response: Mapping[str, Any]) -> object:
    """The first id, when all entries except adapters (they have a parent) have one root."""
    listed = response.get("data")
    entries = listed if isinstance(listed, list) else []
    bases = [entry for entry in entries if isinstance(entry, dict) and not entry.get("parent")]
    roots = {str(entry.get("root") or entry.get("id")) for entry in bases}
    return bases[0].get("id") if len(roots) == 1 else None


def _model_id(response: Mapping[str, Any]) -> object:
    return response.get("model_id")


_READERS: Mapping[str, Callable[[Mapping[str, Any]], object]] = {
    SERVED_PATH: _only_base_model,
    "/info": _model_id,
}

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
