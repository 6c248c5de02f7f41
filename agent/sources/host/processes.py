"""The processes of an engine: their state, command lines, flags and addresses."""

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path

from agent.catalog.engine_flags import AUDITED_FLAGS, FLAG_ALIASES, FLAGS_FILE, LIMIT_FLAGS
from agent.records.audit import CommandLine
from agent.records.engine import EngineProcess, ProcessRole
from agent.sources.host.procfs import HostUnreadable, Procfs, Stat

_FLAGS = frozenset(flag for flags in LIMIT_FLAGS.values() for flag in flags)
# vLLM 0.32 `vllm/utils/argparse_utils.py`, human_readable_int: small letters are powers of ten.
_NUMBER = re.compile(r"([0-9]{1,15})(?:(\.[0-9]{1,15})?([kmgt])|([KMGT]))?", re.ASCII)
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def limits_given(words: Sequence[str]) -> Mapping[str, int]:
    """The limits in the words of a command line, by fact name.

    A limit that is not a number, such as `auto`, is left out: a default is never guessed.
    """
    given: dict[str, int | None] = {}
    for word, following in pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        flag = name.replace("_", "-")
        if flag in _FLAGS:
            given[flag] = _number(value if equals else following)
    limits = {
        limit.name: next((number for flag in flags if (number := given.get(flag))), None)
        for limit, flags in LIMIT_FLAGS.items()
    }
    return {name: number for name, number in limits.items() if number is not None}


def _number(text: str) -> int | None:
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        return None
    whole, part, decimal, binary = found.groups()
    if decimal:
        return int(float(whole + (part or "")) * _DECIMAL[decimal])
    return int(whole) * _BINARY.get(binary, 1)


# Titles that vLLM sets, behind a prefix that an operator may choose. vLLM 0.33
# `v1/engine/core.py`, `v1/executor/multiproc_executor.py`, `v1/utils.py`.
_TITLES: Sequence[tuple[re.Pattern[str], ProcessRole]] = (
    (re.compile(r"\S+::EngineCore"), ProcessRole.CORE),
    (re.compile(r"\S+::Worker"), ProcessRole.WORKER),
    (re.compile(r"\S+::APIServer"), ProcessRole.FRONT),
    (re.compile(r"\S+::DPCoordinator"), ProcessRole.OTHER),
)
_DEFAULT_PREFIX = "VLLM::"

_RUST_FRONTEND = "vllm-rs"

# They listen for a container; the engine's processes are others.
_RELAYS = frozenset({"docker-proxy", "rootlessport", "slirp4netns", "pasta", "pasta.avx2"})

# Reading every process of a big machine takes tens of milliseconds, and engines rarely fork.
_SEARCH_EVERY_S = 15.0

Identity = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLocator:
    """How to find the engine's processes: by PID, or else by port, command line or title.

    If the engine is not on the `same_machine`, only PIDs are used.
    """

    pids: tuple[int, ...] = ()
    port: int | None = None
    same_machine: bool = True


