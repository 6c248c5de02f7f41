"""The agent's side of engines' plugins: their sockets, and whether each plugin is there."""

from collections.abc import Callable, Sequence
from functools import partial

from agent.catalog import metrics as m
from agent.outputs.prometheus.meter import Meter
from agent.settings import Settings
from agent.sources.engine_plugin.receiver import PluginReceiver, StepConsumer

# vLLM calls its stat loggers every 10 s when it is idle.
HEARD_WITHIN_S = 30.0


class EnginePlugins:
    """Receives what the plugins of all engines with a `plugin_socket` send."""

    def __init__(
        self,
        settings: Settings,
        meter: Meter,
        consumers: Sequence[StepConsumer],
        now: Callable[[], float],
    ) -> None:
        """Each of the `consumers` gets every step and every ended request, in one thread."""
        paths = {
            engine.name: engine.plugin_socket
            for engine in settings.engines
            if engine.plugin_socket is not None
        }
        self._paths = paths
        self._now = now
        self._receiver = PluginReceiver(paths, consumers, meter, now) if paths else None
        for engine in paths:
            meter.gauge(m.PLUGIN_UP, partial(self._up, engine), engine)
            meter.gauge(m.PLUGIN_LAST_STEP, partial(self._step_at, engine), engine)

    def is_there(self, engine: str) -> bool:
        """Whether the plugin of an engine was heard of a moment ago."""
        if self._receiver is None or engine not in self._paths:
            return False
        heard_at = self._receiver.heard_at(engine)
        return heard_at is not None and self._now() - heard_at < HEARD_WITHIN_S

    def _up(self, engine: str) -> float:
        return float(self.is_there(engine))

    def _step_at(self, engine: str) -> float | None:
        return None if self._receiver is None else self._receiver.step_at(engine)

    def in_words(self) -> str:
        """Which plugins are not there."""
        if not self._paths:
            return "not configured"
        statuses = [text for engine in self._paths if (text := self._status_of(engine))]
        return "; ".join(statuses) or "ok"

    def _status_of(self, engine: str) -> str | None:
        """What is wrong with the plugin of an engine; None while it is heard of."""
        assert self._receiver is not None, "an engine has a plugin_socket"
        if problem := self._receiver.problem(engine):
            return problem
        if self.is_there(engine):
            return None
        heard_at = self._receiver.heard_at(engine)
        if heard_at is None:
            return f"nothing has come from the plugin of {engine} yet: see docs/vllm-plugin.md"
        silent_s = self._now() - heard_at
        return f"nothing has come from the plugin of {engine} for {silent_s:.0f} s"

    def start(self) -> None:
        """Listen. Raises SettingsInvalid for a socket that cannot be made."""
        if self._receiver is not None:
            self._receiver.start()

    def close(self) -> None:
        """Stop listening."""
        if self._receiver is not None:
            self._receiver.close()
