"""The processes of a supervised agent: with a proxy its workers, and the agent itself."""

import importlib
import json
import logging
import os
import pkgutil
import shutil
import signal
import socket
import tempfile
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import agent
from agent.app.discovery import discovery_of
from agent.app.listeners import (
    API,
    OTLP_GRPC,
    OTLP_HTTP,
    PROXY,
    ConnectionLimits,
    Listeners,
    connections,
    raise_descriptors,
    tls_files,
)
from agent.app.proxy_worker import WorkerConfig, WorkerMemory, run_worker, take_over
from agent.app.supervising import (
    AGENT_STOPS_WITHIN_S,
    STOP_WITHIN_S,
    STOPS_LAST,
    TRY,
    TRY_WITHIN_S,
    WORKER_FLUSHES_WITHIN_S,
    Plan,
    ProcessPart,
    Running,
    Supervisor,
    Trial,
    start_again,
)
from agent.errors import SettingsInvalid
from agent.outputs.web.documents import documents
from agent.settings import Settings
from agent.settings.values import host_and_port
from agent.sources.listening import TlsFiles, open_socket
from agent.sources.plugin_sockets import PluginSocket
from agent.sources.proxy.handover.messages import HandoverAddress
from agent.sources.proxy.handover.sending import MAX_SLOTS, RequestSlots
from agent.sources.proxy.load_balancer import OpenRequests
from agent.store.connection import open_engine
from agent.store.migrating import newest_revision

_LOG = logging.getLogger(__name__)

AGENT = "agent"

_CORES_PER_WORKER = 4
_MAX_AUTO_WORKERS = 8
# Beyond what the parts allow themselves.
_SPARE_S = 0.5
# What a supervisor leaves to the one that takes its place after SIGHUP.
_LEFT = "_GOODPUT_AGENT_LEFT"


