"""An hour of traffic that overfills the KV cache causes KV_PRESSURE events only.

The agent reads the simulator's exposition and an engine's log in virtual time.
"""

from collections import Counter
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

import pytest
import requests
from requests.adapters import BaseAdapter

from agent.analysis.failures import DetectionLimits
from agent.catalog import engine_facts as fact
from agent.pipeline.gpu_inventory import GpuInventory
from agent.pipeline.monitors import EngineMonitor
from agent.records.engine import EngineSample
from agent.records.event import Event, EventKind
from agent.records.host import HostSample
from agent.simulator.batching import Batch
from agent.simulator.engine_steps import BatchLoad
from agent.simulator.scenario import Decode, KvCache, Prefill, Scenario, TokenLengths
from agent.simulator.simulated_metrics import MetricsPage
from agent.simulator.traffic import planned_requests
from agent.sources.engines.engine_source import EngineSource, ScrapeResult
from agent.sources.engines.health import HealthProbe
from agent.sources.host.source import HostSource
from tests.sources.host.machine import PaperMachine

pytestmark = pytest.mark.slow

HOUR_S = 3600.0
INTERVAL_S = 15.0
STARTED_AT = 1_795_000_000.0
URL = "http://127.0.0.1:8000"
CGROUP = "0::/engine\n"

# Twice as many tokens as the cache holds; slow steps, so that an hour has few of them.
OVERFULL = Scenario(
    max_model_len=1000,
    arrival_rate=1.0,
    input_tokens=TokenLengths(median=60, sigma=0.6, min=10, max=600),
    output_tokens=TokenLengths(median=120, sigma=0.4, min=20, max=300),
    prefill=Prefill(tokens_per_s=1000.0, floor_s=0.2),
    decode=Decode(base_s=0.5, per_running_s=0.02),
    max_num_seqs=16,
    max_num_batched_tokens=800,
    kv_cache=KvCache(blocks=100, block_tokens=10),
    abort_ratio=0.1,
)

# Log lines of vLLM 0.32 between its statistics, with prompts and paths of users.
CHATTER = (
    '(APIServer pid=10) INFO:     10.0.0.9:50150 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
    '(APIServer pid=10) INFO:     10.0.0.9:50150 - "GET /metrics HTTP/1.1" 200 OK',
    '(APIServer pid=10) INFO:     10.0.0.9:50152 - "GET /v1/models?EngineDeadError HTTP/1.1" 200',
    "(APIServer pid=10) INFO 11-21 04:34:41 [request_logger.py:52] Received request chatcmpl-1: "
    "prompt: 'RuntimeError: CUDA error: an illegal memory access, EngineDeadError. Why?'",
    "(APIServer pid=10) INFO 11-21 04:34:42 [async_llm.py:619] Aborted request(s) chatcmpl-2.",
)
STATS = (
    "(APIServer pid=10) INFO 11-21 04:34:50 [loggers.py:310] Engine 000: Avg prompt throughput: "
    "112.3 tokens/s, Avg generation throughput: 40.1 tokens/s, Running: {running} reqs, "
    "Waiting: {waiting} reqs, GPU KV cache usage: {usage:.1%}, Prefix cache hit rate: 0.0%"
)


