"""Receives what `goodput-agent-vllm`, a plugin of vLLM, sends of steps and requests.

One thread listens on the sockets that the plugins write to, and refuses datagrams of other
programs.
"""

import logging
import os
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from agent.catalog.metrics import UNKNOWN
from agent.catalog.reasons import PluginDropped
from agent.records.engine import EndedRequest, EngineStep, ServedRequest
from agent.sources.plugin_records import MAX_COUNT, PluginRecords, read_datagram
from agent.sources.plugin_sockets import PluginSocket, SocketUnusable

_LOG = logging.getLogger(__name__)

# After this many datagrams of one socket, the next socket is read.
_DATAGRAMS_PER_TURN = 16
# Beyond this the receiver pauses, and the plugins keep or drop their records.
MAX_RECORDS_PER_S = 20_000
# How soon a socket is made that could not be made before, or whose file was deleted.
_CHECK_EVERY_S = 1.0


class StepConsumer(Protocol):
    """Gets each record of a plugin, in the receiver's thread. It must not wait."""

    def on_step(self, step: EngineStep) -> None:
        """Handle a step."""

    def on_ended(self, ended: EndedRequest) -> None:
        """Handle a request that ended."""

    def on_served(self, served: ServedRequest) -> None:
        """Handle a request whose HTTP request ended."""


class PluginCounts(Protocol):
    """Counts received and dropped records."""

    def plugin_received(self, engine: str, steps: int, requests: int) -> None:
        """Count records that were received."""

    def plugin_dropped(self, engine: str, reason: PluginDropped, count: int) -> None:
        """Count records that were dropped."""

    def plugin_counted(self, engine: str, name: str, status_class: int, count: int) -> None:
        """Add to what a front counts: see PluginCount."""


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


