"""Receives what `goodput-agent-vllm`, a plugin of vLLM, sends of steps and ended requests.

`plugins/vllm/goodput_agent_vllm/datagrams.py` describes the format. One thread listens on the
sockets that the plugins write to, and refuses datagrams of other programs.
"""

import logging
import math
import os
import re
import selectors
import socket
import stat
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from agent.analysis.latency import MAX_TOKENS, ReportedPhases, screen
from agent.catalog.reasons import PluginDropped
from agent.errors import SettingsInvalid
from agent.records.engine import EndedRequest, EngineStep

_MAGIC = b"GPAV"
_FORMAT = 1
_HEADER = struct.Struct("<4sBBHQQQ")
_HELLO, _STEP, _REQUEST = 1, 2, 3
_STEP_RECORD = struct.Struct("<BBHdd6IfI")
_REQUEST_RECORD = struct.Struct("<BBHdIIiI5d16s320s")
_SIZES = {_HELLO: struct.calcsize("<BBH"), _STEP: _STEP_RECORD.size, _REQUEST: _REQUEST_RECORD.size}
_TOKENS_OF_STEP = 1

# A plugin keeps its newest records while the agent is away, so they may come late.
_OLDEST_S = 86_400.0
_MAX_LEAD_S = 60.0
_LONGEST_STEP_S = 86_400.0
# The length of the column `request_id`.
_ID_CHARACTERS = 256
_REASON = re.compile(rb"[a-z_]{1,16}")


@dataclass(slots=True)
class PluginRecords:
    """The records of one datagram, and how many of them were refused by reason.

    The header's fields: `run` is a random number of one run of the engine's front, `first` the
    sequence number of the first record, `records` how many records the datagram has, `dropped` how
    many records this run of the front has dropped so far.
    """

    run: int = 0
    first: int = 0
    records: int = 0
    dropped: int = 0
    steps: list[EngineStep] = field(default_factory=list)
    ended: list[EndedRequest] = field(default_factory=list)
    refused: Counter[PluginDropped] = field(default_factory=Counter)


def read_datagram(datagram: bytes, engine: str, received_at: float) -> PluginRecords | None:
    """The records of a datagram that arrived at a Unix time; None if no plugin wrote it."""
    if len(datagram) < _HEADER.size:
        return None
    magic, version, _, count, run, first, dropped = _HEADER.unpack_from(datagram)
    if magic != _MAGIC:
        return None
    content = PluginRecords(run, first, count, dropped)
    if version != _FORMAT:
        content.refused[PluginDropped.OTHER_FORMAT] += count
        return content
    at = _HEADER.size
    for read in range(count):
        size = _SIZES.get(datagram[at], 0) if at < len(datagram) else 0
        if not size or at + size > len(datagram):
            content.refused[PluginDropped.MALFORMED] += count - read
            break
        _add_record(datagram, at, engine, received_at, content)
        at += size
    return content


def _add_record(
    datagram: bytes, at: int, engine: str, received_at: float, content: PluginRecords
) -> None:
    """Add the record at byte `at` to the content, or its reason to the refused ones."""
    kind = datagram[at]
    if kind == _HELLO:
        return
    found: EngineStep | EndedRequest | PluginDropped
    if kind == _STEP:
        found = _step(datagram, at, engine, received_at)
    else:
        found = _request(datagram, at, engine, received_at)
    if isinstance(found, EngineStep):
        content.steps.append(found)
    elif isinstance(found, EndedRequest):
        content.ended.append(found)
    else:
        content.refused[found] += 1


def _step(datagram: bytes, at: int, engine: str, received_at: float) -> EngineStep | PluginDropped:
    _, flags, rank, ended_at, duration_s, *counts, kv_usage, preempted = _STEP_RECORD.unpack_from(
        datagram, at
    )
    if not _is_recent(ended_at, received_at):
        return PluginDropped.TIME
    if not 0.0 <= kv_usage <= 1.0 or max(*counts, preempted) > MAX_TOKENS:
        return PluginDropped.VALUE
    prefill, decode, running, capacity, deferred, kv_transfer = counts
    return EngineStep(
        engine=engine,
        ended_at=ended_at,
        duration_s=duration_s if 0.0 <= duration_s <= _LONGEST_STEP_S else None,
        prefill_tokens=prefill,
        decode_tokens=decode,
        running=running,
        waiting_capacity=capacity,
        waiting_deferred=deferred,
        kv_usage=kv_usage,
        preempted=preempted,
        waiting_kv_transfer=kv_transfer,
        rank=rank,
        tokens_of_step=bool(flags & _TOKENS_OF_STEP),
    )


