"""The demo: an agent and a labelled simulated engine that start and end together."""

import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from urllib.parse import parse_qs

import psutil
import pytest
import requests

from agent.catalog.causes import Cause
from agent.demo import ENGINES, coming_faults
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.chromium import opened
from tests.real_parts.processes import ServerProcess
from tests.real_parts.waiting import eventually
from tests.simulated import WITHIN_S, Row, rows_in

ROOT = Path(__file__).parents[1]


def simulators(folder: Path) -> list[int]:
    """The simulators that a demo of this folder started, by process id."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "environ"])
        if "agent.simulator" in (process.info["cmdline"] or ())
        and str(folder) in (process.info["environ"] or {}).get("GOODPUT_STORAGE__FILE", "")
    ]


# While it starts, and when its simulators listen.
@pytest.mark.parametrize(
    ("said", "number", "status"),
    [("", signal.SIGTERM, 0), ("SIMULATED: storing", signal.SIGKILL, -9)],
)
def test_a_demo_that_ends_leaves_no_simulator(
    tmp_path: Path, said: str, number: signal.Signals, status: int
) -> None:
    log, environment = tmp_path / "log", {"GOODPUT_STORAGE__FILE": f"{tmp_path}/goodput.db"}
    command = [sys.executable, "-m", "agent", "demo", "--past", "30s"]
    process = ServerProcess(command, log, environment=environment)
    try:
        process.wait_until(
            lambda: bool(simulators(tmp_path)) and said in log.read_text(), within_s=WITHIN_S
        )
        # The demo alone, not its group.
        psutil.Process(process.pid).send_signal(number)
        assert process.wait(within_s=WITHIN_S) == status
        eventually(lambda: not simulators(tmp_path), within_s=WITHIN_S, what="their end")
    finally:
        process.kill()


# Everything that the page shows


@dataclass(frozen=True, slots=True)
class Guarded:
    """A demo in a folder of its own, which takes spans with a token alone, and none by gRPC."""

    agent: AgentProcess
    folder: Path


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """Its file is the demo's own. Its past has each fault once."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "ingest").write_text("token-of-the-demo")
    ports = AgentPorts.free()
    environment = {
        "GOODPUT_LISTEN__PORT": str(ports.listen),
        "GOODPUT_OTLP__GRPC": "null",
        "GOODPUT_OTLP__HTTP": f"127.0.0.1:{ports.http}",
        "GOODPUT_SECURITY__INGEST_TOKENS": str(folder / "ingest"),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        arguments = ["demo", "--past", "24m"]
        with AgentProcess(arguments, folder, ports.listen, environment) as agent:
            yield Guarded(agent, folder)


@pytest.fixture
def full(guarded: Guarded) -> AgentProcess:
    return guarded.agent


def test_the_demo_labels_its_simulation_everywhere(guarded: Guarded) -> None:
    agent = guarded.agent
    rows = rows_in(agent, 3)
    assert agent.api.summary()["simulated"] is True
    assert 'simulated="true"' in agent.api.exposition()
    page = requests.get(agent.url, timeout=WITHIN_S).text
    assert "SIMULATED: these figures come from the" in page
    assert "SIMULATED: storing 24m of past first" in agent.log()
    assert f"on the page {agent.url}" in agent.log()
    assert "Traceback" not in agent.log()
    assert {row["engine"] for row in rows} <= set(ENGINES)
    assert all("simulated" in row["model"] for row in rows)
    assert {path.name for path in guarded.folder.glob("*.db")} == {"goodput-demo.db"}


WINDOW = "30m"
# Of two engines, once all minutes of the past are computed.
PRICED_S = 2 * 22 * 60.0


def test_the_past_of_the_demo_has_every_figure(full: AgentProcess) -> None:
    def computed() -> bool:
        summary = full.api.summary(window=WINDOW)
        priced_s = (summary["cost"] or {}).get("priced_s") or 0.0
        return priced_s > PRICED_S and summary["causes"] != {}

    eventually(computed, within_s=WITHIN_S, what="the minutes of the past")
    summary = full.api.summary(window=WINDOW)
    assert summary["simulated"] is True
    assert summary["missed"] > 10
    assert summary["requests"] > 500
    # Requests that were open where the past ended have no client that the proxy saw.
    proxied = summary["failures"]["proxy"]
    assert summary["requests"] - 20 <= proxied["requests"] <= summary["requests"]
    assert 0 < proxied["error_ratio"] < 0.1
    for name in ("mfu", "mbu", "attainment", "goodput_rps", "throughput_rps"):
        assert summary[name] > 0
    for name in ("ttft_ms", "tpot_ms", "e2e_ms", "queue_ms", "stream_tokens_per_s"):
        assert None not in summary[name].values(), name
    sources = summary["efficiency"]["sources"]
    for name in ("requests", "engine", "hardware"):
        assert sources[name]["mfu"] > 0, name
    # What the engine estimates, what the rows need and what the GPU counts is one work.
    assert sources["hardware"]["mbu"] == pytest.approx(sources["requests"]["mbu"], rel=0.3)
    assert 0 < summary["efficiency"]["batch_fill"]["requests"] < 1
    for name in ("bill_usd", "idle_usd", "wasted_usd", "usd_per_million_output_tokens"):
        assert summary["cost"][name] > 0, name
    assert len(summary["causes"]) > 3


def test_the_demo_has_tenants_gpus_and_lengths(full: AgentProcess) -> None:
    groups = full.api.breakdown(by="tenant", window=WINDOW)["groups"]
    assert {group["group"] for group in groups} >= {"search", "support", "assistant", "batch"}
    exposition = full.api.exposition()
    assert exposition.count('gpu_up{gpu="GPU-51a1') == len(ENGINES)
    for engine in ENGINES:
        assert f'llm_engine_up{{engine="{engine}"}} 1' in exposition


def test_an_engine_of_the_demo_died_and_returned_and_another_preempted(full: AgentProcess) -> None:
    events = full.api.events(window=WINDOW)
    kinds = {(event["kind"], event["engine"]) for event in events}
    assert kinds >= {
        ("CUDA_OOM", "simulator-1"),
        ("RESTART", "simulator-1"),
        ("KV_PRESSURE", "simulator-0"),
    }


# A round of faults, which comes again and again.
ROUND_S = 1440.0
# Its last requests waited for each other.
QUEUE_S = 30.0


def told_times(log: str) -> dict[str, float]:
    """When each fault comes next, in Unix time, as the first lines of the demo say."""
    line = re.compile(
        r"^(\S+) (\S+),.*SIMULATED: (\d\d:\d\d:\d\d) (.*), on simulator", re.MULTILINE
    )
    times: dict[str, float] = {}
    for day, logged, clock, name in line.findall(log):
        logged_at, at = (datetime.fromisoformat(f"{day}T{each}") for each in (logged, clock))
        # It may come after midnight.
        times[name] = at.timestamp() + 86_400.0 * (at < logged_at)
    return times


def test_the_cause_of_each_fault_is_found_and_it_came_when_the_demo_says(
    full: AgentProcess,
) -> None:
    begun = datetime.now(UTC).isoformat()

    def explained() -> list[Row]:
        # The list takes the agent a second.
        summary = full.api.summary(window=WINDOW)
        if summary["explained"] < summary["missed"]:
            return []
        missed = full.api.requests(verdict="missed", limit="1000")
        before = [row for row in missed if row["ended_at"] < begun]
        return before if all(row["explained_at"] is not None for row in before) else []

    missed = eventually(explained, within_s=WITHIN_S, what="the explanations")
    times = told_times(full.log())
    for coming in coming_faults():
        begin = times[coming.fault.name] - ROUND_S
        end = begin + coming.fault.for_s + QUEUE_S
        found = Counter(row["cause"] for row in missed if begin <= started_s(row) < end)
        assert found, f"{coming.fault.name}: nothing missed"
        (first, _), *_ = found.most_common(1)
        assert first in coming.fault.causes, (coming.fault.name, found)
        assert found[Cause.UNEXPLAINED] < 0.1 * found.total(), (coming.fault.name, found)


def started_s(row: Row) -> float:
    return datetime.fromisoformat(row["started_at"]).timestamp()


def test_every_fault_of_the_demo_has_a_name_a_cause_and_a_time_of_its_own() -> None:
    coming = coming_faults()
    assert len(coming) == 8
    gaps = [later.after_s - earlier.after_s for earlier, later in pairwise(coming)]
    # Every three to four minutes, also from the last to the first.
    gaps.append(coming[0].after_s + ROUND_S - coming[-1].after_s)
    assert all(180 <= gap <= 240 for gap in gaps), gaps
    for each in coming:
        assert each.fault.every_s == ROUND_S
        assert each.fault.causes


def test_the_cause_of_the_worst_miss_is_two_clicks_from_now(full: AgentProcess) -> None:
    with opened(full.url) as there:
        page = there.page
        page.get_by_role("link", name="The worst missed requests").click()
        worst = page.get_by_role("table").get_by_role("row").nth(1)
        worst.filter(has_text="missed: ").wait_for()
        worst.get_by_role("link").click()
        page.get_by_text("It missed, ").wait_for()
        asked = parse_qs(page.url.partition("?")[2])
        shown = page.get_by_text("It missed, ").inner_text()
        assert there.problems == []
    found = full.api.json(f"/api/v1/requests/{asked['id'][0]}", {"span_id": asked["span"][0]})
    # Others that took longer may have missed since.
    listed = full.api.requests(verdict="missed", worst="e2e", limit="10")
    assert found["span_id"] in {each["span_id"] for each in listed}
    assert found["cause"].replace("_", " ") in shown


def test_the_demo_goes_on_where_its_past_ends_and_sends_spans_without_grpc_and_with_a_token(
    full: AgentProcess,
) -> None:
    started = datetime.now(UTC).isoformat()

    def joined() -> bool:
        newest = full.api.json("/api/v1/requests", {"limit": "200", "tenant": "search"})["items"]
        live = [row for row in newest if row["started_at"] > started]
        return any(row["vantage"] == "joined" for row in live)

    eventually(joined, within_s=WITHIN_S, what="a live request with its span")
    restarts = full.api.events(window=WINDOW, kind="RESTART", engine="simulator-0")
    assert restarts == []
