"""The engines in pods, listed and watched at an API server."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agent.errors import DiscoveryFailed, SettingsInvalid
from agent.sources import kubernetes
from agent.sources.kubernetes import ApiServer, FoundEngine, PodWatch, engine_of
from tests.real_parts.certificates import make_certificate
from tests.real_parts.waiting import eventually
from tests.sources.kubernetes.fake_api_server import LATER, TOKEN, FakeApiServer, api_server, pod

WITHIN_S = 60.0
CHOSEN = {"labelSelector": "app.kubernetes.io/name=vllm", "fieldSelector": "spec.nodeName=node-a"}
READ = partial(engine_of, port=8000, role_label="llm-d.ai/role", with_namespace=False)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(kubernetes, "LONGEST_PAUSE_S", 0.05)


@pytest.fixture
def account(tmp_path: Path) -> Path:
    """The folder of a service account."""
    (tmp_path / "token").write_text(f"{TOKEN}\n", encoding="utf-8")
    (tmp_path / "ca.crt").touch()
    return tmp_path


@pytest.fixture
def server() -> Iterator[FakeApiServer]:
    with api_server() as fake:
        yield fake


@contextmanager
def following(server: FakeApiServer, account: Path, namespace: str | None = "llm") -> Iterator[Any]:
    """A watch that a thread follows, once it watches."""
    watch = PodWatch(ApiServer(server.url, account), namespace, CHOSEN, READ)
    stop = threading.Event()
    follow = threading.Thread(target=watch.follow, args=(lambda: None, stop))
    follow.start()
    try:
        eventually(server.watches, within_s=WITHIN_S, what="a watch")
        yield watch
    finally:
        stop.set()
        server.refuse(503, "the test is over")
        follow.join()


def names(watch: PodWatch) -> list[str]:
    return sorted(engine.name for engine in watch.engines())


def becomes(watch: PodWatch, *expected: str) -> None:
    what = f"engines {expected}"
    eventually(lambda: names(watch) == [*expected], within_s=WITHIN_S, what=what)


def test_the_engines_follow_the_pods(server: FakeApiServer, account: Path) -> None:
    server.put(pod("chat-0"))
    with following(server, account) as watch:
        assert names(watch) == ["chat-0"]
        server.put(pod("chat-1", ready=False))
        server.put(pod("chat-2"))
        becomes(watch, "chat-0", "chat-2")
        server.put(pod("chat-1"))
        becomes(watch, "chat-0", "chat-1", "chat-2")
        server.put(pod("chat-0", ending=True))
        server.delete(pod("chat-2"))
        becomes(watch, "chat-1")
    assert (server.lists(), server.watches()) == (1, 1)


@pytest.mark.parametrize(
    ("namespace", "path", "expected"),
    [
        ("llm", "/api/v1/namespaces/llm/pods", ["chat-0"]),
        # Without a namespace pods of all are read.
        (None, "/api/v1/pods", ["chat-0", "foreign"]),
    ],
)
def test_only_pods_of_the_selector_the_namespace_and_the_node_are_asked_for(
    server: FakeApiServer, account: Path, namespace: str | None, path: str, expected: list[str]
) -> None:
    server.put(pod("other", labels={"app": "other"}))
    server.put(pod("elsewhere", node="node-b"))
    server.put(pod("foreign", namespace="test"))
    server.put(pod("chat-0"))
    with following(server, account, namespace) as watch:
        assert names(watch) == expected
    (asked, listed), (_, watched) = server.requests
    assert (asked, listed) == (path, CHOSEN)
    assert watched.items() >= {**CHOSEN, "allowWatchBookmarks": "true"}.items()


def test_a_watch_that_was_cut_goes_on_where_it_was(server: FakeApiServer, account: Path) -> None:
    with following(server, account) as watch:
        server.put(pod("chat-0"))
        becomes(watch, "chat-0")
        server.cut()
        server.put(pod("chat-1"))
        server.delete(pod("chat-0"))
        becomes(watch, "chat-1")
    assert server.lists() == 1
    assert server.watches() >= 2


def test_the_end_of_a_watch_is_a_success(server: FakeApiServer, account: Path) -> None:
    with following(server, account) as watch:
        listed_at = watch.succeeded_at
        server.ends_in_order = True
        server.cut()
        eventually(
            lambda: watch.succeeded_at != listed_at, within_s=WITHIN_S, what="another success"
        )
        assert not watch.failures


def test_a_bookmark_moves_the_version(server: FakeApiServer, account: Path) -> None:
    with following(server, account):
        version = server.bookmark()
        server.cut()
        eventually(
            lambda: server.requests[-1][1].get("resourceVersion") == version,
            within_s=WITHIN_S,
            what="a watch from the bookmark on",
        )
    assert server.lists() == 1


def test_pods_are_listed_anew_when_their_changes_are_gone(
    server: FakeApiServer, account: Path
) -> None:
    """The API server keeps changes for some minutes, and ends a watch of older ones with 410."""
    server.put(pod("chat-0"))
    with following(server, account) as watch:
        server.refuse(503, "the server is starting")
        eventually(lambda: watch.problem, within_s=WITHIN_S, what="the refusal")
        server.delete(pod("chat-0"))
        server.put(pod("chat-1"))
        server.compact()
        assert names(watch) == ["chat-0"]
        server.allow()
        becomes(watch, "chat-1")
        assert watch.failures["watch", "gone"] == 1
    assert server.lists() == 2


@pytest.mark.parametrize(
    ("status", "reason", "message"),
    [
        (401, "unauthorized", "Unauthorized"),
        (403, "forbidden", 'User "x" cannot list resource "pods" in the namespace "llm"'),
        (500, "http_status", "etcdserver: leader changed"),
    ],
)
def test_a_refusal_is_logged_in_the_servers_words_and_keeps_the_engines(
    server: FakeApiServer, account: Path, status: int, reason: str, message: str
) -> None:
    server.put(pod("chat-0"))
    with following(server, account) as watch:
        server.refuse(status, message)
        said = f"the API server answers {status}: {message}"
        # The watch that was cut fails first, with words of its own.
        eventually(lambda: watch.problem == said, within_s=WITHIN_S, what=said)
        assert watch.failures["watch", reason] >= 1
        assert names(watch) == ["chat-0"]
        server.allow()
        server.put(pod("chat-1"))
        becomes(watch, "chat-0", "chat-1")
        assert watch.problem is None


def test_a_token_that_was_replaced_is_read_again(server: FakeApiServer, account: Path) -> None:
    with following(server, account) as watch:
        server.token = "another-token"
        server.cut()
        eventually(lambda: watch.problem, within_s=WITHIN_S, what="the refusal")
        (account / "token").write_text("another-token", encoding="utf-8")
        server.put(pod("chat-0"))
        becomes(watch, "chat-0")


def test_a_server_that_is_away_is_named_and_nothing_is_lost(account: Path) -> None:
    with api_server() as server:
        server.put(pod("chat-0"))
        watch = PodWatch(ApiServer(server.url, account), "llm", CHOSEN, READ)
        watch.list()
        server.refuse(410, "too old resource version")
        with pytest.raises(DiscoveryFailed, match="410"):
            watch.list()
    with pytest.raises(DiscoveryFailed, match="the API server cannot be read") as failed:
        watch.list()
    assert failed.value.reason == "unreachable"
    assert names(watch) == ["chat-0"]


def test_only_the_clusters_own_authority_is_trusted(account: Path) -> None:
    certificate, other = (make_certificate(account, name) for name in ("cluster", "other"))
    with api_server(certificate) as server:
        server.put(pod("chat-0"))
        watch = PodWatch(ApiServer(server.url, account), "llm", CHOSEN, READ)
        (account / "ca.crt").write_bytes(other.certificate.read_bytes())
        with pytest.raises(DiscoveryFailed, match="certificate verify failed"):
            watch.list()
        (account / "ca.crt").write_bytes(certificate.certificate.read_bytes())
        watch.list()
        assert names(watch) == ["chat-0"]
    assert server.lists() == 1


def test_the_server_is_found_as_pods_find_it(
    server: FakeApiServer, account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(SettingsInvalid, match="KUBERNETES_SERVICE_HOST is not set"):
        ApiServer(None, account)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", server.url.rpartition(":")[2])
    # That address has TLS in every cluster, and this server has none.
    with pytest.raises(DiscoveryFailed, match=r"cannot be read|invalid path"):
        PodWatch(ApiServer(None, account), "llm", CHOSEN, READ).list()


def test_a_response_that_is_no_list_is_no_end_of_the_engines(
    server: FakeApiServer, account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.put(pod("chat-0"))
    watch = PodWatch(ApiServer(server.url, account), "llm", CHOSEN, READ)
    watch.list()
    for strange, complaint in (({"kind": "PodList"}, "has no 'items'"), ([], "is not a list")):
        monkeypatch.setattr(server, "listed", lambda *_, strange=strange: strange)
        with pytest.raises(DiscoveryFailed, match=complaint):
            watch.list()
    assert names(watch) == ["chat-0"]


@pytest.mark.parametrize("name", ["token", "ca.crt"])
def test_a_pipe_in_the_account_is_not_waited_for(
    server: FakeApiServer, account: Path, name: str
) -> None:
    (account / name).unlink()
    os.mkfifo(account / name)
    with pytest.raises(DiscoveryFailed, match="Is a named pipe; name a regular file"):
        ApiServer(server.url, account).list("/api/v1/pods", {})


def test_an_engine_has_the_name_address_and_port_of_its_pod() -> None:
    assert READ(pod("chat-0")) == ("chat-0", "http://10.0.0.1:8000", "llm/chat-0", "")
    six = READ(pod("chat-0", ip="fd00::1"))
    assert six == ("chat-0", "http://[fd00::1]:8000", "llm/chat-0", "")
    named = READ(pod("chat-0"), with_namespace=True)
    assert named == ("llm/chat-0", "http://10.0.0.1:8000", "llm/chat-0", "")
    # A port may be named by any container.
    assert READ(pod("chat-0"), port="http") == ("chat-0", "http://10.0.0.1:8001", "llm/chat-0", "")
    assert READ(pod("chat-0"), port="metrics") is None
    without_status = pod("chat-0")
    del without_status["status"]
    assert READ(without_status) is None


@pytest.mark.parametrize(
    ("why", "state", "watched"),
    [
        ("it loads its model", {"ready": False}, False),
        ("it is not scheduled", {"phase": "Pending", "ready": False, "ip": None}, False),
        ("it ends on purpose", {"ending": True}, False),
        ("it has ended", {"phase": "Failed", "ready": False, "since": LATER}, False),
        ("its node is lost", {"phase": "Unknown"}, False),
        ("it was ready and hangs", {"ready": False, "since": LATER}, True),
        ("it died and starts again", {"ready": False, "restarts": 1}, True),
    ],
)
def test_a_pod_is_watched_from_ready_to_its_end(
    why: str, state: dict[str, Any], watched: bool
) -> None:
    assert (READ(pod("chat-0", **state)) is not None) is watched, why


RECORDED = Path(__file__).parent / "recorded"
CORE_DNS = FoundEngine(
    "coredns-66bc5c9577-jggwc", "http://10.244.0.3:9153", "kube-system/coredns-66bc5c9577-jggwc"
)


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
def recorded_server(tmp_path: Path) -> Iterator[ApiServer]:
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


def test_recorded_lists_and_events_have_the_engine_of_each_ready_pod(
    recorded_server: ApiServer,
) -> None:
    found = PodWatch(recorded_server, "kube-system", {}, partial(READ, port="metrics"))
    found.list()
    assert found.engines() == {CORE_DNS}
    assert found.problem is None
    assert [event["type"] for event in recorded_server.watch("/api/v1/pods", {}, "0")] == ["ADDED"]
    # As when the list was empty: what is found then comes from the watch.
    found = PodWatch(recorded_server, "kube-system", {}, partial(READ, port=9153))
    found._version = "479"
    stop, changes = threading.Event(), []

    def changed() -> None:
        changes.append(found.engines())
        stop.set()

    found.follow(changed, stop)
    assert changes == [{CORE_DNS}]
    assert found.problem is None
