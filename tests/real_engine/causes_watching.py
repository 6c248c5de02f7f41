"""Two agents that watch one engine, with its plugin and by spans and samples alone."""

import statistics
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from agent.catalog.causes import Cause
from tests.real_engine.causes_made import Asked, Fault, Scene, Traffic
from tests.real_engine.watching import ENGINE, SPANS_ARRIVE_WITHIN_S, Row
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.collector import SpanRelay
from tests.real_parts.ports import free_port
from tests.real_parts.vllm import Vllm
from tests.real_parts.waiting import eventually

# So many times as long as usual is missed: a crowded machine alone does not do that.
TIMES_USUAL = 5.0
# An engine that is alone on its machine sends faster than a client can tell.
LEAST_TTFT_S, LEAST_TPOT_S = 0.005, 0.001
PLUGIN, ALONE = "with the plugin", "with spans and samples alone"
USUAL = "usual"
# A process that waits for so much of its time is short of a processor: as the agent says of steps
# (`STARVED_SHARE` in agent/analysis/causes/engine_rules.py), of which it sees finer parts.
STARVED = 0.1


@dataclass(frozen=True, slots=True)
class Watch:
    """The scene, and what the agents of both views say of its requests."""

    scene: Scene
    agents: dict[str, AgentProcess]
    crowded: set[str] = field(default_factory=set)

    def make(self, fault: Fault) -> None:
        """Make a fault, and note whether other programs took the engine's processor meanwhile."""
        before = _scheduled(self.scene.engine)
        fault.make(self.scene)
        ran_s, waited_s = (
            b - a for a, b in zip(before, _scheduled(self.scene.engine), strict=True)
        )
        if waited_s >= STARVED * (ran_s + waited_s):
            self.crowded.add(fault.name)

    def said(self, faults: Sequence[Fault]) -> "Said":
        """What each view says, once all requests have rows and those that missed have causes."""
        names = [*(name for fault in faults for name in fault.of), USUAL]
        rows = {view: self._rows(agent, names) for view, agent in self.agents.items()}
        return Said(rows, frozenset(self.crowded))

    def _rows(self, agent: AgentProcess, names: Collection[str]) -> list[Row]:
        expected = sum(self.scene.traffic.asked[name] for name in names)

        def settled() -> list[Row]:
            rows = [row for row in agent.api.requests() if name_of(row) in names]
            open_ = [row for row in rows if not row["counted"] or _waits(row)]
            return rows if len(rows) == expected and not open_ else []

        return eventually(settled, within_s=SPANS_ARRIVE_WITHIN_S, what=f"{expected} rows")


def _scheduled(engine: Vllm) -> tuple[float, float]:
    """The seconds that the process that computes ran, and was ready and had no processor."""
    children = psutil.Process(engine.core_pid).children(recursive=True)
    worker = next(child.pid for child in children if "Worker" in " ".join(child.cmdline()))
    ran, waited, _ = Path(f"/proc/{worker}/schedstat").read_text(encoding="ascii").split()
    return int(ran) / 1e9, int(waited) / 1e9


def _waits(row: Row) -> bool:
    return row["verdict"] == "missed" and row["cause"] is None


def name_of(row: Row) -> str:
    """The name with which a request's id begins; the engine puts a prefix before it."""
    request_id: str = row["request_id"] or ""
    return request_id.removeprefix("chat").removeprefix("cmpl-").partition("-")[0]


@dataclass(frozen=True, slots=True)
class Said:
    """The rows of each view, and the faults during which other programs were in the way."""

    rows: dict[str, list[Row]]
    crowded: frozenset[str]

    def split(self, view: str, fault: Fault) -> tuple[int, int, int]:
        """How many of a fault's missed requests have a right cause, none, and a wrong one.

        On a crowded machine the lack of a processor is true, besides.
        """
        causes = self.causes(view, fault)
        right = set(fault.causes if view == PLUGIN else fault.causes | fault.coarser)
        if fault.name in self.crowded:
            right.add(Cause.CPU_STARVED)
        own = sum(count for cause, count in causes.items() if cause in right)
        unexplained = causes[Cause.UNEXPLAINED]
        return own, unexplained, causes.total() - own - unexplained

    def causes(self, view: str, fault: Fault) -> Counter[str]:
        """The top causes of a fault's missed requests."""
        return Counter(row["cause"] for row in self._missed(view, fault.of))

    def usual_missed(self, view: str) -> float:
        """The share of missed requests while there was no fault."""
        usual = [row for row in self.rows[view] if name_of(row) == USUAL]
        return len(self._missed(view, (USUAL,))) / len(usual)

    def _missed(self, view: str, names: Collection[str]) -> list[Row]:
        rows = self.rows[view]
        return [row for row in rows if name_of(row) in names and row["verdict"] == "missed"]


@contextmanager
def watched(
    folder: Path, engine: Vllm, spans: AgentPorts, plugin_socket: Path, usual: Sequence[Asked]
) -> Iterator[Watch]:
    """Both agents, with limits some times of what usual requests took.

    The engine sends its spans to a port of `spans`, and both agents get them.
    """
    proxy = free_port()
    settings = _settings(engine, usual)
    own: dict[str, Any] = {"proxy": {"listen": f"127.0.0.1:{proxy}", "engine": ENGINE}}
    ports = {view: AgentPorts.free() for view in (PLUGIN, ALONE)}
    with_plugin = {**settings["engines"][0], "plugin_socket": str(plugin_socket)}
    (folder / "plugin").mkdir()
    (folder / "alone").mkdir()
    with (
        AgentProcess.with_settings(folder / "alone", ports[ALONE], settings) as alone,
        AgentProcess.with_settings(
            folder / "plugin", ports[PLUGIN], {**settings, **own, "engines": [with_plugin]}
        ) as plugin,
        SpanRelay(spans, [each.grpc for each in ports.values()]),
    ):
        traffic = Traffic(f"http://127.0.0.1:{proxy}", engine.model)
        yield Watch(Scene(traffic, engine), {PLUGIN: plugin, ALONE: alone})


def _settings(engine: Vllm, usual: Sequence[Asked]) -> dict[str, Any]:
    ttft_s = max(LEAST_TTFT_S, statistics.median(asked.ttft_s for asked in usual))
    tpot_s = max(LEAST_TPOT_S, statistics.median(asked.tpot_s for asked in usual))
    limits = {
        "ttft_ms": round(1000 * TIMES_USUAL * ttft_s),
        "tpot_ms": round(1000 * TIMES_USUAL * tpot_s),
    }
    return {
        "engines": [{"name": ENGINE, "url": engine.url, "scrape_interval": "1s"}],
        "nvml": {"enabled": False},
        "objectives": [{"name": "chat", **limits}],
    }
