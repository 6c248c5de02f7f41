"""One HTTP GET, limited in total time and in size after decompression, that expects status 200."""

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import requests

from agent.catalog.reasons import FetchFailed
from agent.errors import EngineUnreachable, ExpositionUnreadable
from agent.http_client import client_tls, http_session
from agent.sources.engines.deadline import Deadline, DeadlineAdapter

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
    """The response to a POST. Raises requests.RequestException."""
    with Deadline(timeout_s):
        return session.post(
            url,
            data=body,
            headers=headers,
            timeout=(timeout_s, None),
        )


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
            f"{shown_url(url)} answered HTTP {response.status_code}, not 200",
        )


def _bounded_body(response: requests.Response, url: str) -> bytes:
    body = bytearray()
    for chunk in response.iter_content(_CHUNK_BYTES):
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise ExpositionUnreadable(
                FetchFailed.TOO_LARGE, f"{shown_url(url)} sent more than {MAX_BODY_BYTES} bytes"
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
            FetchFailed.CUT_OFF, f"{shown_url(url)} ended before its body did: {_root(error)}"
        )
    if isinstance(error, requests.exceptions.ContentDecodingError):
        return ExpositionUnreadable(
            FetchFailed.ENCODING, f"{shown_url(url)} cannot be decompressed: {_root(error)}"
        )
    return EngineUnreachable(
        FetchFailed.CONNECTION, f"{shown_url(url)} cannot be reached: {_root(error)}"
    )


def _root(error: BaseException) -> str:
    """The message of the first error in a chain of causes."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    return str(error) or type(error).__name__


def _timeout(url: str, timeout_s: float) -> EngineUnreachable:
    return EngineUnreachable(
        FetchFailed.TIMEOUT, f"{shown_url(url)} did not answer within {timeout_s:g} s"
    )


def shown_url(url: str) -> str:
    """A URL without its password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
