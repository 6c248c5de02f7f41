"""What clients of the running agent and its engines may send to hurt it, and do not."""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest
import requests

from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.metric_pages import total
from tests.real_parts.ports import free_port
from tests.real_parts.waiting import eventually

WITHIN_S = 60.0
RSS_BELOW_MIB = 400
MIB = 1024 * 1024
CHAT = "/v1/chat/completions"


class Engine(ThreadingHTTPServer):
    """A fake engine that keeps request bodies; the path of a request selects its response."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[bytes] = []
        self.working = 0
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def count(self, change: int) -> None:
        """Count the endless responses that are under way."""
        with self.lock:
            self.working += change

    def handle_error(self, *_: Any) -> None:
        """Log nothing: clients leave."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Engine

    def do_GET(self) -> None:
        """Respond without end to /endless, else shortly."""
        if self.path == "/endless":
            self._without_end()
        elif self.path == "/large":
            self._respond(bytes(16 * MIB))
        elif self.path == "/switch":
            self.wfile.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\nanything")
            self.close_connection = True
        else:
            self._respond()

    def do_POST(self) -> None:
        """Keep the body."""
        self.server.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        self._respond()

    def _respond(self, body: bytes = b"{}") -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _without_end(self) -> None:
        """Say that it works until the other side closes the connection."""
        self.server.count(1)
        self.connection.settimeout(2 * WITHIN_S)
        try:
            while self.connection.recv(1024):
                pass
        except OSError:
            pass
        self.close_connection = True
        self.server.count(-1)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


class AttackedAgent(AgentProcess):
    """An agent with few descriptors and short time-outs."""

    module: ClassVar[str] = "tests.real_parts.agent_under_attack"


class Attacked:
    """A running agent with a proxy before one engine."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        self.engine = engine
        self.ports, self.proxy = AgentPorts.free(), free_port()
        self.url = f"http://127.0.0.1:{self.proxy}"
        settings = {
            "engines": [
                {
                    "name": "engine-0",
                    "url": f"http://127.0.0.1:{engine.server_port}",
                    "scrape_interval": "60s",
                }
            ],
            "proxy": {"listen": f"127.0.0.1:{self.proxy}", "join_wait": "0.1s"},
            "nvml": {"enabled": False},
        }
        self.agent = AttackedAgent.with_settings(folder, self.ports, settings)

    def connect(self, port: int | None = None) -> socket.socket:
        """A connection to the proxy, or to another port."""
        return socket.create_connection(("127.0.0.1", port or self.proxy), WITHIN_S)

    def row(self, request_id: str) -> dict[str, Any]:
        """The row of one request."""

        def read() -> list[dict[str, Any]]:
            rows = self.agent.api.requests(limit="1000")
            return [row for row in rows if row["request_id"] == request_id]

        return eventually(read, within_s=WITHIN_S, what=f"the row of {request_id}")[0]

    def cut(self, setting: str, reason: str) -> float:
        """How many clients were cut off."""
        exposition = self.agent.api.exposition()
        return total(exposition, "llm_agent_clients_cut_total", setting=setting, reason=reason)

    def counts_cut(self, setting: str, reason: str, number: float) -> None:
        """Return when so many were cut off; the proxy's workers say it once a second."""
        eventually(
            lambda: self.cut(setting, reason) >= number, within_s=WITHIN_S, what=f"{reason} counted"
        )


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """One agent for all attacks."""
    with Engine() as engine:
        attacked = Attacked(tmp_path_factory.mktemp("attacked"), engine)
        with attacked.agent:
            yield attacked


def head(request_id: str, length: int, more: str = "") -> bytes:
    """The head of a chat request."""
    lines = f"Host: proxy\r\nX-Request-Id: {request_id}\r\nContent-Length: {length}\r\n{more}\r\n"
    return f"POST {CHAT} HTTP/1.1\r\n{lines}".encode()


def until_closed(connection: socket.socket) -> bytes:
    """What comes until the agent closes the connection, which it must do in time."""
    received = b""
    try:
        while data := connection.recv(4096):
            received += data
    except ConnectionError:
        pass
    return received


