"""Outgoing connections that take no password and no proxy from the environment."""

from typing import Any

import requests

# The variables `http_proxy` and `grpc_proxy` do not count for a channel with this option.
GRPC_WITHOUT_PROXY: Any = ("grpc.enable_http_proxy", 0)


class _Session(requests.Session):
    def get_redirect_target(self, resp: requests.Response) -> str | None:
        """None: a redirect would take tokens and bodies to a server that no setting names."""
        return None


def http_session(proxy: str | None = None) -> requests.Session:
    """A session that ignores `~/.netrc`, HTTP_PROXY and REQUESTS_CA_BUNDLE.

    It follows no redirect. `proxy` is the URL of an HTTP proxy for all its requests.
    """
    session = _Session()
    # `requests` would prefer a password of ~/.netrc to the Authorization header of the session.
    session.trust_env = False
    if proxy is not None:
        session.proxies = {"http": proxy, "https": proxy}
    return session
