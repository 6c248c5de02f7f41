"""An API server of Kubernetes at the wire, as far as lists and watches of pods go.

Its responses follow the API reference of Kubernetes 1.37, and its pods are checked by their schema.
"""

import json
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate

from tests.real_parts.certificates import Certificate

TOKEN = "a-token-of-the-service-account"
START = "2026-11-20T10:00:00Z"
LATER = "2026-11-20T10:05:00Z"
ENGINE = {"name": "vllm", "image": "vllm/vllm-openai:v0.32.0"}
LABELS = {"app.kubernetes.io/name": "vllm"}

Pod = dict[str, Any]


def pod(
    name: str,
    *,
    ip: str | None = "10.0.0.1",
    namespace: str = "llm",
    node: str = "node-a",
    ready: bool = True,
    since: str = START,
    restarts: int = 0,
    phase: str = "Running",
    ending: bool = False,
    labels: Mapping[str, str] = LABELS,
) -> Pod:
    """A pod of vLLM; `since` is when its readiness changed last."""
    metadata = {"name": name, "namespace": namespace, "uid": f"uid-{namespace}-{name}"}
    if ending:
        metadata["deletionTimestamp"] = LATER
    log = {"name": "log", "image": "log:1.0"}
    vllm = {**ENGINE, "ports": [{"name": "http", "containerPort": 8001}]}
    restarted = {**ENGINE, "ready": ready, "restartCount": restarts, "imageID": ""}
    found: Pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**metadata, "labels": dict(labels)},
        "spec": {"nodeName": node, "containers": [log, vllm]},
        "status": {
            "phase": phase,
            "conditions": [
                {"type": "Initialized", "status": "True", "lastTransitionTime": START},
                {"type": "Ready", "status": str(ready), "lastTransitionTime": since},
            ],
            "containerStatuses": [restarted],
            **({} if ip is None else {"podIP": ip}),
        },
    }
    kubernetes_validate.validate(found, "1.37", strict=True)
    return found


class FakeApiServer:
    """Pods that tests put and delete; every request that it gets is in `requests`."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.token = TOKEN
        self.url = ""
        self._changed = threading.Condition()
        self._version = 100
        self._pods: dict[str, Pod] = {}
        self._events: list[tuple[int, dict[str, Any]]] = []
        self._refused: tuple[int, str] | None = None
        self._compacted = 0
        self.cuts = 0
        # Whether a cut is the end of a watch, as after its time, and no loss of the connection.
        self.ends_in_order = False

    def put(self, found: Pod) -> None:
        uid = found["metadata"]["uid"]
        self._change("MODIFIED" if uid in self._pods else "ADDED", found)

    def delete(self, found: Pod) -> None:
        self._change("DELETED", found)

    def bookmark(self) -> str:
        """Tell all watches the version of now, and return it."""
        self._change("BOOKMARK", {"kind": "Pod", "apiVersion": "v1", "metadata": {}})
        return str(self._version)

    def compact(self) -> None:
        """Forget the changes until now, for those that watch from an older version."""
        with self._changed:
            self._version += 1
            self._compacted = self._version

    def refuse(self, status: int, message: str) -> None:
        self._refused = (status, message)
        self.cut()

    def allow(self) -> None:
        self._refused = None

    def cut(self) -> None:
        with self._changed:
            self.cuts += 1
            self._changed.notify_all()

    def watches(self) -> int:
        return sum("watch" in parameters for _, parameters in self.requests)

    def lists(self) -> int:
        return len(self.requests) - self.watches()

    def _change(self, kind: str, found: Pod) -> None:
        with self._changed:
            self._version += 1
            meta = {**found["metadata"], "resourceVersion": str(self._version)}
            changed = {**found, "metadata": meta}
            if kind != "BOOKMARK":
                self._pods.pop(meta["uid"], None)
            if kind in {"ADDED", "MODIFIED"}:
                self._pods[meta["uid"]] = changed
            self._events.append((self._version, {"type": kind, "object": changed}))
            self._changed.notify_all()

    def refusal(self, authorization: str | None) -> tuple[int, str] | None:
        if authorization != f"Bearer {self.token}":
            return 401, "Unauthorized"
        return self._refused

    def listed(self, chosen: Mapping[str, str], namespace: str | None) -> dict[str, Any]:
        with self._changed:
            items = [each for each in self._pods.values() if _matches(each, chosen, namespace)]
            version = {"resourceVersion": str(self._version)}
            return {"kind": "PodList", "apiVersion": "v1", "metadata": version, "items": items}

    def watched(
        self, chosen: Mapping[str, str], namespace: str | None, cuts: int
    ) -> Iterator[dict[str, Any] | None]:
        """The events of a watch, and None where the connection must be cut.

        `cuts` is how often connections were cut when it began.
        """
        sent = int(chosen["resourceVersion"])
        if sent < self._compacted:
            status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
            yield {"type": "ERROR", "object": status}
            return
        cut = False
        while not cut:
            sent, due, cut = self._due(sent, cuts)
            for event in due:
                if event["type"] == "BOOKMARK" or _matches(event["object"], chosen, namespace):
                    yield event
        if not self.ends_in_order:
            yield None

    def _due(self, sent: int, cuts: int) -> tuple[int, list[dict[str, Any]], bool]:
        """The version of now, the events since `sent`, and whether connections were cut since."""
        with self._changed:
            self._changed.wait_for(lambda: self._version > sent or self.cuts > cuts)
            due = [event for at, event in self._events if at > sent]
            return self._version, due, self.cuts > cuts


def _matches(found: Pod, chosen: Mapping[str, str], namespace: str | None) -> bool:
    meta = found["metadata"]
    key, _, value = chosen.get("labelSelector", "").partition("=")
    node = chosen.get("fieldSelector", "").removeprefix("spec.nodeName=")
    return (
        namespace in (None, meta["namespace"])
        and (not key or meta["labels"].get(key) == value)
        and (not node or found["spec"]["nodeName"] == node)
    )


class _Handler(BaseHTTPRequestHandler):
    fake: ClassVar[FakeApiServer]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        # Before the request is seen: who cuts after that also cuts this one.
        cuts = self.fake.cuts
        parts = urlsplit(self.path)
        chosen = {key: values[0] for key, values in parse_qs(parts.query).items()}
        self.fake.requests.append((parts.path, chosen))
        refused = self.fake.refusal(self.headers["Authorization"])
        if refused is not None:
            self._json(refused[0], {"kind": "Status", "message": refused[1]})
            return
        steps = parts.path.split("/")
        namespace = steps[4] if "namespaces" in steps else None
        if "watch" in chosen:
            self._stream(self.fake.watched(chosen, namespace, cuts))
        else:
            self._json(200, self.fake.listed(chosen, namespace))

    def _json(self, status: int, content: Mapping[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, events: Iterator[dict[str, Any] | None]) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.close_connection = True
        # A client that has gone is noticed at the next event.
        with suppress(ConnectionError):
            for event in events:
                if event is None:
                    return
                line = json.dumps(event).encode() + b"\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def api_server(certificate: Certificate | None = None) -> Iterator[FakeApiServer]:
    """A running server on this machine, with TLS where there is a certificate."""
    fake = FakeApiServer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"fake": fake}))
    server.daemon_threads = True
    server.block_on_close = False
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate.certificate, certificate.key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    scheme = "http" if certificate is None else "https"
    fake.url = f"{scheme}://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        fake.refuse(503, "the server is going")
        server.shutdown()
        server.server_close()
        thread.join()