class ProcessFinder:
    """Finds the processes of one engine once and then follows them."""

    def __init__(self, proc: Procfs, locator: ProcessLocator, *, ticks_per_s: int) -> None:
        self._proc = proc
        self._locator = locator
        self._ticks_per_s = ticks_per_s
        self._known: dict[Identity, ProcessRole] = {}
        # The last fronts that listened: the name of the program, and a hash of words that may be
        # secrets; and the start of the newest process then.
        self._commands: frozenset[tuple[str, int]] = frozenset()
        self._newest_ticks = 0
        self._given: dict[int, Stat] = {}
        self._found_once = False
        self._search_at = float("-inf")

    def read(self, now: float) -> tuple[EngineProcess, ...]:
        """The engine's living processes, by PID; empty once all found before are gone.

        Raises HostUnreadable if none was ever found, OSError if /proc cannot be read.
        """
        living = self._living()
        if self._must_search(living, now):
            self._search_at = now
            self._search()
            living = self._living()
        self._known = {identity: self._known[identity] for identity in living}
        return tuple(self._process(stat, self._known[i]) for i, stat in sorted(living.items()))

    def _must_search(self, living: Mapping[Identity, Stat], now: float) -> bool:
        overdue = not 0 <= now - self._search_at < _SEARCH_EVERY_S
        headless = all(self._known[identity] is not ProcessRole.FRONT for identity in living)
        return overdue or headless or len(living) < len(self._known)

    def _living(self) -> dict[Identity, Stat]:
        stats = {identity: self._proc.stat(identity[0]) for identity in self._known}
        return {
            identity: stat
            for identity, stat in stats.items()
            if stat is not None and stat.started_ticks == identity[1]
        }

    def _search(self) -> None:
        stats = self._proc.stats()
        ours, strange = self._listening()
        tops = self._tops(stats, ours, strange)
        if not tops and not self._found_once:
            raise HostUnreadable(self._why_not())
        tree = {pid: stats[pid] for pid in _trees(stats, tops)}
        listening = self._holders(tree, ours)
        # A configured PID may be a script that started the engine.
        fronts = listening or tops
        for pid, stat in tree.items():
            role = ProcessRole.FRONT if pid in fronts else ProcessRole.OTHER
            self._known[pid, stat.started_ticks] = _titled_role(self._proc.title(pid)) or role
        self._found_once = True
        self._remember_commands([stats[pid] for pid in listening], stats)

    def _remember_commands(self, listening: Iterable[Stat], stats: Mapping[int, Stat]) -> None:
        # A forked core holds the socket longer than its killed front.
        fronts = [
            stat
            for stat in listening
            if self._known[stat.pid, stat.started_ticks] is ProcessRole.FRONT
        ]
        if fronts:
            self._commands = frozenset(map(self._command, fronts))
            self._newest_ticks = max(stat.started_ticks for stat in stats.values())

    def _listening(self) -> tuple[Collection[int], Collection[int]]:
        """The sockets that listen on the engine's port, and those on other ports."""
        if not self._locator.same_machine:
            return (), ()
        listening = self._proc.listening()
        ours = {inode for inode, port in listening.items() if port == self._locator.port}
        return ours, listening.keys() - ours

    def _tops(
        self, stats: Mapping[int, Stat], ours: Collection[int], strange: Collection[int]
    ) -> frozenset[int]:
        """The roots of the engine's process trees."""
        if self._locator.pids:
            return self._given_pids(stats)
        if not self._locator.same_machine:
            return frozenset()
        return (
            self._holders(stats, ours) or self._started_again(stats) or self._titled(stats, strange)
        )

    def _given_pids(self, stats: Mapping[int, Stat]) -> frozenset[int]:
        """The configured PIDs that live, without those that another program reused."""
        for pid in self._locator.pids:
            stat, before = stats.get(pid), self._given.get(pid)
            if stat and (before is None or before.comm == stat.comm):
                self._given[pid] = stat
        return frozenset(
            pid for pid, stat in self._given.items() if pid in stats and _same(stat, stats[pid])
        )

    def _holders(self, stats: Mapping[int, Stat], sockets: Collection[int]) -> frozenset[int]:
        """The processes that hold one of these sockets, the top ones of each tree."""
        known = [pid for (pid, _), role in self._known.items() if role is ProcessRole.FRONT]
        # Known processes first: a search through all open files is slow.
        for candidates in (known, stats):
            holders = {
                pid
                for pid in candidates
                if pid in stats and stats[pid].comm not in _RELAYS and self._holds(pid, sockets)
            }
            if holders:
                # A forked core holds the socket of its front too.
                return frozenset(pid for pid in holders if stats[pid].parent not in holders)
        return frozenset()

    def _holds(self, pid: int, sockets: Collection[int]) -> bool:
        return bool(sockets) and any(socket in sockets for socket in self._proc.sockets(pid))

    def _started_again(self, stats: Mapping[int, Stat]) -> frozenset[int]:
        """The new process that was started like the last front; empty if several were.

        A front listens only once its engine has loaded.
        """
        programs = {program for program, _ in self._commands}
        alike = {
            pid
            for pid, stat in stats.items()
            if stat.comm in programs
            and stat.started_ticks > self._newest_ticks
            and self._command(stat) in self._commands
        }
        # A forked core has the command line of its front until it takes a title.
        tops = frozenset(pid for pid in alike if stats[pid].parent not in alike)
        return tops if len(tops) == 1 else frozenset()

    def _command(self, stat: Stat) -> tuple[str, int]:
        return stat.comm, hash(_lasting(self._proc.words(stat.pid)))

    def _titled(self, stats: Mapping[int, Stat], strange: Collection[int]) -> frozenset[int]:
        """The root of the one tree with an engine's titles; empty if several engines run.

        A tree that holds one of the `strange` sockets is an engine on another port.
        """
        titled = {pid for pid, stat in stats.items() if stat.comm.startswith(_DEFAULT_PREFIX)}
        cores = {pid for pid in titled if stats[pid].parent not in titled}
        parents = {stats[pid].parent for pid in cores}
        if len(parents) != 1:
            return frozenset()
        parent = parents.pop()
        # The first process adopts the children of a killed front.
        tops = cores if parent <= 1 or parent not in stats else {parent}
        return frozenset(pid for pid in tops if not self._holds(pid, strange))

    def _process(self, stat: Stat, role: ProcessRole) -> EngineProcess:
        title = self._proc.title(stat.pid)
        # A process sets its title some time after its start.
        titled = _titled_role(title)
        scheduled = self._proc.schedstat(stat.pid)
        return EngineProcess(
            pid=stat.pid,
            started_after_boot_s=stat.started_ticks / self._ticks_per_s,
            role=titled or role,
            name=title if titled else stat.comm,
            state=stat.state,
            cpu_s=stat.cpu_ticks / self._ticks_per_s,
            cpu_run_s=None if scheduled is None else scheduled[0],
            cpu_wait_s=None if scheduled is None else scheduled[1],
        )

    def _why_not(self) -> str:
        locator = self._locator
        if locator.pids:
            return f"no process has one of the PIDs {', '.join(map(str, locator.pids))}"
        if not locator.same_machine:
            return "the engine's URL is not of this machine, and no PIDs are configured"
        return (
            f"no visible process listens on port {locator.port}, and none or several engines have "
            "processes with titles: share the PID namespace and the user, or configure PIDs"
        )


