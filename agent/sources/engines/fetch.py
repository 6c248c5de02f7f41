"""HTTP exchanges with an engine, limited in total time and in size after decompression.

`requests`, urllib3 and httpx limit only each wait for bytes, so bytes that drip in one by one would
never end. aiohttp has a total timeout, but it needs an event loop in each polling thread.
"""

import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import requests
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from agent.catalog.reasons import FetchFailed
from agent.errors import EngineUnreachable, ExpositionUnreadable
from agent.http_client import TrustingAdapter, client_tls, connection_problem, http_session
from agent.sources.engines.exposition import printable

_CURRENT: ContextVar["Deadline | None"] = ContextVar("deadline", default=None)


class Deadline:
    """Inside `with`, a timer shuts the connections that a DeadlineAdapter opened.

    The connections end with the block: a kept one would have no deadline, and an engine may close
    it just when it is used again.
    """

    def __init__(self, timeout_s: float) -> None:
        self.passed = False
        self._connections: list[tuple[HTTPConnection, socket.socket]] = []
        self._lock = threading.Lock()
        self._timer = threading.Timer(timeout_s, self._end)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        self._token = _CURRENT.set(self)
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        _CURRENT.reset(self._token)
        for connection, _ in self._connections:
            connection.close()

    def add(self, connection: HTTPConnection) -> None:
        """Shut this open connection too when the time is over, or now if it is over."""
        with self._lock:
            # A connection drops its socket as soon as the response's headers are read.
            self._connections.append((connection, connection.sock))
            if self.passed:
                _shut(connection.sock)

    def _end(self) -> None:
        with self._lock:
            self.passed = True
            for _, opened in self._connections:
                _shut(opened)


def _shut(opened: socket.socket) -> None:
    # A thread that waits for data does not notice close(). The TLS socket's shutdown would wait for
    # the other side.
    with suppress(OSError):
        socket.socket.shutdown(opened, socket.SHUT_RDWR)


class _LimitedHTTP(HTTPConnection):
    def connect(self) -> None:
        super().connect()
        _add(self)


class _LimitedHTTPS(HTTPSConnection):
    def connect(self) -> None:
        super().connect()
        _add(self)


def _add(connection: HTTPConnection) -> None:
    if deadline := _CURRENT.get():
        deadline.add(connection)


class _LimitedHTTPPool(HTTPConnectionPool):
    ConnectionCls = _LimitedHTTP


class _LimitedHTTPSPool(HTTPSConnectionPool):
    ConnectionCls = _LimitedHTTPS


class DeadlineAdapter(TrustingAdapter):
    """Opens connections that a Deadline can shut."""

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        """Make the pools of `requests`, with connections of this module."""
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = {
            "http": _LimitedHTTPPool,
            "https": _LimitedHTTPSPool,
        }


MAX_BODY_BYTES = 16 * 1024 * 1024
_CHUNK_BYTES = 64 * 1024


def open_session(ca: Path | None = None) -> requests.Session:
    """A session for one engine, without compression and idle connections.

    `ca` is a file of authorities that it trusts. Raises SettingsInvalid for that file.
    """
    session = http_session()
    session.mount("http://", DeadlineAdapter())
    session.mount("https://", DeadlineAdapter(client_tls(ca)))
    # Compressing would cost the engine more than a connection beside it saves.
    session.headers.update(
        {"Accept": "text/plain, */*;q=0.5", "Accept-Encoding": "identity", "Connection": "close"}
    )
    return session


def fetch(session: requests.Session, url: str, *, timeout_s: float) -> bytes:
    """The body at `url`, with a newline at its end if its length shows that it is whole.

    Raises EngineUnreachable (`timeout`, `connection`, `http_status`) without a response, and
    ExpositionUnreadable (`too_large`, `cut_off`, `encoding`) for an unusable one.
    """
    with Deadline(timeout_s) as deadline:
        try:
            body = _get(session, url, timeout_s)
        except requests.RequestException as error:
            raise _named(error, url, timeout_s, timed_out=deadline.passed) from error
    if deadline.passed:
        # A body without a length seems complete if the deadline cut it off.
        raise _timeout(url, timeout_s)
    return body


def status_of(session: requests.Session, url: str, *, timeout_s: float) -> int | None:
    """The HTTP status of `url`; None without a response in time."""
    with Deadline(timeout_s):
        try:
            with _opened(session, url, timeout_s) as response:
                return response.status_code
        except requests.RequestException:
            return None


