"""Outgoing connections that take no password and no proxy from the environment."""

import ssl
from functools import cache
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


def root_cause(error: BaseException) -> str:
    """The first error in a chain of causes, in the words of the system if it has some."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


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