class SimulatedEngine(BaseAdapter):
    """The simulator as an HTTP adapter, in the test's time; some responses fail."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        scenario = OVERFULL.model_copy(update={"seed": random.randrange(1000)})
        self._batch = Batch(scenario, planned_requests(scenario, lambda: "chatcmpl-hour"))
        self._metrics = MetricsPage(scenario)
        self._random = random
        self.failed_scrapes = 0
        self.may_fail = False

    def run_until(self, at_s: float) -> BatchLoad:
        while (start_s := self._batch.next_start_s()) <= at_s:
            self._metrics.observe(self._batch.end(self._batch.begin(start_s)))
        return self._batch.load

    def send(self, request: requests.PreparedRequest, *_: Any, **__: Any) -> requests.Response:
        assert request.url is not None
        response = requests.Response()
        response.status_code, response.raw = 200, BytesIO()
        if request.url.endswith("/metrics"):
            response.raw = BytesIO(self._exposition_or_failure())
        elif self._random.random() < 0.1:
            raise requests.ReadTimeout
        return response

    def _exposition_or_failure(self) -> bytes:
        draw = self._random.random() if self.may_fail else 1.0
        # Two failed scrapes in a row would be one event.
        self.may_fail = draw >= 0.02
        self.failed_scrapes += draw < 0.01
        if draw < 0.01:
            raise self._random.choice([requests.ReadTimeout, requests.ConnectionError])
        exposition = self._metrics.render()
        return exposition[: len(exposition) // 2] if draw < 0.02 else exposition

    def close(self) -> None:
        """Nothing is open."""


class Hour:
    """The agent's monitor of an engine; the test sets its clock."""

    def __init__(self, folder: Path, random: Random) -> None:
        self.random = random
        self.engine = SimulatedEngine(random)
        self.machine = PaperMachine(folder)
        self.machine.listens({4711: 8000})
        self.machine.cgroup_v2("/engine", (10, 11))
        self.log = folder / "vllm.log"
        self.log.touch()
        self.at_s = 0.0
        self.events: list[Event] = []
        self.samples: list[EngineSample] = []
        self.host_samples: list[HostSample] = []
        self.monitor = self._monitor()

    def _monitor(self) -> EngineMonitor:
        session = requests.Session()
        session.mount("http://", self.engine)
        machine = self.machine
        host = HostSource(url=URL, log=self.log, proc=machine.proc, cgroups=machine.cgroups)
        return EngineMonitor(
            "chat",
            read_engine=EngineSource(name="chat", url=URL, session=session).read,
            read_health=HealthProbe(URL, session).status,
            read_host=host.read,
            close_host=host.close,
            gpus=GpuInventory({"chat": ()}),
            limits=DetectionLimits(),
            on_scrape=self._scraped,
            on_host=lambda _engine, sample: self.host_samples.append(sample),
            on_event=self.events.append,
            store=lambda: None,
            monotonic=lambda: self.at_s,
        )

    def _scraped(self, result: ScrapeResult) -> None:
        if result.sample is not None:
            self.samples.append(result.sample)

    def poll(self) -> None:
        load = self.engine.run_until(self.at_s)
        self._write(load)
        for pid, title in ((10, ""), (11, "VLLM::EngineCore")):
            self.machine.runs(
                pid,
                parent=pid - 9 if pid == 10 else 10,
                title=title,
                state=self.random.choice("RSSD"),
                sockets=(4711,) if pid == 10 else (),
                cgroup=CGROUP,
            )
        self.monitor.poll(STARTED_AT + self.at_s)

    def _write(self, load: BatchLoad) -> None:
        if self.random.random() < 0.01:
            self.log.rename(self.log.with_suffix(".1"))
        stats = STATS.format(running=load.running, waiting=load.waiting, usage=load.kv_usage)
        lines = [*self.random.choices(CHATTER, k=self.random.randrange(4)), stats]
        with self.log.open("a") as file:
            file.writelines(f"{line}\n" for line in lines)


def test_an_hour_of_heavy_preemption_is_kv_pressure_and_no_other_event(tmp_path: Path) -> None:
    random = Random(2)
    hour = Hour(tmp_path, random)
    while hour.at_s < HOUR_S:
        hour.poll()
        hour.at_s += INTERVAL_S * random.uniform(0.8, 1.2) * (10 if random.random() < 0.01 else 1)
    hour.monitor.close()
    assert (hour.samples[-1].fact(fact.PREEMPTIONS.name) or 0) > 300
    assert all(len(sample.processes or ()) == 2 for sample in hour.host_samples)
    assert sum(sample.log.lines for sample in hour.host_samples if sample.log) > len(
        hour.host_samples
    )
    counts = Counter(event.kind for event in hour.events)
    assert hour.engine.failed_scrapes > 0
    assert counts.pop(EventKind.UNREACHABLE) == hour.engine.failed_scrapes
    assert counts.keys() == {EventKind.KV_PRESSURE}