def headers_of(session: requests.Session, url: str, *, timeout_s: float) -> Mapping[str, str]:
    """The headers of the response at `url`; none without a response in time."""
    with Deadline(timeout_s):
        try:
            with _opened(session, url, timeout_s) as response:
                return response.headers
        except requests.RequestException:
            return {}


def post(
    session: requests.Session,
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    *,
    timeout_s: float,
) -> requests.Response:
    """The response to a POST. Raises requests.RequestException; Timeout after the time."""
    with Deadline(timeout_s) as deadline:
        try:
            return session.post(
                url,
                data=body,
                headers=headers,
                timeout=(timeout_s, None),
            )
        except requests.RequestException as error:
            if deadline.passed:
                raise requests.Timeout from error
            raise


def _get(session: requests.Session, url: str, timeout_s: float) -> bytes:
    with _opened(session, url, timeout_s) as response:
        _check_status(response, url)
        return _bounded_body(response, url)


def _opened(session: requests.Session, url: str, timeout_s: float) -> requests.Response:
    # The deadline limits all reads together. A limit on each as well would end a slow body with an
    # error that does not say that time was up.
    timeout = (timeout_s, None)
    return session.get(url, stream=True, timeout=timeout)


def _check_status(response: requests.Response, url: str) -> None:
    if response.status_code != requests.codes.ok:
        raise EngineUnreachable(
            FetchFailed.HTTP_STATUS,
            f"answered {status_text(response)}",
            where=shown_url(url),
            status=response.status_code,
        )


_STATUS_MEANS = {
    301: "it redirects",
    302: "it redirects",
    307: "it redirects",
    308: "it redirects",
    401: "it wants credentials",
    403: "it refuses access",
    404: "it has no such path",
    501: "it does not support that; llama.cpp's server needs --metrics",
    502: "a proxy cannot reach the engine",
    503: "it is not ready, or shuts down",
    504: "a proxy got no response of the engine",
}
# Of an engine's own server, which says nothing new.
_USUAL_SERVERS = ("uvicorn", "hypercorn", "granian")


def status_text(response: requests.Response) -> str:
    """A response that is not 200, as `HTTP 404: it has no such path (server nginx)`."""
    status, server = response.status_code, response.headers.get("Server", "")
    means = _STATUS_MEANS.get(status)
    told = f"HTTP {status}" if means is None else f"HTTP {status}: {means}"
    if not server or server.lower().startswith(_USUAL_SERVERS):
        return told
    return f"{told} (server {printable(server)})"


def _bounded_body(response: requests.Response, url: str) -> bytes:
    body = bytearray()
    for chunk in response.iter_content(_CHUNK_BYTES):
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise ExpositionUnreadable(
                FetchFailed.TOO_LARGE,
                f"sent more than {MAX_BODY_BYTES} bytes",
                where=shown_url(url),
            )
    if _is_whole(response) and not body.endswith(b"\n"):
        # The reader of expositions takes a text that ends inside a line for one that was cut off.
        body += b"\n"
    return bytes(body)


def _is_whole(response: requests.Response) -> bool:
    """Whether a body that was cut off would have failed."""
    headers = response.headers
    return "Content-Length" in headers or headers.get("Transfer-Encoding", "").lower() == "chunked"


def _named(
    error: requests.RequestException, url: str, timeout_s: float, *, timed_out: bool
) -> EngineUnreachable | ExpositionUnreadable:
    if timed_out or isinstance(error, requests.Timeout):
        return _timeout(url, timeout_s)
    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return ExpositionUnreadable(
            FetchFailed.CUT_OFF, "closed the connection within its response", where=shown_url(url)
        )
    if isinstance(error, requests.exceptions.ContentDecodingError):
        return ExpositionUnreadable(
            FetchFailed.ENCODING, "sent a body that cannot be decompressed", where=shown_url(url)
        )
    return EngineUnreachable(
        FetchFailed.CONNECTION,
        f"cannot be reached: {connection_problem(error)}",
        where=shown_url(url),
    )


def _timeout(url: str, timeout_s: float) -> EngineUnreachable:
    return EngineUnreachable(
        FetchFailed.TIMEOUT, f"did not answer within {timeout_s:g} s", where=shown_url(url)
    )


def shown_url(url: str) -> str:
    """A URL without its password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


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
