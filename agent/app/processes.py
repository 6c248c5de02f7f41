"""The processes of an agent with a proxy: its workers, and the agent itself."""

import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from agent.app.connection_limits import PROXY, connections, raise_descriptors
from agent.app.proxy_worker import Workplace, run_worker
from agent.app.stopping import AGENT_STOPS_WITHIN_S, WORKER_FLUSHES_WITHIN_S
from agent.app.supervising import ProcessPart, Supervisor
from agent.errors import SettingsInvalid
from agent.settings import Settings
from agent.settings.values import host_and_port
from agent.sources.listening import open_socket
from agent.sources.proxy.handover.place import HandoverPlace
from agent.sources.proxy.open_requests import OpenRequests

_LOG = logging.getLogger(__name__)

AGENT = "agent"

_CORES_PER_WORKER = 4
_MAX_AUTO_WORKERS = 8
# Beyond what the parts allow themselves.
_SPARE_S = 0.5
# What a supervisor leaves to the one that takes its place after SIGHUP.
_LEFT = "_GOODPUT_AGENT_LEFT"


@dataclass(frozen=True, slots=True)
class _Doors:
    """What outlives a supervisor: listening sockets, and the folder of the handover."""

    address: str
    listening: Sequence[socket.socket]
    folder: Path

    @classmethod
    def opened(cls, address: str, count: int) -> Self:
        """Those that the last supervisor left, or new ones. Raises SettingsInvalid for a taken
        port."""
        left = json.loads(os.environ.pop(_LEFT, "{}"))
        inherited = [socket.socket(fileno=number) for number in left.get("listening", ())]
        if left.get("address") != address:
            for each in inherited:
                each.close()
            inherited = []
        for each in inherited[count:]:
            each.close()
        folder = Path(left.get("folder") or tempfile.mkdtemp(prefix="goodput-agent-"))
        more = _listening(address, count - len(inherited), alone=not inherited)
        return cls(address, [*inherited[:count], *more], folder)

    def leave(self) -> None:
        """Leave them to the program that this process becomes."""
        for each in self.listening:
            each.set_inheritable(True)
        numbers = [each.fileno() for each in self.listening]
        left = {"address": self.address, "listening": numbers, "folder": str(self.folder)}
        os.environ[_LEFT] = json.dumps(left)


def _listening(address: str, count: int, *, alone: bool) -> list[socket.socket]:
    host, port = host_and_port(address)
    if alone:
        # A second agent on the port must fail to start, not take half of the requests.
        with closing(open_socket(PROXY, host, port)) as free:
            port = free.getsockname()[1]
    # Each worker has its own queue of new connections, which outlives the worker.
    backlog = connections(raise_descriptors())[PROXY] // 2
    return [open_socket(PROXY, host, port, backlog, reuse_port=True) for _ in range(count)]


def run_processes(
    settings: Settings, agent: Callable[[HandoverPlace], int], load: Callable[[], Settings]
) -> int:
    """Run the workers of the proxy, and the agent beside them, until a signal; the exit status.

    Each process is started again when it ends: streams do not depend on the agent. SIGHUP starts
    all of them anew, with the program and the settings of that time, and refuses no request; `load`
    checks the settings before. Raises SettingsInvalid for a taken port.
    """
    proxy = settings.proxy
    assert proxy.listen is not None, "there is a proxy only with an address"
    count = _auto_workers() if proxy.workers == "auto" else proxy.workers
    doors = _Doors.opened(proxy.listen, count)
    place = HandoverPlace(doors.folder / "handover.sock", uuid.uuid4().hex)
    open_requests = OpenRequests([engine.name for engine in settings.engines], count)
    workers = [
        _worker(settings, Workplace(
            number=number, listening=listening, handover=place, open_requests=open_requests
        ))
        for number, listening in enumerate(doors.listening)
    ]  # fmt: skip
    last = ProcessPart(AGENT, lambda: agent(place), AGENT_STOPS_WITHIN_S)
    status = Supervisor([workers, [last]], partial(_start_anew, doors, load)).run()
    shutil.rmtree(doors.folder, ignore_errors=True)
    return status


def _worker(settings: Settings, workplace: Workplace) -> ProcessPart:
    return ProcessPart(
        f"proxy worker {workplace.number}",
        lambda: run_worker(settings, workplace),
        settings.proxy.drain + WORKER_FLUSHES_WITHIN_S + _SPARE_S,
    )


def _start_anew(doors: _Doors, load: Callable[[], Settings], supervisor: Supervisor) -> None:
    """Become a new supervisor, whose agent tells the workers of this one to retire."""
    try:
        settings = load()
    except SettingsInvalid as error:
        _LOG.error("the settings are invalid, so nothing changes: %s", error)
        return
    _LOG.info("starting anew")
    if settings.proxy.listen == doors.address:
        doors.leave()
        supervisor.stop_last()
    else:
        supervisor.stop()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _auto_workers() -> int:
    cores = len(os.sched_getaffinity(0))
    return min(max(1, cores // _CORES_PER_WORKER), _MAX_AUTO_WORKERS)
