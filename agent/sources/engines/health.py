"""Whether an engine takes itself for healthy."""

import requests

from agent.sources.engines.fetch import status_of

# vLLM, SGLang, Text Generation Inference and TensorRT-LLM all answer here.
_PATH = "/health"
# The core of a server that hangs does not answer this either, and a poll waits for the page too.
_TIMEOUT_S = 2.0


class HealthProbe:
    """Asks one engine for its health."""

    def __init__(
        self, url: str, session: requests.Session, *, timeout_s: float = _TIMEOUT_S
    ) -> None:
        self._url = url.rstrip("/") + _PATH
        self._session = session
        self._timeout_s = timeout_s

    def status(self) -> int | None:
        """The HTTP status of the answer; None where none came in time."""
        return status_of(self._session, self._url, timeout_s=self._timeout_s)