def _lasting(words: Sequence[str]) -> tuple[str, ...]:
    """The words of a command line that stay if other flags change: its program and its port.

    All of them without a port.
    """
    port = None
    for word, following in pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if name == "--port":
            port = value if equals else following
    if port is None:
        return tuple(words)
    return (*takewhile(lambda word: not word.startswith("--"), words), port)


def _titled_role(title: str) -> ProcessRole | None:
    return next((role for text, role in _TITLES if text.match(title)), None)


def _same(one: Stat, other: Stat) -> bool:
    return one.started_ticks == other.started_ticks


def _trees(stats: Mapping[int, Stat], tops: Iterable[int]) -> frozenset[int]:
    """These processes and all their descendants."""
    children: dict[int, list[int]] = {}
    for stat in stats.values():
        children.setdefault(stat.parent, []).append(stat.pid)
    found: set[int] = set()
    todo = list(tops)
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.add(pid)
            todo.extend(children.get(pid, ()))
    return frozenset(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProcesses:
    """An engine on this machine; `problem` says why parts of it cannot be seen."""

    pids: frozenset[int] = frozenset()
    command_line: CommandLine | None = None
    addresses: frozenset[str] | None = None
    problem: str | None = None
    rust_frontend: bool = False


def has_rust_frontend(processes: Iterable[EngineProcess]) -> bool:
    """Whether these are processes of a vLLM with its Rust frontend."""
    return any(process.name.startswith(_RUST_FRONTEND) for process in processes)


def read_processes(
    locator: ProcessLocator, now: float, *, proc: Path = Path("/proc")
) -> EngineProcesses:
    """The engine's processes as far as they are visible. Raises nothing for those that are not."""
    files = Procfs(proc)
    finder = ProcessFinder(files, locator, ticks_per_s=os.sysconf("SC_CLK_TCK"))
    try:
        found = finder.read(now)
        addresses = _addresses(files, locator)
    except (HostUnreadable, OSError) as error:
        return EngineProcesses(problem=str(error))
    # The front first: the others may be a script that started it.
    ordered = sorted(found, key=lambda process: process.role is not ProcessRole.FRONT)
    lines = (files.words(process.pid) for process in ordered)
    words = next((line for line in lines if _is_vllm(line)), None)
    return EngineProcesses(
        pids=frozenset(process.pid for process in found),
        command_line=None if words is None else command_line(words),
        addresses=addresses,
        rust_frontend=has_rust_frontend(found),
        problem=None if words is not None else "no process at its port shows vLLM's command line",
    )


def command_line(words: Sequence[str]) -> CommandLine:
    """The flags in the words of a command line, of those that an audit reads."""
    flags: dict[str, str] = {}
    names = []
    for word, following in pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        flag = name.replace("_", "-")
        flag = FLAG_ALIASES.get(flag, flag)
        names.append(flag)
        if flag in AUDITED_FLAGS:
            other = "" if following.startswith("-") else following
            flags[flag] = value if equals else other
    return CommandLine(flags=flags, limits=limits_given(words), whole=FLAGS_FILE not in names)


def _is_vllm(words: Sequence[str]) -> bool:
    """Whether this starts vLLM: the flags of a proxy in front of it say nothing.

    Neither does a title that a process gave itself.
    """
    return any(word.startswith("vllm.") or Path(word).name == "vllm" for word in words)


def _addresses(files: Procfs, locator: ProcessLocator) -> frozenset[str] | None:
    if not locator.same_machine or locator.port is None:
        return None
    return files.listening_addresses(locator.port) or None
