"""Processor share of polling one engine, and the processor time of the agent's exposition."""

import tempfile
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from agent.app.engines import EngineMonitors, GpuJobs
from agent.outputs.prometheus.agent_exposition import AgentExposition, HostBoard
from agent.outputs.prometheus.meter import Meter
from agent.pipeline.monitors import EngineMonitor
from agent.settings import EngineSettings, Settings
from agent.settings.engine_settings import NvmlSettings
from agent.sources.engines.directory import EngineDirectory
from agent.store.connection import open_engine
from agent.store.migrating import upgrade
from agent.store.minutes import MinuteStore
from agent.store.observations import ObservationStore

TARGET_SHARE = 0.01
# Of the time as OpenMetrics over the time as plain text, for the same figures.
TARGET_RATIO = 1.5
INTERVAL_S = 5.0
POLLS = 100
ENGINES = 12
NAMES = [f"chat-{number}" for number in range(ENGINES)]
EXPOSITIONS = 20
# What Prometheus 2.42 sends.
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)

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
    """Print the share of a core and the ratio; return whether both targets are met."""
    _ExpositionServer.exposition = EXPOSITION.read_bytes()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _ExpositionServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    meter = Meter((), NAMES)
    with tempfile.TemporaryDirectory() as folder:
        monitors = _monitors(f"http://127.0.0.1:{server.server_port}", Path(folder), meter)
        for monitor in monitors:
            monitor.poll(time.time())
        poll_s = _cpu_s(lambda: monitors[0].poll(time.time()), POLLS)
    server.shutdown()
    return all([_report_share(poll_s), _report_ratio(meter)])


def _report_share(poll_s: float) -> bool:
    share = poll_s / INTERVAL_S
    lines = len(_ExpositionServer.exposition.splitlines())
    print(
        f"scrape, polling vLLM 0.32 ({lines} lines) every {INTERVAL_S:.0f} s: "
        f"{100 * share:.2f} % of a core (target under {100 * TARGET_SHARE:.0f} %), "
        f"{1000 * poll_s:.1f} ms of processor time per poll"
    )
    return share < TARGET_SHARE


def _report_ratio(meter: Meter) -> bool:
    exposition = AgentExposition(meter, ("bench", "0", ""))
    exposition.render(PROMETHEUS)
    text_s = _cpu_s(lambda: exposition.render("text/plain"), EXPOSITIONS)
    prometheus_s = _cpu_s(lambda: exposition.render(PROMETHEUS), EXPOSITIONS)
    ratio = prometheus_s / text_s
    print(
        f"scrape, own exposition of {ENGINES} engines: {1000 * text_s:.1f} ms as text, "
        f"{1000 * prometheus_s:.1f} ms as Prometheus 2 asks for it: "
        f"{ratio:.2f} times (target under {TARGET_RATIO:.1f})"
    )
    return ratio < TARGET_RATIO


def _monitors(url: str, folder: Path, meter: Meter) -> list[EngineMonitor]:
    store = open_engine(f"sqlite:///{folder / 'scrape.db'}")
    upgrade(store)
    engines = [EngineSettings(name=name, url=url) for name in NAMES]
    settings = Settings(engines=tuple(engines), nvml=NvmlSettings(enabled=False))
    observations = ObservationStore(store, "bench")
    windows, gpus = MinuteStore(store, "bench"), GpuJobs(settings, observations, meter)
    monitors = EngineMonitors(observations, windows, meter, gpus, HostBoard())
    directory = EngineDirectory([(name, url) for name in NAMES])
    return [monitors.of_engine(engine, directory) for engine in engines]


def _cpu_s(act: Callable[[], object], times: int) -> float:
    began = time.thread_time()
    for _ in range(times):
        act()
    return (time.thread_time() - began) / times