@dataclass(frozen=True, slots=True)
class _SupervisorState:
    """What outlives a supervisor: listening sockets, and the folder of the handover.

    `left` are the workers of the supervisors before, with their memory if they left it; None if
    this is the first one.
    """

    address: str
    listening: Sequence[socket.socket]
    folder: Path
    left: Sequence[tuple[int | None, WorkerMemory | None]] | None = None

    @classmethod
    def opened(cls, address: str, count: int) -> Self:
        """Return new sockets and a new folder. Raises SettingsInvalid for a taken port."""
        listening = _listening(address, count, alone=True)
        return cls(address, listening, Path(tempfile.mkdtemp(prefix="goodput-agent-")))

    @classmethod
    def found(cls, address: str, count: int) -> Self:
        """Return what the supervisor before SIGHUP left, or new sockets and a new folder.

        Raises SettingsInvalid for a taken port.
        """
        left = json.loads(os.environ.pop(_LEFT, "null"))
        if left is None:
            return cls.opened(address, count)
        listening = [socket.socket(fileno=number) for number in left["listening"]]
        if left["address"] != address:
            for each in listening:
                each.close()
            listening = []
        more = _listening(address, count - len(listening), alone=not listening)
        return cls(address, [*listening, *more], Path(left["folder"]), _left_workers(left))

    def following(self, address: str | None, count: int) -> Self | None:
        """Return what the next supervisor gets. Raises SettingsInvalid for a taken port."""
        if address is None:
            return None
        return self if address == self.address else self.opened(address, count)

    def leave(
        self, workers: Sequence[Running], memories: Mapping[ProcessPart, WorkerMemory]
    ) -> None:
        """Name sockets, folder and workers to the program that this process becomes."""
        left = [(pid, memories[part]) for part, pid in workers if part in memories]
        for socket_ in self.listening:
            socket_.set_inheritable(True)
        for descriptor in {each for _, memory in left for each in memory.descriptors}:
            os.set_inheritable(descriptor, True)
        os.environ[_LEFT] = json.dumps({
            "address": self.address,
            "listening": [each.fileno() for each in self.listening],
            "folder": str(self.folder),
            "workers": [pid for _, pid in workers if pid is not None],
            "memories": [(pid, asdict(memory)) for pid, memory in left],
        })  # fmt: skip

    def abandon(self) -> None:
        """Close the sockets, too: this program goes on without them."""
        for each in self.listening:
            each.close()
        self.close()

    def close(self) -> None:
        """Leave no folder behind. The sockets end with this program."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _left_workers(left: Mapping[str, Any]) -> list[tuple[int | None, WorkerMemory | None]]:
    """The workers that a supervisor left; one of another version may leave no memory of them."""
    workers = [(pid, _left_memory(memory)) for pid, memory in left.get("memories", [])]
    known = {pid for pid, _ in workers}
    return workers + [(pid, None) for pid in left["workers"] if pid not in known]


def _left_memory(memory: Mapping[str, Any]) -> WorkerMemory | None:
    try:
        found = WorkerMemory(**memory)
    except TypeError:
        return None
    for descriptor in found.descriptors:
        os.set_inheritable(descriptor, False)
    return found


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
    settings: Settings, agent: Callable[[HandoverAddress], int], begin_trial: Callable[[], Trial]
) -> int:
    """Run the workers of the proxy, and the agent beside them, until a signal; the exit status.

    Each process is started again when it ends: streams do not depend on the agent. SIGHUP starts
    all of them anew, with the program and the settings of that time, if their trial succeeds; it
    refuses no request. Raises SettingsInvalid for a taken port.
    """
    proxy = settings.proxy
    assert proxy.listen is not None, "there is a proxy only with an address"
    tls = tls_files(settings)
    state = _SupervisorState.found(proxy.listen, workers_of(settings))
    try:
        groups, left, memories = _groups(settings, agent, state, tls)
        reload = partial(_start_anew, state, memories)
        return Supervisor(groups, begin_trial, reload, None if state.left is None else left).run()
    finally:
        state.close()


def _groups(
    settings: Settings,
    agent: Callable[[HandoverAddress], int],
    state: _SupervisorState,
    tls: TlsFiles | None,
) -> tuple[list[list[ProcessPart]], list[Running], dict[ProcessPart, WorkerMemory]]:
    """The workers, and the agent, which ends after them; what runs of earlier workers; and the
    memory of each worker."""
    count = workers_of(settings)
    handover = HandoverAddress(state.folder / "handover.sock", uuid.uuid4().hex)
    open_requests = OpenRequests([engine.name for engine in settings.engines], count)
    configs = [
        WorkerConfig(
            number=number,
            workers=count,
            # A socket without a worker would keep its clients waiting.
            listening=state.listening[number::count],
            tls=tls,
            handover=handover,
            open_requests=open_requests,
            slots=RequestSlots(MAX_SLOTS // count),
        )
        for number in range(count)
    ]
    workers = [_worker(settings, each) for each in configs]
    memories = {part: each.memory for part, each in zip(workers, configs, strict=True)}
    earlier = state.left or ()
    left = [Running(_earlier_worker(settings, memory, handover), pid) for pid, memory in earlier]
    for running, (_, memory) in zip(left, earlier, strict=True):
        if memory is not None:
            memories[running.part] = memory
    work = partial(_agent, agent, handover, os.getpid())
    last = ProcessPart(AGENT, work, AGENT_STOPS_WITHIN_S, STOPS_LAST)
    return [workers, [last]], left, memories


def run_again(agent: Callable[[], int], begin_trial: Callable[[], Trial]) -> int:
    """Run an agent without a proxy until a signal, again whenever it ends; the exit status.

    It ends when other engines must be watched. SIGHUP starts it anew, if its trial succeeds.
    """
    part = ProcessPart(AGENT, agent, STOP_WITHIN_S + _SPARE_S)
    return Supervisor([[part]], begin_trial, partial(_start_anew, None, {})).run()


def _agent(
    agent: Callable[[HandoverAddress], int], handover: HandoverAddress, supervisor: int
) -> int:
    status = agent(handover)
    if os.getppid() != supervisor:
        # A supervisor that was killed has left the folder.
        shutil.rmtree(handover.socket.parent, ignore_errors=True)
    return status


def _worker(settings: Settings, config: WorkerConfig) -> ProcessPart:
    name = f"proxy worker {config.number}"
    return ProcessPart(name, partial(run_worker, settings, config), _worker_stops_s(settings))


def _earlier_worker(
    settings: Settings, memory: WorkerMemory | None, handover: HandoverAddress
) -> ProcessPart:
    """A worker of an earlier run. If it dies, another process hands over what it left."""
    work = partial(take_over, memory, handover)
    return ProcessPart("earlier worker", work, _worker_stops_s(settings))


def _worker_stops_s(settings: Settings) -> float:
    return settings.proxy.drain + WORKER_FLUSHES_WITHIN_S + _SPARE_S


def _start_anew(
    state: _SupervisorState | None,
    memories: Mapping[ProcessPart, WorkerMemory],
    supervisor: Supervisor,
    plan: Plan,
) -> None:
    """Become a new supervisor, whose agent lets the workers of this one retire.

    If no program can follow, it returns, and this supervisor starts again what it stopped.
    """
    try:
        following = state and state.following(plan.proxy, plan.workers)
    except SettingsInvalid as error:
        _LOG.error("the new agent cannot start, so nothing changes: %s", error)
        return
    _LOG.info("starting anew")
    if state is not None and following is state:
        supervisor.stop_last()
    else:
        supervisor.stop()
    if not supervisor.asked_to_stop:
        if state is not None and following is not state:
            state.close()
        if following is not None:
            following.leave(supervisor.first_group, memories)
        try:
            start_again()
        except OSError as error:
            os.environ.pop(_LEFT, None)
            _LOG.error("the new agent cannot start, so this one goes on: %s", error)
    if following is not None and following is not state:
        following.abandon()


def workers_of(settings: Settings) -> int:
    """How many workers the proxy has."""
    if settings.proxy.workers != "auto":
        return settings.proxy.workers
    cores = len(os.sched_getaffinity(0))
    return min(max(1, cores // _CORES_PER_WORKER), _MAX_AUTO_WORKERS)


# An address, and the setting that has it.
_Address = tuple[str, str]


def listen_of(settings: Settings) -> str:
    """The address of the API and the page."""
    host = settings.listen.host
    return f"[{host}]:{settings.listen.port}" if ":" in host else f"{host}:{settings.listen.port}"


def _addresses_of(settings: Settings) -> Sequence[_Address]:
    otlp = settings.otlp
    optional = ((OTLP_HTTP, otlp.http), (OTLP_GRPC, otlp.grpc), (PROXY, settings.proxy.listen))
    given = [(setting, address) for setting, address in optional if address is not None]
    return [(API, listen_of(settings)), *given]


def taken_by(settings: Settings) -> set[str]:
    """The addresses and sockets of an agent with these settings."""
    plugins = {str(engine.plugin_socket) for engine in settings.engines if engine.plugin_socket}
    return plugins | {address for _, address in _addresses_of(settings)}


def begin_to_try() -> Collection[str]:
    """Import every module, as the program may be half upgraded; returns what the running agent has
    taken. This process ends in time, also if no process waits for it any more."""
    signal.alarm(int(TRY_WITHIN_S))
    for module in pkgutil.walk_packages(agent.__path__, f"{agent.__name__}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    return frozenset(json.loads(os.environ[TRY]))


def plan_text(proxy: str | None, workers: int) -> str:
    """A plan as the process that began the trial reads it."""
    return json.dumps(Plan(proxy, workers)._asdict())


def try_agent(settings: Settings) -> str:
    """Do what the start of an agent does, short of its work, and return its plan. What the running
    agent has taken is free when it has stopped.

    Raises SettingsInvalid, and whatever the import of a module raises.
    """
    taken = begin_to_try()
    Listeners(settings, ConnectionLimits(raise_descriptors()))
    discovery_of(settings)
    try_listening(_addresses_of(settings), taken)
    for engine in settings.engines:
        path = engine.plugin_socket
        if path is not None:
            PluginSocket((path,), engine.name).try_open(in_use=str(path) in taken)
    for url in (settings.storage.own_url, settings.storage.read_url):
        open_engine(url).dispose()
    newest_revision()
    documents()
    return plan_text(settings.proxy.listen, workers_of(settings))


def try_listening(addresses: Sequence[_Address], taken: Collection[str]) -> None:
    """Listen where the running agent does not. Raises SettingsInvalid for a taken address."""
    with ExitStack() as opened:
        for setting, address in addresses:
            if address not in taken:
                opened.enter_context(closing(open_socket(setting, *host_and_port(address))))
