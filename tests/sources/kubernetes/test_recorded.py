"""What an API server of Kubernetes 1.34 sent, read as engines.

Recorded from kind on 2025-11-12 by the tests of k8s-openapi (Arnavion/k8s-openapi,
k8s-openapi-tests/test-replays/v1-34, Apache-2.0): the first pod of its list and of its watch,
without `managedFields`, probes, mounts and tolerations, which say nothing of an engine.
"""

import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from agent.sources.kubernetes.api_server import ApiServer
from agent.sources.kubernetes.pod_watch import FoundEngine, PodWatch, engine_of

RECORDED = Path(__file__).parent / "recorded"
CORE_DNS = FoundEngine("coredns-66bc5c9577-jggwc", "http://10.244.0.3:9153")


class Replay(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        name = "watch-1.34.jsonl" if "watch=true" in self.path else "pods-1.34.json"
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write((RECORDED / name).read_bytes())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    (tmp_path / "token").write_text("a-token")
    (tmp_path / "ca.crt").touch()
    with ThreadingHTTPServer(("127.0.0.1", 0), Replay) as replay:
        thread = threading.Thread(target=replay.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield ApiServer(f"http://127.0.0.1:{replay.server_port}", tmp_path)
        finally:
            replay.shutdown()
            thread.join()


def watch(server: ApiServer, port: int | str) -> PodWatch:
    read = partial(engine_of, port=port, with_namespace=False)
    return PodWatch(server, "kube-system", {}, read)


def test_a_recorded_list_has_the_engine_of_each_ready_pod(server: ApiServer) -> None:
    found = watch(server, "metrics")
    found.list()
    assert found.engines() == {CORE_DNS}
    assert found.problem is None


def test_recorded_events_of_a_watch_are_read(server: ApiServer) -> None:
    found = watch(server, 9153)
    assert [event["type"] for event in server.watch("/api/v1/pods", {}, "0")] == ["ADDED"]
    stop, changes = threading.Event(), []
    # As when the list was empty: what is found then comes from the watch.
    found._version = "479"

    def changed() -> None:
        changes.append(found.engines())
        stop.set()

    found.follow(changed, stop)
    assert changes == [{CORE_DNS}]
    assert found.problem is None
