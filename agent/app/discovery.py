"""Finds engines in pods of Kubernetes, and says when others must be watched than now."""

import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path

from pydantic import ValidationError

from agent.catalog import own_health as own
from agent.catalog.own_health import OK, DiscoveryCall, DiscoveryFailure
from agent.errors import DiscoveryFailed
from agent.outputs.prometheus.meter import Meter
from agent.settings import EngineSettings, Settings
from agent.settings.engine_settings import KubernetesSettings
from agent.sources.kubernetes import ApiServer, FoundEngine, PodWatch, engine_of

_LOG = logging.getLogger(__name__)

# Pods of one rollout follow each other: the agent starts anew for all of them at once.
SETTLES_AFTER_S = 2.0

# No namespace is named in the settings.
EVERY_NAMESPACE = "all"


class EngineDiscovery:
    """The engines of the settings, and those that were found."""

    def __init__(
        self, settings: Settings, kubernetes: KubernetesSettings, settles_after_s: float
    ) -> None:
        """It finds nothing before `read_first`. Raises SettingsInvalid outside of a cluster."""
        self._settings = settings
        self._kubernetes = kubernetes
        self._settles_after_s = settles_after_s
        self._watches = _watches(kubernetes)
        self._changed = threading.Event()
        self._stop = threading.Event()

    def read_first(self) -> None:
        """List the pods of every namespace. What fails is tried again after `start`."""
        for watch in self._watches:
            try:
                watch.list()
            except DiscoveryFailed as error:
                watch.failed(error)
                _LOG.warning("no engines are found yet: %s", error)

    def settings(self) -> Settings:
        """The settings with the engines that are known now."""
        fixed = {engine.name: engine for engine in self._settings.engines}
        found = {name: engine for name, engine in self._found().items() if name not in fixed}
        return self._settings.model_copy(update={"engines": (*fixed.values(), *found.values())})

    def start(self, on_change: Callable[[], None]) -> None:
        """Watch the pods; `on_change` is called once, when the engines differ from those now."""
        now = self.settings().engines
        for watch in self._watches:
            follow = partial(watch.follow, self._changed.set, self._stop)
            name = f"pods {watch.namespace or 'of all'}"
            threading.Thread(target=follow, name=name, daemon=True).start()
        report = partial(self._report_changes, now, on_change)
        threading.Thread(target=report, name="engine-discovery", daemon=True).start()

    def stop(self) -> None:
        """Report no more changes. The threads end with the process: a watch waits for its
        server."""
        self._stop.set()
        self._changed.set()

    def status_text(self) -> str:
        """What is wrong with it, or `ok`."""
        problems = {watch.problem for watch in self._watches if watch.problem is not None}
        return "; ".join(sorted(problems)) or OK

    def publish(self, meter: Meter) -> None:
        """Publish what is found and what fails, as known at each scrape."""
        for watch in self._watches:
            namespace = watch.namespace or EVERY_NAMESPACE
            found, succeeded_at = partial(_engines, watch), partial(_succeeded_at, watch)
            meter.gauge(own.DISCOVERED_ENGINES, found, namespace)
            meter.gauge(own.DISCOVERY_SUCCESS, succeeded_at, namespace)
            for failure in product(DiscoveryCall, DiscoveryFailure):
                failed = partial(watch.failures.__getitem__, failure)
                meter.gauge(own.DISCOVERY_FAILURES, failed, namespace, *failure)

    def _report_changes(
        self, now: tuple[EngineSettings, ...], on_change: Callable[[], None]
    ) -> None:
        while not self._stop.is_set():
            self._changed.wait()
            while not self._stop.is_set():
                self._changed.clear()
                if not self._changed.wait(self._settles_after_s):
                    break
            if not self._stop.is_set() and self.settings().engines != now:
                on_change()
                return

    def _found(self) -> Mapping[str, EngineSettings]:
        """The settings of the engines that were found, by name, in order."""
        found: dict[str, EngineSettings] = {}
        for engine in sorted(each for watch in self._watches for each in watch.engines()):
            if engine.name in found:
                _LOG.warning(
                    "two pods are named %s: only one is watched; set engines_from.kubernetes.name "
                    "to namespace/pod",
                    engine.name,
                )
            elif (settings := self._engine(engine)) is not None:
                found[engine.name] = settings
        return found

    def _engine(self, engine: FoundEngine) -> EngineSettings | None:
        kubernetes = self._kubernetes
        try:
            found = EngineSettings(
                name=engine.name, url=engine.url, kind=kubernetes.kind, pod=engine.pod
            )
            # As values: only texts are checked.
            of_all = {
                "scrape_interval": kubernetes.scrape_interval,
                "model_config_path": kubernetes.model_config_path,
            }
            return found.model_copy(update={"role": _role(engine), **of_all})
        except ValidationError as error:
            _LOG.warning("the pod %s is not watched: %s", engine.name, error.errors()[0]["msg"])
            return None


def _role(engine: FoundEngine) -> str:
    """Its role. llm-d also has `prefill-decode`, and roles with `encode`: these are `both`."""
    return engine.role if engine.role in ("prefill", "decode") else "both"


def _engines(watch: PodWatch) -> float:
    return len(watch.engines())


def _succeeded_at(watch: PodWatch) -> float | None:
    return watch.succeeded_at


def discovery_of(
    settings: Settings, settles_after_s: float = SETTLES_AFTER_S
) -> EngineDiscovery | None:
    """The discovery that the settings want; None if they want none.

    Raises SettingsInvalid outside of a cluster.
    """
    kubernetes = settings.engines_from.kubernetes
    return None if kubernetes is None else EngineDiscovery(settings, kubernetes, settles_after_s)


def _watches(kubernetes: KubernetesSettings) -> list[PodWatch]:
    server = ApiServer(kubernetes.api, Path(kubernetes.service_account))
    chosen = {"labelSelector": kubernetes.selector}
    if kubernetes.node is not None:
        chosen["fieldSelector"] = f"spec.nodeName={kubernetes.node}"
    read = partial(
        engine_of,
        port=kubernetes.port,
        role_label=kubernetes.role_label,
        with_namespace=kubernetes.name == "namespace/pod",
    )
    namespaces = kubernetes.namespaces or (None,)
    return [PodWatch(server, namespace, chosen, read) for namespace in namespaces]