@pytest.mark.slow
def test_bodies_of_any_kind_are_measured_in_bounded_memory(attacked: Attacked) -> None:
    for name, filling in (("lists", b"[],"), ("keys", b'"a":1,')):
        fields = b'{"messages":[' + filling * (31 * MIB // 3) + b'1],"model":"m"}'
        if name == "keys":
            fields = b"{" + filling * (31 * MIB // 6) + b'"model":"m"}'
        response = requests.post(
            attacked.url + CHAT, fields, headers={"X-Request-Id": name}, timeout=WITHIN_S
        )
        assert response.status_code == 200
        assert attacked.engine.bodies.pop() == fields
        assert attacked.row(name)["model"] == "m"
    assert attacked.agent.peak_mib < RSS_BELOW_MIB


@pytest.mark.slow
def test_clients_that_stop_in_a_large_body_hold_little_for_a_short_time(
    attacked: Attacked,
) -> None:
    with ExitStack() as stack:
        stopped = [stack.enter_context(attacked.connect()) for _ in range(20)]
        for number, connection in enumerate(stopped):
            # The engine does not read what is relayed before the whole body is there. On a busy
            # machine the time for the body may end before.
            with suppress(ConnectionError):
                connection.sendall(head(f"stops-{number}", 32 * MIB) + bytes(8 * MIB))
        response = requests.post(
            attacked.url + CHAT,
            json={"model": "small", "messages": ["x" * 100_000]},
            headers={"X-Request-Id": "meanwhile"},
            timeout=WITHIN_S,
        )
        assert response.status_code == 200
        assert attacked.row("meanwhile")["model"] == "small"
        for connection in stopped:
            # A reset of a client that still sends may take the response with it.
            assert until_closed(connection)[:12] in (b"", b"HTTP/1.1 408")
    assert attacked.agent.peak_mib < RSS_BELOW_MIB
    assert attacked.row("stops-0")["status"] == "cancelled"
    attacked.counts_cut("proxy.listen", "body_too_slow", 20)


def test_a_client_that_leaves_during_its_upload_has_a_row(attacked: Attacked) -> None:
    with attacked.connect() as connection:
        connection.sendall(head("leaves", 1000) + b"a" * 300)
    row = attacked.row("leaves")
    assert (row["status"], row["error"], row["input_bytes"]) == ("cancelled", "client_gone", 300)


def test_idle_clients_of_other_ports_do_not_keep_clients_from_the_proxy(
    attacked: Attacked,
) -> None:
    ports = (attacked.ports.listen, attacked.ports.http, attacked.ports.grpc)
    with ExitStack() as stack:
        for port in ports:
            for _ in range(100):
                stack.enter_context(attacked.connect(port))
        for number in range(10):
            client = stack.enter_context(attacked.connect())
            client.sendall(head(f"new-{number}", 2) + b"{}")
            assert client.recv(12) == b"HTTP/1.1 200"
    assert attacked.cut("listen", "too_many") > 0
    assert attacked.cut("otlp.http", "too_many") > 0


def test_idle_clients_of_the_proxy_give_way_to_new_ones(attacked: Attacked) -> None:
    with ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(attacked.connect())
        assert requests.get(f"{attacked.url}/v1/models", timeout=WITHIN_S).status_code == 200
    attacked.counts_cut("proxy.listen", "too_many", 1)


def test_heads_that_never_end_are_cut_off(attacked: Attacked) -> None:
    for setting, port in (
        ("listen", attacked.ports.listen),
        ("otlp.http", attacked.ports.http),
        ("proxy.listen", attacked.proxy),
    ):
        with attacked.connect(port) as connection, attacked.connect(port) as silent:
            connection.sendall(b"POST / HTTP/1.1\r\nHost: ")
            assert until_closed(connection) == until_closed(silent) == b""
        attacked.counts_cut(setting, "head_too_slow", 2)


def test_large_heads_together_have_limited_room(attacked: Attacked) -> None:
    # Each line takes many times its five bytes in memory.
    lines = b"A:x\r\n" * 12_000
    for setting, port, count in (
        ("listen", attacked.ports.listen, 6),
        ("otlp.http", attacked.ports.http, 6),
        ("proxy.listen", attacked.proxy, 24),
    ):
        before = attacked.cut(setting, "too_many")
        with ExitStack() as stack:
            clients = [stack.enter_context(attacked.connect(port)) for _ in range(count)]
            for client in clients:
                client.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\n" + lines)
            # Usual requests pass meanwhile.
            response = requests.get(f"http://127.0.0.1:{port}/", timeout=WITHIN_S)
            assert response.status_code != 503
            assert sum(b" 503 " in until_closed(client) for client in clients) >= count - 1
        attacked.counts_cut(setting, "too_many", before + count - 1)


def test_requests_that_wait_for_their_turn_have_limited_room(attacked: Attacked) -> None:
    request = b"GET /endless HTTP/1.1\r\nHost: proxy\r\n\r\n"
    with attacked.connect() as client:
        client.setblocking(False)
        client.send(request * 3000)
        eventually(lambda: attacked.engine.working == 0, within_s=WITHIN_S, what="none at work")
        client.settimeout(WITHIN_S)
        assert until_closed(client) == b""


def test_responses_that_nobody_reads_have_limited_room(attacked: Attacked) -> None:
    with ExitStack() as stack:
        for _ in range(24):
            client = stack.enter_context(attacked.connect())
            client.sendall(b"GET /large HTTP/1.1\r\nHost: proxy\r\n\r\n")
        attacked.counts_cut("proxy.listen", "responses_wait", 1)
        response = requests.get(f"{attacked.url}/v1/models", timeout=WITHIN_S)
        assert response.status_code == 200


def test_an_offer_of_http_2_leaves_the_body(attacked: Attacked) -> None:
    offer = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"
    attacked.engine.bodies.clear()
    with attacked.connect() as connection:
        connection.sendall(head("h2c", 15, offer) + b'{"model": "m2"}')
        response = b""
        # A client that leaves earlier has cancelled its request.
        while not response.endswith(b"{}"):
            response += connection.recv(4096)
    assert response.startswith(b"HTTP/1.1 200")
    assert attacked.engine.bodies == [b'{"model": "m2"}']
    assert attacked.row("h2c")["model"] == "m2"


def test_the_engine_stops_for_clients_that_pipelined_and_left(attacked: Attacked) -> None:
    request = b"GET /endless HTTP/1.1\r\nHost: proxy\r\n\r\n"
    # So much that nothing more is read from the client, not even its end. The rest fits into the
    # kernel's buffer of the proxy: behind what does not fit there, the end would not be sent.
    more = request + head("pipelined", 10 * MIB) + bytes(160 * 1024)
    with ExitStack() as stack:
        for number in range(6):
            client = stack.enter_context(attacked.connect())
            client.setblocking(False)
            client.send(request + (more if number % 2 else request))
        eventually(lambda: attacked.engine.working == 6, within_s=WITHIN_S, what="6 at work")
    eventually(lambda: attacked.engine.working == 0, within_s=WITHIN_S, what="none at work")


def test_what_is_wrong_with_each_request_is_logged_once_and_counted(attacked: Attacked) -> None:
    before = attacked.cut("proxy.listen", "malformed")
    for _ in range(3):
        response = requests.get(f"{attacked.url}/switch", timeout=WITHIN_S)
        assert response.status_code == 502
        with attacked.connect() as connection:
            connection.sendall(b"NONSENSE\r\n\r\n")
            assert until_closed(connection).startswith(b"HTTP/1.1 400")
    attacked.counts_cut("proxy.listen", "malformed", before + 3)
    assert attacked.cut("proxy.listen", "malformed") == before + 3
    log = attacked.agent.log()
    assert log.count("(malformed)") == 1
    assert "Traceback" not in log
