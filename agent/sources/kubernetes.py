"""The pods of a Kubernetes cluster as a source of engines: lists them once, then watches."""

import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import requests

from agent.catalog.own_health import DiscoveryCall, DiscoveryFailure
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


Pod = Mapping[str, Any]


class FoundEngine(NamedTuple):
    """The name of an engine, its URL, and its pod as `namespace/pod`.

    `role` is what a label of the pod says, which may be any text; empty without it.
    """

    name: str
    url: str
    pod: str
    role: str = ""


def engine_of(
    pod: Pod, port: int | str, *, role_label: str, with_namespace: bool
) -> FoundEngine | None:
    """The engine of a pod; None if it should not be watched now, or has no such port."""
    number = port if isinstance(port, int) else _port(pod, port)
    address = pod.get("status", {}).get("podIP")
    if number is None or not address or not _was_ready(pod):
        return None
    meta = pod["metadata"]
    whole = f"{meta['namespace']}/{meta['name']}"
    shown = f"[{address}]" if ":" in address else address
    role = (meta.get("labels") or {}).get(role_label, "")
    name = whole if with_namespace else meta["name"]
    return FoundEngine(name, f"http://{shown}:{number}", whole, role)


def _port(pod: Pod, name: str) -> int | None:
    ports = (port for each in pod["spec"]["containers"] for port in each.get("ports", ()))
    return next((port["containerPort"] for port in ports if port.get("name") == name), None)


def _was_ready(pod: Pod) -> bool:
    """Whether the pod was ready at some time, and is not being deleted.

    An engine that still loads its model must not count as down. An engine that was ready and now
    hangs or restarts must stay watched. An engine whose pod is deleted must not count as dead.
    """
    status = pod.get("status", {})
    if status.get("phase") != "Running" or "deletionTimestamp" in pod["metadata"]:
        return False
    conditions = {each["type"]: each for each in status.get("conditions", ())}
    ready = conditions.get("Ready")
    if ready is None or ready["status"] == "True":
        return ready is not None
    restarts = sum(each.get("restartCount", 0) for each in status.get("containerStatuses", ()))
    return restarts > 0 or _turned_unready(ready, conditions.get("Initialized"))


def _turned_unready(ready: Mapping[str, Any], initialized: Mapping[str, Any] | None) -> bool:
    """Whether the pod became unready after the start of its containers.

    In a pod that was never ready, both conditions changed at the same time. Times in RFC 3339 sort
    as texts.
    """
    if initialized is None:
        return False
    return str(ready.get("lastTransitionTime")) > str(initialized.get("lastTransitionTime"))


_LOG = logging.getLogger(__name__)

# The pause after each watch. While the server is away or refuses, it doubles with each attempt.
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0

Read = Callable[[Mapping[str, Any]], FoundEngine | None]


class PodWatch:
    """Knows the engines in the pods of one namespace, or of all.

    While the server is away, the engines that were known last stay. One thread calls `list` and
    `follow`; any thread may read the rest.
    """

    def __init__(
        self,
        server: ApiServer,
        namespace: str | None,
        selectors: Mapping[str, str],
        read: Read,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`selectors` are query parameters of a list, such as `labelSelector`.

        `read` returns the engine of a pod, `now` Unix time.
        """
        self._now = now
        self.namespace = namespace
        self._server = server
        self._path = f"/api/v1/namespaces/{namespace}/pods" if namespace else "/api/v1/pods"
        self._selectors = selectors
        self._read = read
        self._version: str | None = None
        self._pods: dict[str, FoundEngine] = {}
        self._calling = DiscoveryCall.LIST
        self.problem: str | None = "the pods are not listed yet"
        self.succeeded_at: float | None = None
        self.failures: Counter[tuple[DiscoveryCall, str]] = Counter()

    def engines(self) -> frozenset[FoundEngine]:
        """The engines that are known now."""
        return frozenset(self._pods.copy().values())

    def list(self) -> None:
        """Read all pods. Raises DiscoveryFailed."""
        self._calling = DiscoveryCall.LIST
        try:
            found = self._server.list(self._path, self._selectors)
            pods = {}
            for pod in found["items"]:
                if (engine := self._read(pod)) is not None:
                    pods[pod["metadata"]["uid"]] = engine
            self._pods, self._version = pods, found["metadata"]["resourceVersion"]
            _LOG.info(
                "%s: %d pods of %d have an engine to watch",
                self._path,
                len(pods),
                len(found["items"]),
            )
        except VersionGone as error:
            words = "the API server answers 410 to a list"
            raise DiscoveryFailed(DiscoveryFailure.GONE, words) from error
        except (KeyError, TypeError) as error:
            words = f"the API server's list has no {error}"
            raise DiscoveryFailed(DiscoveryFailure.MALFORMED, words) from error
        self._succeeded()

    def follow(self, on_change: Callable[[], None], stop: threading.Event) -> None:
        """List and watch until `stop`, and call `on_change` after each change of the engines."""
        pause_s = FIRST_PAUSE_S
        while not stop.is_set():
            try:
                self._follow_once(on_change)
                pause_s = FIRST_PAUSE_S
            except DiscoveryFailed as error:
                self.failed(error)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            stop.wait(pause_s)

    def _follow_once(self, on_change: Callable[[], None]) -> None:
        before = self._pods
        if self._version is None:
            self.list()
            if self._pods != before:
                on_change()
        try:
            self._watch(on_change)
        except VersionGone:
            _LOG.info("the changes of %s are gone: listing pods anew", self._path)
            self.failures[DiscoveryCall.WATCH, DiscoveryFailure.GONE] += 1
            self._version = None

    def _watch(self, on_change: Callable[[], None]) -> None:
        assert self._version is not None, "a watch follows a list"
        self._calling = DiscoveryCall.WATCH
        try:
            for event in self._server.watch(self._path, self._selectors, self._version):
                self._succeeded()
                before = self._pods
                self._pods = self._after(event)
                self._version = event["object"]["metadata"]["resourceVersion"]
                if self._pods != before:
                    on_change()
        except (KeyError, TypeError) as error:
            words = f"an event of the API server has no {error}"
            raise DiscoveryFailed(DiscoveryFailure.MALFORMED, words) from error
        # The end of a watch is not a failure: the server ends each after WATCH_S.
        self._succeeded()

    def _after(self, event: Mapping[str, Any]) -> dict[str, FoundEngine]:
        if event["type"] == "BOOKMARK":
            return self._pods
        pod = event["object"]
        uid = pod["metadata"]["uid"]
        others = {key: engine for key, engine in self._pods.items() if key != uid}
        engine = None if event["type"] == "DELETED" else self._read(pod)
        return others if engine is None else {**others, uid: engine}

    def _succeeded(self) -> None:
        self.problem, self.succeeded_at = None, self._now()

    def failed(self, error: DiscoveryFailed) -> None:
        """Count a failed call and log its reason; the engines that were known last stay."""
        self.failures[self._calling, error.reason] += 1
        if self.problem != str(error):
            _LOG.warning("%s: %s", self._path, error)
        self.problem = str(error)
