"""What looking at an engine every 5 s costs: page, health, host, judging, storing and showing."""

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

PAGE = Path(__file__).parent.parent / "tests/sources/engines/pages/vllm-0.32.0.txt"


class _PageServer(BaseHTTPRequestHandler):
    """Serves the recorded page of a real vLLM."""

    page = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(self.page)))
        self.end_headers()
        self.wfile.write(self.page)

    def log_message(self, *_: object) -> None:
        """Keep the benchmark's output to its results."""


def run() -> bool:
    """Print the share of a core; whether the target holds."""
    _PageServer.page = PAGE.read_bytes()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _PageServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        poll_s = _cpu_per_poll(f"http://127.0.0.1:{server.server_port}", Path(folder))
    server.shutdown()
    share = poll_s / INTERVAL_S
    print(
        f"scrape, vLLM 0.32 page of {len(_PageServer.page.splitlines())} lines every "
        f"{INTERVAL_S:.0f} s: {100 * share:.2f} % of a core, {1000 * poll_s:.1f} ms a poll "
        f"(target {100 * TARGET_SHARE:.0f} %)"
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
