"""Processor share of polling one engine: scrape, health, host sample, storing and publishing."""

import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from agent.app.engines import EngineMonitors
from agent.app.gpu_jobs import GpuJobs
from agent.outputs.prometheus.hosts import HostBoard
from agent.outputs.prometheus.meter import Meter
from agent.settings import EngineSettings, Settings
from agent.settings.gpu_settings import NvmlSettings
from agent.sources.engines.directory import EngineDirectory
from agent.store.connection import open_engine
from agent.store.migrating import upgrade
from agent.store.minutes import MinuteStore
from agent.store.observations import ObservationStore

TARGET_SHARE = 0.01
INTERVAL_S = 5.0
POLLS = 100

EXPOSITION = Path(__file__).parent.parent / "tests/sources/engines/pages/vllm-0.32.0.txt"


class _ExpositionServer(BaseHTTPRequestHandler):
    """Serves the recorded exposition of a real vLLM."""

    exposition = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(self.exposition)))
        self.end_headers()
        self.wfile.write(self.exposition)

    def log_message(self, *_: object) -> None:
        """Keep the benchmark's output to its results."""


def run() -> bool:
    """Print the share of a core; return whether the target is met."""
    _ExpositionServer.exposition = EXPOSITION.read_bytes()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _ExpositionServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        poll_s = _cpu_per_poll(f"http://127.0.0.1:{server.server_port}", Path(folder))
    server.shutdown()
    share = poll_s / INTERVAL_S
    lines = len(_ExpositionServer.exposition.splitlines())
    print(
        f"scrape, polling vLLM 0.32 ({lines} lines) every {INTERVAL_S:.0f} s: "
        f"{100 * share:.2f} % of a core (target under {100 * TARGET_SHARE:.0f} %), "
        f"{1000 * poll_s:.1f} ms of processor time per poll"
    )
    return share < TARGET_SHARE


def _cpu_per_poll(url: str, folder: Path) -> float:
    engine = open_engine(f"sqlite:///{folder / 'scrape.db'}")
    upgrade(engine)
    meter = Meter((), ["chat-0"])
    chat = EngineSettings(name="chat-0", url=url)
    settings = Settings(engines=(chat,), nvml=NvmlSettings(enabled=False))
    observations = ObservationStore(engine, "bench")
    windows, gpus = MinuteStore(engine, "bench"), GpuJobs(settings, observations, meter)
    monitor = EngineMonitors(observations, windows, meter, gpus, HostBoard()).of_engine(
        chat, EngineDirectory([("chat-0", url)])
    )
    monitor.poll(time.time())
    began = time.thread_time()
    for _ in range(POLLS):
        monitor.poll(time.time())
    return (time.thread_time() - began) / POLLS
