"""The health check of an engine."""

import requests

from agent.sources.engines.fetch import status_of

# vLLM, SGLang, Text Generation Inference and TensorRT-LLM all have this path.
_PATH = "/health"
# A server with a hanging core does not answer this either, and a poll waits for the scrape too.
_TIMEOUT_S = 2.0


class HealthProbe:
    """Requests the health check of one engine."""

    def __init__(
        self, url: str, session: requests.Session, *, timeout_s: float = _TIMEOUT_S
    ) -> None:
        self._url = url.rstrip("/") + _PATH
        self._session = session
        self._timeout_s = timeout_s

    def status(self) -> int | None:
        """The HTTP status; None without a response in time."""
        return status_of(self._session, self._url, timeout_s=self._timeout_s)
