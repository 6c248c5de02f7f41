"""A client of a running agent's HTTP API, for the commands that read one."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests

from agent.analysis.setup_steps import is_any_address
from agent.command_options import secret_in, server_url
from agent.errors import SettingsInvalid
from agent.http_client import connection_problem, http_session
from agent.settings import Settings, load

Json = dict[str, Any]

# A report of a month may take the database long.
_WAITS_S = 600.0


class AgentApi:
    """The API of the agent at a URL."""

    def __init__(self, session: requests.Session, url: str) -> None:
        self._session = session
        self._url = url.rstrip("/")

    def __call__(self, route: str, **parameters: str | int) -> Json:
        """The response of a route of the API. Raises SettingsInvalid."""
        status, body = self.read(f"/api/v1/{route}", **parameters)
        if status < requests.codes.bad:
            return body
        raise SettingsInvalid([f"{self._url}: {body.get('detail', status)}"])

    def read(self, path: str, **parameters: str | int) -> tuple[int, Json]:
        """HTTP status and response of a path. Raises SettingsInvalid if no agent responds."""
        response = self._response(path, parameters)
        try:
            return response.status_code, dict(response.json())
        except (ValueError, TypeError) as error:
            raise self._absent(str(error)) from error

    def content(self, path: str) -> bytes:
        """The body at a path that is not JSON. Raises SettingsInvalid."""
        return self._response(path, {}).content

    def _response(self, path: str, parameters: Mapping[str, str | int]) -> requests.Response:
        try:
            response = self._session.get(self._url + path, params=parameters, timeout=_WAITS_S)
        except requests.RequestException as error:
            raise self._absent(connection_problem(error)) from error
        if response.is_redirect:
            target = response.headers["Location"]
            raise SettingsInvalid([f"{self._url} redirects to {target}; give that URL"])
        return response

    def _absent(self, why: str) -> SettingsInvalid:
        return SettingsInvalid(
            [
                f"no agent responds at {self._url}: {why}; start it with "
                "goodput-agent run, or correct the address, which is that of its page"
            ]
        )


def own_agent(settings: Settings) -> tuple[str, Path | None]:
    """The URL of the agent with these settings on this machine, and the file with its token."""
    listen, security = settings.listen, settings.security
    host = "127.0.0.1" if is_any_address(listen.host) else listen.host
    scheme = "http" if security.tls_certificate is None else "https"
    return f"{scheme}://{host}:{listen.port}", security.read_tokens


@contextmanager
def open_agent(url: str, token_file: Path | None, ca: Path | None) -> Iterator[AgentApi]:
    """The API of the agent at a URL, with the read token in a file.

    `ca` is a file of authorities that are trusted beside the system's.
    """
    with http_session(ca=ca) as session:
        if token_file is not None:
            token = secret_in("--token-file", token_file)
            session.headers["Authorization"] = f"Bearer {token}"
        yield AgentApi(session, url)


@contextmanager
def open_figures(
    url: str | None, config: Path | None, token_file: Path | None
) -> Iterator[Callable[..., Json]]:
    """The API of the agent at `--url`, or without one that of the settings' database.

    Raises SettingsInvalid.
    """
    from agent.app.serving import stored_api

    settings = load(config, os.environ)
    if url is None:
        with stored_api(settings) as read:
            yield read
    else:
        with open_agent(server_url("--url", url), token_file, settings.tls.ca) as read:
            yield read