def _request(
    datagram: bytes, at: int, engine: str, received_at: float
) -> EndedRequest | PluginDropped:
    values = _REQUEST_RECORD.unpack_from(datagram, at)
    _, _, id_bytes, ended_at, input_tokens, output_tokens, cached, preemptions = values[:8]
    queue_s, prefill_s, decode_s, e2e_s, ttft_s = map(_known, values[8:13])
    finish_reason, request_id = values[13].rstrip(b"\0"), _id(values[14], id_bytes)
    if not _is_recent(ended_at, received_at):
        return PluginDropped.TIME
    if request_id is None:
        return PluginDropped.REQUEST_ID
    counts = (input_tokens, output_tokens, cached, preemptions)
    if max(counts) > MAX_TOKENS or not _REASON.fullmatch(finish_reason):
        return PluginDropped.VALUE
    reported = (e2e_s, ttft_s, queue_s, prefill_s, decode_s, input_tokens, output_tokens)
    phases = screen(ReportedPhases(*reported)).phases
    return EndedRequest(
        engine=engine,
        request_id=request_id,
        ended_at=ended_at,
        finish_reason=finish_reason.decode(),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=cached if 0 <= cached <= input_tokens else None,
        preemptions=preemptions,
        queue_s=phases.queue_s,
        prefill_s=phases.prefill_s,
        decode_s=phases.decode_s,
        e2e_s=phases.e2e_s,
        ttft_s=phases.ttft_s,
    )


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _is_recent(ended_at: float, received_at: float) -> bool:
    """Whether a record may have ended at this time; false also for NaN."""
    return received_at - _OLDEST_S <= ended_at <= received_at + _MAX_LEAD_S


def _id(field_bytes: bytes, id_bytes: int) -> str | None:
    """The request id; None if it was cut, is not UTF-8, or is too long or unprintable."""
    if not 0 < id_bytes <= len(field_bytes):
        return None
    try:
        text = field_bytes[:id_bytes].decode()
    except UnicodeDecodeError:
        return None
    return text if len(text) <= _ID_CHARACTERS and text.isprintable() else None


_LOG = logging.getLogger(__name__)

# A plugin sends datagrams of 32 KB at most.
_DATAGRAM_BYTES = 65_536
# After this many datagrams of one engine, the next engine is read.
_DATAGRAMS_PER_TURN = 16
# Beyond this the receiver pauses, and the plugins keep or drop their records.
MAX_RECORDS_PER_S = 20_000
# For the agent's user and group: in a pod, the group is `fsGroup`.
_MODE = 0o660
# How soon a socket is made again whose file was deleted.
_CHECK_EVERY_S = 1.0


class StepConsumer(Protocol):
    """Gets each record of a plugin, in the receiver's thread. It must not wait."""

    def on_step(self, step: EngineStep) -> None:
        """Handle a step."""

    def on_ended(self, ended: EndedRequest) -> None:
        """Handle a request that ended."""


class PluginCounts(Protocol):
    """Counts received and dropped records."""

    def plugin_received(self, engine: str, steps: int, requests: int) -> None:
        """Count records that were received."""

    def plugin_dropped(self, engine: str, reason: PluginDropped, count: int) -> None:
        """Count records that were dropped."""


@dataclass(frozen=True, slots=True)
class _Listener:
    """A bound socket, and the device and inode of the file that the bind made."""

    opened: socket.socket
    file: tuple[int, int] | None


class _Stream:
    """The state of the datagrams of one engine.

    `heard_at` is the Unix time of the last datagram, `step_at` of the last one with a step. `runs`
    has, for each run of a front, its next sequence number and how many records it dropped so far.
    An engine may have several fronts; of all runs, ended ones included, the newest are kept.
    """

    def __init__(self) -> None:
        self.heard_at: float | None = None
        self.step_at: float | None = None
        self.runs: dict[int, tuple[int, int]] = {}


