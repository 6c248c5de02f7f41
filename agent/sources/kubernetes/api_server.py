"""Lists and watches of the Kubernetes API, as a pod with a service account sends them."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import requests

from agent.catalog.own_health import DiscoveryFailure as Why
from agent.errors import DiscoveryFailed, SettingsInvalid
from agent.http_client import http_session
from agent.settings.named_files import read_named_file

# The server ends a watch after this time, and the agent begins the next one. So it soon notices a
# connection that was cut without an end.
WATCH_S = 60
_TIMEOUT_S = 5.0
_SPARE_S = 15.0
_MOST_SHOWN = 300

_REFUSED: Mapping[int, Why] = {
    HTTPStatus.UNAUTHORIZED: Why.UNAUTHORIZED,
    HTTPStatus.FORBIDDEN: Why.FORBIDDEN,
}


class VersionGone(Exception):
    """The server no longer has the changes since this version: the caller must list anew."""


class ApiServer:
    """The API server of a cluster, or the one at `url`."""

    def __init__(self, url: str | None, account: Path) -> None:
        """`account` is the folder with `token` and `ca.crt`.

        Raises SettingsInvalid outside of a cluster.
        """
        self._url = url or _in_cluster()
        self._token = account / "token"
        self._authority = account / "ca.crt"

    def list(self, path: str, selectors: Mapping[str, str]) -> Mapping[str, Any]:
        """The list of the objects at `path`; `selectors` are query parameters.

        Raises DiscoveryFailed.
        """
        with self._response(path, selectors, _TIMEOUT_S) as response:
            found = response.json()
        if not isinstance(found, dict):
            words = f"the API server's response to {path} is not a list"
            raise DiscoveryFailed(Why.MALFORMED, words)
        return found

    def watch(
        self, path: str, selectors: Mapping[str, str], version: str
    ) -> Iterator[Mapping[str, Any]]:
        """The events since a resource version, until the server ends the watch.

        Raises VersionGone, and DiscoveryFailed.
        """
        parameters = {
            **selectors,
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_S),
        }
        with self._response(path, parameters, WATCH_S + _SPARE_S) as response:
            for line in response.iter_lines():
                if line:
                    yield _event(json.loads(line))

    @contextmanager
    def _response(
        self, path: str, parameters: Mapping[str, str], silence_s: float
    ) -> Iterator[requests.Response]:
        """A response with status 200, which may be silent for `silence_s`.

        Raises VersionGone, and DiscoveryFailed for any other failure, also while the response is
        read.
        """
        try:
            # Kubernetes replaces the token every hour, so it is read each time.
            with http_session() as session:
                token = read_named_file(self._token).decode("ascii").strip()
                session.headers["Authorization"] = f"Bearer {token}"
                # The package requests would wait for a pipe or a file system that hangs.
                read_named_file(self._authority)
                session.verify = str(self._authority)
                url = f"{self._url}{path}"
                timeout = (_TIMEOUT_S, silence_s)
                with session.get(url, params=parameters, timeout=timeout, stream=True) as response:
                    _check(response)
                    yield response
        except ValueError as error:
            words = f"the API server's response is not JSON: {_short(error)}"
            raise DiscoveryFailed(Why.NO_JSON, words) from error
        except OSError as error:
            # Errors of the package requests are OSErrors.
            words = f"the API server cannot be read: {_short(error)}"
            raise DiscoveryFailed(Why.UNREACHABLE, words) from error


def _in_cluster() -> str:
    try:
        host = os.environ["KUBERNETES_SERVICE_HOST"]
        port = os.environ["KUBERNETES_SERVICE_PORT"]
    except KeyError as error:
        raise SettingsInvalid(
            [
                f"engines_from.kubernetes: {error.args[0]} is not set, so the agent is in no pod; "
                "set engines_from.kubernetes.api"
            ]
        ) from error
    return f"https://{f'[{host}]' if ':' in host else host}:{port}"


def _check(response: requests.Response) -> None:
    if response.status_code == HTTPStatus.GONE:
        raise VersionGone
    if response.status_code != HTTPStatus.OK:
        # The body is a Status object of Kubernetes, which names the missing permission.
        words = f"the API server answers {response.status_code}: {_short(_message(response))}"
        raise DiscoveryFailed(_REFUSED.get(response.status_code, Why.HTTP_STATUS), words)


def _message(response: requests.Response) -> str:
    try:
        return str(response.json()["message"])
    except (ValueError, KeyError, TypeError):
        return response.reason


def _event(event: Mapping[str, Any]) -> Mapping[str, Any]:
    if event["type"] == "ERROR":
        status = event["object"]
        if status.get("code") == HTTPStatus.GONE:
            raise VersionGone
        words = f"the API server ended the watch: {_short(status.get('message'))}"
        raise DiscoveryFailed(Why.ENDED, words)
    return event


def _short(words: object) -> str:
    return " ".join(str(words).split())[:_MOST_SHOWN]