class PluginReceiver:
    """Reads the datagrams of all sockets and hands records to the consumers.

    The queue of each socket is the kernel's; the plugins keep what does not fit, and drop the
    oldest.
    """

    def __init__(
        self,
        sockets: Sequence[PluginSocket],
        consumers: Sequence[StepConsumer],
        counts: PluginCounts,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._sockets = tuple(sockets)
        self._consumers = tuple(consumers)
        self._counts = counts
        self._now = now
        self._streams: dict[str, _Stream] = {}
        self._problems: dict[PluginSocket, str] = {}
        self._next_check = 0.0
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-plugins", daemon=True)
        self._read_in_second = (0, 0)

    def heard_at(self, engine: str) -> float | None:
        """The Unix time of the last datagram of the engine's plugin; None before the first."""
        stream = self._streams.get(engine)
        return None if stream is None else stream.heard_at

    def step_at(self, engine: str) -> float | None:
        """The Unix time when the last step of the engine arrived; None before the first."""
        stream = self._streams.get(engine)
        return None if stream is None else stream.step_at

    def problems(self) -> Sequence[str]:
        """Why no plugin can reach a socket, for each that is not in place."""
        return [*self._problems.values()]

    def start(self) -> None:
        """Make the sockets and start the thread.

        Raises SocketUnusable if the socket of one engine fails. The shared one is tried again.
        """
        for each in self._sockets:
            self._listen(each, required=each.engine is not None)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; the plugins keep their last records for the next agent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        os.eventfd_write(self._wake, 1)
        if self._thread.is_alive():
            self._thread.join()
        for each in self._sockets:
            each.close()
        self._selector.close()
        os.close(self._wake)

    def _listen(self, plugins: PluginSocket, *, required: bool = False) -> bool:
        """Whether it listens now. If not, it raises if that is `required`, else it logs why once.

        Raises SocketUnusable."""
        try:
            opened = plugins.open()
        except SocketUnusable as error:
            if required:
                raise
            if self._problems.get(plugins) != str(error):
                _LOG.warning("plugins of engines cannot be heard: %s", error)
            self._problems[plugins] = str(error)
            return False
        self._selector.register(opened, selectors.EVENT_READ, plugins)
        self._problems.pop(plugins, None)
        return True

    def _check_sockets(self) -> None:
        """Listen again where a socket is not in place."""
        if time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + _CHECK_EVERY_S
        for each in self._sockets:
            if each.path is None:
                self._listen_again(each)

    def _listen_again(self, plugins: PluginSocket) -> None:
        before = plugins.opened
        if before is not None:
            while self._read(plugins):
                pass
            self._selector.unregister(before)
            plugins.close()
        if self._listen(plugins):
            how = "listening" if before is None else "the socket was deleted, and made again"
            _LOG.warning("plugins of engines: %s at %s", how, plugins.path)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._check_sockets()
            events = self._selector.select(_CHECK_EVERY_S)
            ready = [key.data for key, _ in events if key.data is not None]
            for each in ready:
                for _ in range(_DATAGRAMS_PER_TURN):
                    if not self._read(each):
                        break
            self._limit_rate()

    def _limit_rate(self) -> None:
        """Wait for the next second after MAX_RECORDS_PER_S records in this one."""
        second, read = self._read_in_second
        monotonic = time.monotonic()
        if read > MAX_RECORDS_PER_S and second == int(monotonic):
            self._stopping.wait(second + 1 - monotonic)

    def _read(self, plugins: PluginSocket) -> bool:
        """Read one datagram of a socket; returns False without one."""
        received = plugins.receive()
        if received is None:
            return False
        try:
            self._take(plugins, *received)
        except Exception:
            # The thread must go on for the next datagram.
            _LOG.exception("a datagram at %s could not be read", plugins.path)
            self._counts.plugin_dropped(plugins.engine or UNKNOWN, PluginDropped.MALFORMED, 1)
        return True

    def _take(self, plugins: PluginSocket, datagram: bytes, pid: int) -> None:
        engine = plugins.engine_of(pid)
        now = self._now()
        content = read_datagram(datagram, engine or UNKNOWN, now)
        self._count_second(1 + (0 if content is None else content.records))
        if content is None:
            self._counts.plugin_dropped(engine or UNKNOWN, PluginDropped.NOT_OURS, 1)
            return
        if engine is None:
            self._refuse(plugins, content, pid)
            return
        stream = self._streams.setdefault(engine, _Stream())
        stream.heard_at = now
        if content.steps:
            stream.step_at = now
        self._count(engine, stream, content)
        for consumer in self._consumers:
            _hand_over(consumer, content)

    def _refuse(self, plugins: PluginSocket, content: PluginRecords, pid: int) -> None:
        """Count records of an unknown engine, unless they only say that a plugin is there."""
        dropped = len(content.steps) + len(content.ended) + len(content.served)
        dropped += len(content.counts) + content.refused.total()
        if not dropped:
            return
        self._counts.plugin_dropped(UNKNOWN, PluginDropped.UNKNOWN_ENGINE, dropped)
        if why := plugins.senders and plugins.senders.why_unknown(pid):
            _LOG.warning("the plugin in process %d is of no known engine: %s", pid, why)

    def _count_second(self, records: int) -> None:
        second = int(time.monotonic())
        counted_in, read = self._read_in_second
        self._read_in_second = (second, records + (read if counted_in == second else 0))

    def _count(self, engine: str, stream: _Stream, content: PluginRecords) -> None:
        requests = len(content.ended) + len(content.served)
        self._counts.plugin_received(engine, len(content.steps), requests)
        for counted in content.counts:
            name, status_class, count = counted.name, counted.status_class, counted.count
            self._counts.plugin_counted(engine, name, status_class, count)
        for reason, count in content.refused.items():
            self._counts.plugin_dropped(engine, reason, count)
        expected, dropped = stream.runs.pop(content.run, (content.first, content.dropped))
        stream.runs[content.run] = (content.first + content.records, content.dropped)
        if len(stream.runs) > _MAX_RUNS:
            stream.runs.pop(next(iter(stream.runs)))
        by_sender = max(0, content.dropped - dropped)
        missing = max(0, content.first - expected - by_sender)
        if 0 < by_sender < MAX_COUNT:
            self._counts.plugin_dropped(engine, PluginDropped.AGENT_BEHIND, by_sender)
        # A plugin's gap is smaller: a larger number is forged.
        if 0 < missing < MAX_COUNT:
            self._counts.plugin_dropped(engine, PluginDropped.LOST, missing)


def _hand_over(consumer: StepConsumer, content: PluginRecords) -> None:
    """Call a consumer with all records; its failure is logged and does not reach the others."""
    try:
        for step in content.steps:
            consumer.on_step(step)
        for ended in content.ended:
            consumer.on_ended(ended)
        for served in content.served:
            consumer.on_served(served)
    except Exception:
        _LOG.exception("records of an engine's plugin were not taken")
