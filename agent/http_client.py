"""Outgoing connections that take no password and no proxy from the environment."""

import socket
import ssl
from functools import cache
from http.client import HTTPException, RemoteDisconnected
from pathlib import Path
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from requests.utils import DEFAULT_CA_BUNDLE_PATH

from agent.errors import SettingsInvalid
from agent.settings.named_files import read_named_file

# The variables `http_proxy` and `grpc_proxy` do not count for a channel with this option.
GRPC_WITHOUT_PROXY: Any = ("grpc.enable_http_proxy", 0)


class _Session(requests.Session):
    def get_redirect_target(self, resp: requests.Response) -> str | None:
        """None: a redirect would take tokens and bodies to a server that no setting names."""
        return None


def read_client_tls(ca: Path | None) -> ssl.SSLContext | None:
    """A context that trusts the authorities of a file too; None without a file.

    Raises SettingsInvalid.
    """
    if ca is None:
        return None
    context = ssl.create_default_context()
    context.load_verify_locations(DEFAULT_CA_BUNDLE_PATH)
    try:
        context.load_verify_locations(cadata=read_named_file(ca).decode("ascii"))
    except (OSError, ValueError) as error:
        raise SettingsInvalid([f"tls.ca: {ca} cannot be used: {error}"]) from error
    return context


# Read once, so that a worker that starts again does not need the file.
client_tls = cache(read_client_tls)


class TrustingAdapter(HTTPAdapter):
    """Trusts the authorities of a context, or without one those of `requests`."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        super().__init__()

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        """Make the pools of connections."""
        kwargs |= self._given()
        super().init_poolmanager(*args, **kwargs)

    def proxy_manager_for(self, proxy: str, **kwargs: Any) -> Any:
        """Make the pools of connections by way of a proxy."""
        return super().proxy_manager_for(proxy, **kwargs, **self._given())

    def cert_verify(self, conn: Any, url: str, verify: Any, cert: Any) -> None:
        """Check the server's certificate."""
        if self._tls is None:
            super().cert_verify(conn, url, verify, cert)  # type: ignore[no-untyped-call]
        else:
            conn.cert_reqs = "CERT_REQUIRED"

    def _given(self) -> dict[str, Any]:
        return {} if self._tls is None else {"ssl_context": self._tls}


def connection_problem(error: BaseException) -> str:
    """Why a request failed, in a few words: `connection refused`, `name not found`.

    The texts of `requests` and urllib3 repeat themselves and quote their own objects.
    """
    cause = _first_cause(error)
    for kind, text in _PROBLEMS:
        if isinstance(cause, kind):
            return text
    if isinstance(cause, ssl.SSLError):
        return _tls_problem(cause)
    if isinstance(cause, socket.gaierror) and cause.errno in _NO_SUCH_NAME:
        return "name not found"
    words = cause.strerror if isinstance(cause, OSError) else None
    return words or str(cause) or type(cause).__name__


def _first_cause(error: BaseException) -> BaseException:
    while cause := error.__cause__ or error.__context__:
        error = cause
    return error


_PROBLEMS: tuple[tuple[type[BaseException], str], ...] = (
    (ConnectionRefusedError, "connection refused"),
    (TimeoutError, "no response in time"),
    # Before BadStatusLine and ConnectionResetError, of which it is both.
    (RemoteDisconnected, "the connection was closed without a response"),
    (ConnectionResetError, "the connection was reset"),
    (HTTPException, "the response is not HTTP; does it need https://?"),
)


def _tls_problem(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"TLS error: the certificate is not accepted: {error.verify_message}"
    if error.reason in _NOT_TLS:
        return "TLS error: the server does not speak TLS; does it need http://?"
    return f"TLS error: {(error.reason or str(error)).replace('_', ' ').lower()}"


# A name server that is away gives another error.
_NO_SUCH_NAME = (socket.EAI_NONAME, socket.EAI_NODATA)
_NOT_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"})


def http_session(proxy: str | None = None, ca: Path | None = None) -> requests.Session:
    """A session that ignores `~/.netrc`, HTTP_PROXY and REQUESTS_CA_BUNDLE.

    It follows no redirect. `proxy` is the URL of an HTTP proxy for all its requests, `ca` a file
    of authorities that it trusts. Raises SettingsInvalid for that file.
    """
    session = _Session()
    if ca is not None:
        session.mount("https://", TrustingAdapter(client_tls(ca)))
    # `requests` would prefer a password of ~/.netrc to the Authorization header of the session.
    session.trust_env = False
    if proxy is not None:
        session.proxies = {"http": proxy, "https": proxy}
    return session
