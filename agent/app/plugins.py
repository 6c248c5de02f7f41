"""Receives what plugins in engines report, by sockets of engines or by the shared one."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from agent.app.jobs import Jobs
from agent.catalog import metrics as m
from agent.outputs.prometheus.meter import Meter
from agent.settings import Settings
from agent.sources.engine_plugin import PluginReceiver, StepConsumer
from agent.sources.host.source import process_locator
from agent.sources.open_requests import EndedFrontConsumer, OpenRequestsWatch
from agent.sources.plugin_sockets import PluginSocket, SenderLookup, default_places

# vLLM calls its stat loggers every 10 s when it is idle.
HEARD_WITHIN_S = 30.0
OPEN_REQUESTS_EVERY_S = 1.0


class EnginePlugins:
    """Receives what the plugins of engines send and keep.

    An engine has a socket of its own, its `plugin_socket`, or is on this machine: then its plugin
    may send to the shared socket.
    """

    def __init__(
        self,
        settings: Settings,
        meter: Meter,
        consumers: Sequence[StepConsumer],
        now: Callable[[], float],
        *,
        of_ended_fronts: Sequence[EndedFrontConsumer],
    ) -> None:
        """Each of the `consumers` gets every step and every ended request, in one thread.

        Those `of_ended_fronts` get the requests that were open when a front ended, in a job.
        """
        self._now = now
        self._engines = [engine.name for engine in settings.engines]
        self._with_socket = {each.name for each in settings.engines if each.plugin_socket}
        sockets = plugin_sockets(settings)
        self._receiver = PluginReceiver(sockets, consumers, meter, now) if sockets else None
        self.open_requests = OpenRequestsWatch(sockets, of_ended_fronts, meter)
        for engine in self._engines:
            meter.gauge(m.PLUGIN_UP, partial(self._up, engine), engine)
            meter.gauge(m.PLUGIN_LAST_STEP, partial(self._step_at, engine), engine)
            meter.gauge(m.OPEN_REQUESTS, partial(self._open, engine), engine)
            meter.gauge(m.STALLED_REQUESTS, partial(self._stalled, engine), engine)

    def is_there(self, engine: str) -> bool:
        """Whether the plugin of an engine was heard of a moment ago."""
        heard_at = self._heard_at(engine)
        return heard_at is not None and self._now() - heard_at < HEARD_WITHIN_S

    def _heard_at(self, engine: str) -> float | None:
        return None if self._receiver is None else self._receiver.heard_at(engine)

    def _is_expected(self, engine: str) -> bool:
        return engine in self._with_socket or self._heard_at(engine) is not None

    def _up(self, engine: str) -> float | None:
        return float(self.is_there(engine)) if self._is_expected(engine) else None

    def _step_at(self, engine: str) -> float | None:
        return None if self._receiver is None else self._receiver.step_at(engine)

    def _open(self, engine: str) -> float | None:
        live = self.open_requests.live(engine)
        return None if live is None else live.open

    def _stalled(self, engine: str) -> float | None:
        live = self.open_requests.live(engine)
        return None if live is None else live.stalled

    def status_text(self) -> str:
        """Which plugins are not there, and why."""
        problems = () if self._receiver is None else self._receiver.problems()
        expected = [engine for engine in self._engines if self._is_expected(engine)]
        silent = [self._silent(engine) for engine in expected if not self.is_there(engine)]
        return "; ".join([*problems, *silent]) or ("ok" if expected else "not configured")

    def _silent(self, engine: str) -> str:
        heard_at = self._heard_at(engine)
        if heard_at is None:
            return f"nothing has come from the plugin of {engine} yet: see docs/vllm-plugin.md"
        silent_s = self._now() - heard_at
        return f"nothing has come from the plugin of {engine} for {silent_s:.0f} s"

    def start(self) -> None:
        """Listen. Raises SettingsInvalid for a `plugin_socket` that cannot be made."""
        if self._receiver is not None:
            self._receiver.start()

    def schedule(self, jobs: Jobs) -> None:
        """Read the open requests from now on."""
        if self._receiver is not None:
            name = "read open requests"
            jobs.every(OPEN_REQUESTS_EVERY_S, name, self._read_open_requests, first_in_s=0.0)

    def _read_open_requests(self, _now: float) -> None:
        self.open_requests.check()

    def close(self) -> None:
        """Stop listening."""
        if self._receiver is not None:
            self._receiver.close()


def _local_engines(settings: Settings) -> Mapping[int, str]:
    """The engines whose plugin may be found, by their port; none of several with the same port."""
    if settings.agent_socket == "none":
        return {}
    locators = {
        each.name: process_locator(each.url, (), each.same_machine) for each in settings.engines
    }
    ports = Counter(each.port for each in locators.values() if each.same_machine)
    return {
        locator.port: engine
        for engine, locator in locators.items()
        if locator.same_machine and locator.port is not None and ports[locator.port] == 1
    }


def plugin_sockets(settings: Settings) -> Sequence[PluginSocket]:
    """The sockets of engines, and the shared one if an engine of this machine has none."""
    local = _local_engines(settings)
    senders, given = SenderLookup(local), settings.agent_socket
    places = default_places() if given == "auto" else (Path(given),)
    own = {each.name: each.plugin_socket for each in settings.engines if each.plugin_socket}
    sockets = [
        # In one of the places, plugins of other engines find it too.
        PluginSocket((path,), engine, senders if path in places else None)
        for engine, path in own.items()
    ]
    if set(local.values()) - own.keys() and not set(places) & set(own.values()):
        sockets.append(PluginSocket(places, None, senders))
    return sockets
