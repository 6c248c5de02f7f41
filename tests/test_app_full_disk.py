"""The agent on a full disk: exports get 503 and are counted, and go on once there is room."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from resource import RLIM_INFINITY, RLIMIT_FSIZE
from typing import Any

import psutil
import pytest
import requests

from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.metric_pages import total
from tests.real_parts.ports import free_port
from tests.real_parts.span_sender import constant_load
from tests.real_parts.storing_process import WITHIN_S, all_published, has_all_once
from tests.real_parts.waiting import eventually

pytestmark = pytest.mark.slow

DISK_MIB = 16
PAUSE_S = 0.05


class SmallDisk:
    """A file system of some MiB in memory, which `fill` fills to its last byte.

    Where nothing may be mounted, no file of the process grows instead.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        size = f"size={DISK_MIB}m"
        mount = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)]
        self.is_mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
        self._ballast = folder / "ballast"

    def fill(self, pid: int) -> None:
        """Take all that is free."""
        if not self.is_mounted:
            self._limit(pid, max(file.stat().st_size for file in self.folder.iterdir()))
            return
        with self._ballast.open("ab", buffering=0) as ballast:
            free = os.statvfs(self.folder)
            for _ in range(free.f_bfree):
                try:
                    ballast.write(b"\0" * free.f_bsize)
                except OSError:
                    return

    def make_room(self, pid: int) -> None:
        """Give it back."""
        if self.is_mounted:
            self._ballast.unlink()
        else:
            self._limit(pid, RLIM_INFINITY)

    def _limit(self, pid: int, size: int) -> None:
        psutil.Process(pid).rlimit(RLIMIT_FSIZE, (size, RLIM_INFINITY))

    def close(self) -> None:
        """Take it away, also while a file of it is open."""
        if self.is_mounted:
            subprocess.run(["umount", "--lazy", self.folder], check=True)


@contextmanager
def agent_on(disk: SmallDisk, ports: AgentPorts, storage: dict[str, Any]) -> Iterator[AgentProcess]:
    """An agent whose files lie on the disk, but for its log."""
    folder = disk.folder.parent
    engines = [{"name": "chat-0", "url": f"http://127.0.0.1:{free_port()}"}]
    settings = {"name": "agent-0", "engines": engines, "storage": storage}
    with AgentProcess.with_settings(folder, ports, settings) as agent:
        yield agent


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    (folder := tmp_path / "disk").mkdir()
    disk = SmallDisk(folder)
    yield disk
    disk.close()


def store_says(agent: AgentProcess) -> str:
    """What /readyz says of the store; empty while the agent is ready."""
    response = requests.get(f"{agent.url}/readyz", timeout=WITHIN_S)
    return "" if response.status_code == 200 else str(response.json()["parts"]["store"])


def test_a_full_disk_is_told_counted_and_survived(disk: SmallDisk, postgres_url: str) -> None:
    ports = AgentPorts.free()
    file = disk.folder / "own.db"
    storage = {"file": str(file), "publish_to": postgres_url}
    with agent_on(disk, ports, storage) as agent:
        with constant_load(ports.http, PAUSE_S) as load:
            load.more_acknowledged(5, of_each=True)
            disk.fill(agent.pid)
            eventually(lambda: load.statuses[503] > 5, within_s=WITHIN_S, what="refusals")
            said = eventually(lambda: store_says(agent), within_s=WITHIN_S, what="/readyz")
            assert "the disk" in said
            page = agent.api.exposition()
            assert total(page, "llm_agent_exports_refused_total", reason="busy") > 0
            assert total(page, "llm_agent_store_failures_total", what="requests") > 0
            disk.make_room(agent.pid)
            load.more_acknowledged(5, of_each=True)
        assert load.statuses.keys() == {200, 503}
        eventually(lambda: not store_says(agent), within_s=WITHIN_S, what="readiness")
        all_published(file)
        has_all_once(postgres_url, load)
        has_all_once(f"sqlite:///{file}", load)