_MAX_RUNS = 256
_MAX_MISSING = 1 << 32


class PluginReceiver:
    """Reads the datagrams of all engines with a socket and hands records to the consumers.

    The queue of each socket is the kernel's; the plugins keep what does not fit, and drop the
    oldest.
    """

    def __init__(
        self,
        paths: Mapping[str, Path],
        consumers: Sequence[StepConsumer],
        counts: PluginCounts,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`paths` has the path of each engine's socket."""
        self._paths = dict(paths)
        self._consumers = tuple(consumers)
        self._counts = counts
        self._now = now
        self._streams = {engine: _Stream() for engine in paths}
        self._listeners: dict[str, _Listener] = {}
        self._problems: dict[str, str] = {}
        self._next_check = 0.0
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-plugins", daemon=True)
        self._read_in_second = (0, 0)

    def heard_at(self, engine: str) -> float | None:
        """The Unix time of the last datagram of the engine's plugin; None before the first."""
        return self._streams[engine].heard_at

    def step_at(self, engine: str) -> float | None:
        """The Unix time when the last step of the engine arrived; None before the first."""
        return self._streams[engine].step_at

    def problem(self, engine: str) -> str | None:
        """Why no plugin can reach the engine's socket; None while it is in place."""
        return self._problems.get(engine)

    def start(self) -> None:
        """Make the sockets and start the thread. Raises SettingsInvalid if a socket fails."""
        for engine, path in self._paths.items():
            self._listen(engine, path)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; the plugins keep their last records for the next agent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        os.eventfd_write(self._wake, 1)
        if self._thread.is_alive():
            self._thread.join()
        for engine, listener in self._listeners.items():
            # The open socket keeps the inode, so the file of another program has another one.
            if _file_at(self._paths[engine]) == listener.file:
                self._paths[engine].unlink(missing_ok=True)
            listener.opened.close()
        self._selector.close()
        os.close(self._wake)

    def _listen(self, engine: str, path: Path) -> None:
        listener = _open_listener(engine, path)
        self._listeners[engine] = listener
        self._selector.register(listener.opened, selectors.EVENT_READ, engine)

    def _check_files(self) -> None:
        """Make each socket again whose file is gone."""
        if time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + _CHECK_EVERY_S
        for engine, path in self._paths.items():
            if _file_at(path) == self._listeners[engine].file:
                self._problems.pop(engine, None)
            else:
                self._listen_again(engine, path)

    def _listen_again(self, engine: str, path: Path) -> None:
        before = self._listeners[engine].opened
        while self._read(engine):
            pass
        try:
            self._listen(engine, path)
        except SettingsInvalid as error:
            problem = "; ".join(error.problems)
            if self._problems.get(engine) != problem:
                _LOG.error("the plugin of engine %s cannot be heard: %s", engine, problem)
            self._problems[engine] = problem
            return
        self._problems.pop(engine, None)
        self._selector.unregister(before)
        before.close()
        _LOG.warning("the socket %s of engine %s was deleted, and made again", path, engine)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._check_files()
            events = self._selector.select(_CHECK_EVERY_S)
            ready = [key.data for key, _ in events if key.data is not None]
            for engine in ready:
                for _ in range(_DATAGRAMS_PER_TURN):
                    if not self._read(engine):
                        break
            self._limit_rate()

    def _limit_rate(self) -> None:
        """Wait for the next second after MAX_RECORDS_PER_S records in this one."""
        second, read = self._read_in_second
        monotonic = time.monotonic()
        if read > MAX_RECORDS_PER_S and second == int(monotonic):
            self._stopping.wait(second + 1 - monotonic)

    def _read(self, engine: str) -> bool:
        """Read one datagram of an engine; returns False without one."""
        try:
            datagram, _, flags, _ = self._listeners[engine].opened.recvmsg(
                _DATAGRAM_BYTES, 0, socket.MSG_DONTWAIT
            )
        except OSError:
            return False
        try:
            self._take(engine, b"" if flags & socket.MSG_TRUNC else datagram)
        except Exception:
            # The thread must go on for the next datagram.
            _LOG.exception("a datagram of the plugin of engine %s could not be read", engine)
            self._counts.plugin_dropped(engine, PluginDropped.MALFORMED, 1)
        return True

    def _take(self, engine: str, datagram: bytes) -> None:
        now = self._now()
        content = read_datagram(datagram, engine, now)
        records = 0 if content is None else len(content.steps) + len(content.ended)
        self._count_second(1 + records)
        if content is None:
            self._counts.plugin_dropped(engine, PluginDropped.NOT_OURS, 1)
            return
        stream = self._streams[engine]
        stream.heard_at = now
        if content.steps:
            stream.step_at = now
        self._count(engine, stream, content)
        for consumer in self._consumers:
            _hand_over(consumer, content)

    def _count_second(self, records: int) -> None:
        second = int(time.monotonic())
        counted_in, read = self._read_in_second
        self._read_in_second = (second, records + (read if counted_in == second else 0))

    def _count(self, engine: str, stream: _Stream, content: PluginRecords) -> None:
        self._counts.plugin_received(engine, len(content.steps), len(content.ended))
        for reason, count in content.refused.items():
            self._counts.plugin_dropped(engine, reason, count)
        expected, dropped = stream.runs.pop(content.run, (content.first, content.dropped))
        stream.runs[content.run] = (content.first + content.records, content.dropped)
        if len(stream.runs) > _MAX_RUNS:
            stream.runs.pop(next(iter(stream.runs)))
        by_sender = max(0, content.dropped - dropped)
        missing = max(0, content.first - expected - by_sender)
        if 0 < by_sender < _MAX_MISSING:
            self._counts.plugin_dropped(engine, PluginDropped.AGENT_BEHIND, by_sender)
        # A plugin's gap is smaller: a larger number is forged.
        if 0 < missing < _MAX_MISSING:
            self._counts.plugin_dropped(engine, PluginDropped.LOST, missing)


def _hand_over(consumer: StepConsumer, content: PluginRecords) -> None:
    """Call a consumer with all records; its failure is logged and does not reach the others."""
    try:
        for step in content.steps:
            consumer.on_step(step)
        for ended in content.ended:
            consumer.on_ended(ended)
    except Exception:
        _LOG.exception("records of an engine's plugin were not taken")


def _open_listener(engine: str, path: Path) -> _Listener:
    """A new socket at this path, also in place of one without a reader. Raises SettingsInvalid."""
    setting = f"plugin_socket of engine {engine}"
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        path.parent.mkdir(exist_ok=True)
        if taken := _taken(path):
            raise SettingsInvalid([f"{setting}: {path} is {taken}; choose another path"])
        path.unlink(missing_ok=True)
        # The bind makes the file with this mode less the umask.
        os.fchmod(opened.fileno(), _MODE)
        opened.bind(str(path))
        os.chmod(path, _MODE)
    except OSError as error:
        opened.close()
        reason = error.strerror or error
        raise SettingsInvalid(
            [f"{setting}: cannot listen at {path}: {reason}; choose another path"]
        ) from error
    except SettingsInvalid:
        opened.close()
        raise
    return _Listener(opened, _file_at(path))


def try_socket(engine: str, path: Path, *, is_own: bool) -> None:
    """Raises SettingsInvalid if no socket can be made here; `is_own` says whether one that is
    there may be replaced."""
    if not is_own:
        _open_listener(engine, path).opened.close()
        path.unlink()
        return
    setting = f"plugin_socket of engine {engine}"
    if path.exists() and not stat.S_ISSOCK(path.lstat().st_mode):
        raise SettingsInvalid([f"{setting}: {path} is a file and no socket; choose another path"])
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise SettingsInvalid([f"{setting}: no socket can be made in {path.parent}"])


def _file_at(path: Path) -> tuple[int, int] | None:
    """Device and inode of what is at a path; None if nothing can be seen."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _taken(path: Path) -> str | None:
    """What is at a path that may not be replaced; None of a socket that its program left."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return "a file and no socket"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            probe.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        return None
    except OSError:
        # Such as EPROTOTYPE of a stream socket: a program listens.
        return "the socket of another program"
    return "the socket of another program"
