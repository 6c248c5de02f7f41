"""Reads an engine's command line, its processes and the addresses that it listens on, once."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from agent.catalog.engine_flags import AUDITED_FLAGS, FLAG_ALIASES, FLAGS_FILE
from agent.records.audit import CommandLine
from agent.records.host import ProcessRole
from agent.sources.host.flags import limits_given
from agent.sources.host.processes import ProcessFinder, ProcessLocator
from agent.sources.host.procfs import Procfs
from agent.sources.host.unreadable import HostUnreadable


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProcesses:
    """An engine on this machine; `problem` says why parts of it cannot be seen."""

    pids: frozenset[int] = frozenset()
    command_line: CommandLine | None = None
    addresses: frozenset[str] | None = None
    problem: str | None = None


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
