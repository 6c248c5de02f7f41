"""What the running agent sees of each engine, for the steps that would show more."""

import logging
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agent.analysis.joined_record import is_from_front
from agent.analysis.setup_steps import (
    SetupFacts,
    SpansTarget,
    StepName,
    is_any_address,
    next_step_text,
    setup_steps,
    spans_target,
)
from agent.app.engines import EfficiencyJobs, EngineMonitors, GpuJobs
from agent.app.plugins import EnginePlugins
from agent.catalog.own_health import OK
from agent.errors import EngineUnreachable, ExpositionUnreadable, StoreUnavailable
from agent.outputs.api.api_context import ReadStore
from agent.outputs.prometheus.agent_exposition import HostBoard
from agent.outputs.prometheus.meter import Meter
from agent.records.engine import EngineSample, HostSample
from agent.records.objective import JudgedRequest
from agent.records.queries import RequestFilter, Selection
from agent.records.request import ENGINE_VIEWS, PROXY_VIEWS, Vantage
from agent.settings import EngineSettings, Settings
from agent.sources.engines.directory import EngineDirectory
from agent.sources.engines.engine_source import read_version
from agent.sources.engines.fetch import open_session, shown_url
from agent.sources.host.processes import has_rust_frontend
from agent.sources.host.source import process_locator

_LOG = logging.getLogger(__name__)

REFRESH_EVERY_S = 60.0
# Rows in which the views of an earlier run of the agent are looked for.
_ROWS = 20
# The file may have been written by a newer version, which knows others.
_VANTAGES = frozenset(Vantage)


class SeenViews:
    """When each engine's newest request of a kind ended, in Unix seconds: by a span, by the proxy,
    as measured in the engine's front, and by its plugin alone."""

    def __init__(self, *, has_proxy: bool) -> None:
        """An agent without a proxy gets rows with the user's view alone from plugins."""
        self._has_proxy = has_proxy
        self._spans: dict[str, float] = {}
        self._proxied: dict[str, float] = {}
        self._in_front: dict[str, float] = {}
        self._plugin_alone: dict[str, float] = {}

    def counted(self, requests: Sequence[JudgedRequest]) -> None:
        """Learn the views of counted requests but those of `counted_of_plugin`; never waits.

        A request of a plugin without the engine's figures waits for a span, and comes here.
        """
        for item in requests:
            record = item.record
            if record.engine is not None:
                self.learn(record.engine, record.vantage, record.ended_at)

    def counted_of_plugin(self, requests: Sequence[JudgedRequest]) -> None:
        """Learn the views of requests of engines' plugins; never waits."""
        for item in requests:
            record = item.record
            if record.engine is not None:
                in_front = record.vantage in PROXY_VIEWS
                self.learn_plugin(record.engine, record.ended_at, in_front=in_front)

    def learn(self, engine: str, vantage: Vantage, ended_at: float) -> None:
        """Learn the views of one request of a span or of the proxy."""
        if vantage is Vantage.PROXY and not self._has_proxy:
            _learn(self._in_front, engine, ended_at)
            return
        if vantage in ENGINE_VIEWS:
            _learn(self._spans, engine, ended_at)
        if vantage in PROXY_VIEWS:
            _learn(self._proxied, engine, ended_at)

    def learn_plugin(self, engine: str, ended_at: float, *, in_front: bool) -> None:
        """Learn of one request of a plugin, which measured it in the engine's front or not."""
        _learn(self._in_front if in_front else self._plugin_alone, engine, ended_at)

    def learn_stored(self, engine: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Learn the views of stored rows of an engine."""
        for row in rows:
            ended_at = row["ended_at"]
            if ended_at is None or row["vantage"] not in _VANTAGES:
                continue
            vantage = Vantage(row["vantage"])
            if is_from_front(row["span_id"], row["proxy_span_id"], row["engine_request_id"]):
                self.learn_plugin(engine, ended_at, in_front=True)
            elif vantage is Vantage.ENGINE and row["service_name"] is None:
                self.learn_plugin(engine, ended_at, in_front=False)
            else:
                self.learn(engine, vantage, ended_at)

    def has_spans(self, engine: str, since: float | None) -> bool:
        """Whether a span came of a request that ended since the engine's start."""
        return _is_since(self._spans.get(engine), since)

    def is_measured_in_front(self, engine: str, since: float | None) -> bool | None:
        """Whether requests since the engine's start were measured in its front; None without any
        that would be."""
        if _is_since(self._in_front.get(engine), since):
            return True
        others = self._spans.get(engine), self._plugin_alone.get(engine)
        return False if any(_is_since(newest, since) for newest in others) else None

    def was_proxied(self, engine: str) -> bool:
        """Whether a request came through the proxy."""
        return engine in self._proxied


def _learn(newest: dict[str, float], engine: str, ended_at: float) -> None:
    newest[engine] = max(newest.get(engine, 0.0), ended_at)


def _is_since(newest: float | None, since: float | None) -> bool:
    return newest is not None and (since is None or newest >= since)


class VersionReader:
    """Reads the version of each engine after each of its starts, until it is known."""

    def __init__(self, ca: Path | None) -> None:
        self._ca = ca
        self._versions: dict[str, tuple[float | None, str | None]] = {}

    def of(self, engine: str) -> str | None:
        """The version that was read last; None if it is unknown."""
        return self._versions.get(engine, (None, None))[1]

    def read(self, engine: EngineSettings, started_at: float | None) -> None:
        """Read the version if it is not that of this start yet. After a failure, call again."""
        known = self._versions.get(engine.name)
        if known is not None and known[0] == started_at:
            return
        # Another start may be of another version.
        self._versions.pop(engine.name, None)
        with open_session(self._ca) as session:
            try:
                self._versions[engine.name] = started_at, read_version(session, engine.url)
            except (EngineUnreachable, ExpositionUnreadable) as error:
                _LOG.debug("engine %s: its version is unknown: %s", engine.name, error)


class EngineSetups:
    """The setup of every engine of one agent. Only `refresh` waits."""

    def __init__(
        self,
        settings: Settings,
        *,
        views: SeenViews,
        meter: Meter,
        directory: EngineDirectory,
        gpus: GpuJobs,
        efficiency: EfficiencyJobs,
        hosts: HostBoard,
        monitors: EngineMonitors,
        plugins: EnginePlugins,
        read: ReadStore,
        simulated: bool,
    ) -> None:
        """A simulated engine has no steps: nobody can restart it."""
        self._settings, self._views, self._meter, self._directory = (
            settings, views, meter, directory,
        )  # fmt: skip
        self._gpus, self._efficiency, self._hosts = gpus, efficiency, hosts
        self._monitors, self._plugins, self._read = monitors, plugins, read
        self._engines = () if simulated else settings.engines
        self._prices = settings.price_list()
        self._versions = VersionReader(settings.tls.ca)
        self._logged: dict[str, frozenset[StepName]] = {}
        self._remembers = False

    def rows(self) -> Sequence[Mapping[str, Any]]:
        """The steps of each engine, as the API shows them."""
        samples = self._meter.samples()
        return [
            {
                "engine": facts.engine,
                "agent": self._settings.name,
                "dialect": facts.program,
                "version": facts.version,
                "model": facts.model,
                "steps": setup_steps(facts),
            }
            for facts in (self._facts(engine, samples[engine.name]) for engine in self._engines)
        ]

    def status_text(self) -> str:
        """How many engines could show more; `ok` if none could. Readers need no token: no names."""
        rows = self.rows()
        more = sum(any(step.state == "missing" for step in row["steps"]) for row in rows)
        return f"{more} of {len(rows)} engines could show more: see /api/v1/setup" if more else OK

    def refresh(self, _now: float) -> None:
        """Read versions, and log the next step of each engine that shows more than before."""
        self._remember()
        for engine in self._engines:
            sample = self._meter.samples()[engine.name]
            if sample is not None:
                self._versions.read(engine, sample.process_started_at)
            steps = setup_steps(self._facts(engine, self._meter.samples()[engine.name]))
            done = frozenset(step.name for step in steps if step.state == "done")
            before = self._logged.get(engine.name)
            if before is None or done - before:
                _LOG.info("%s", next_step_text(engine.name, steps))
            self._logged[engine.name] = done | (before or frozenset())

    def _remember(self) -> None:
        """Learn once what an earlier run of the agent saw."""
        if self._remembers:
            return
        try:
            for engine in self._engines:
                rows = self._read(partial(_stored, engine.name))
                self._views.learn_stored(engine.name, rows)
        except StoreUnavailable as error:
            _LOG.debug("what the last run saw of engines is not known yet: %s", error)
        else:
            self._remembers = True

    def _facts(self, engine: EngineSettings, sample: EngineSample | None) -> SetupFacts:
        same_machine = process_locator(engine.url, (), engine.same_machine).same_machine
        host = self._hosts.newest(engine.name)
        kind = None if engine.kind == "auto" else engine.kind
        config, log, plugin = engine.model_config_path, engine.log, engine.plugin_socket
        return SetupFacts(
            engine=engine.name,
            url=shown_url(engine.url),
            program=self._monitors.dialect_of(engine.name) or kind,
            version=self._versions.of(engine.name),
            model=self._directory.model_of(engine.name),
            seen=frozenset(self._seen(engine, sample, host)),
            impossible=frozenset(self._impossible(engine, same_machine=same_machine)),
            measured_in_front=self._views.is_measured_in_front(
                engine.name, None if sample is None else sample.process_started_at
            ),
            failure=self._monitors.failure_of(engine.name),
            rust_frontend=host is not None and has_rust_frontend(host.processes or ()),
            remote=not same_machine,
            spans=target_of(self._settings, same_machine=same_machine),
            plugin_socket=None if plugin is None else str(plugin),
            proxy_url=proxy_url(self._settings),
            gpus=self._indexes(),
            log=None if log is None else str(log),
            model_config=None if config is None else str(config),
            model_problem=self._efficiency.model_problem(engine.name),
            priced=self._has_price(engine.name),
        )

    def _seen(
        self, engine: EngineSettings, sample: EngineSample | None, host: HostSample | None
    ) -> Iterator[StepName]:
        name = engine.name
        started_at = None if sample is None else sample.process_started_at
        sees = {
            StepName.METRICS: sample is not None,
            StepName.SPANS: self._views.has_spans(name, started_at),
            StepName.PLUGIN: self._plugins.is_there(name),
            StepName.PROXY: self._views.was_proxied(name),
            StepName.GPU: bool(self._gpus.inventory.samples_of(name)),
            StepName.PRICE: self._has_price(name)
            and bool(engine.parallelism or engine.gpus or self._gpus.inventory.samples_of(name)),
            StepName.MODEL_CONFIG: self._efficiency.has_model(name),
            StepName.LOG: engine.log is not None and host is not None and host.log is not None,
        }
        yield from (step for step, is_seen in sees.items() if is_seen)

    def _has_price(self, engine: str) -> bool:
        samples = self._gpus.inventory.samples_of(engine)
        return self._prices.has_prices(engine, [gpu.name for gpu in samples], time.time())

    def _impossible(self, engine: EngineSettings, *, same_machine: bool) -> Iterator[StepName]:
        settings, proxy = self._settings, self._settings.proxy
        if settings.engines_from.kubernetes is not None or proxy.engine not in (None, engine.name):
            yield StepName.PROXY
        if same_machine and settings.reads_nvml and not self._indexes():
            # A machine without a GPU.
            yield StepName.GPU
            if not self._has_price(engine.name):
                yield StepName.PRICE

    def _indexes(self) -> tuple[int, ...] | None:
        if not self._settings.reads_nvml and self._settings.dcgm.url is None:
            return None
        return tuple(sorted(sample.index for sample in self._gpus.inventory.newest()))


def _stored(engine: str, queries: Any) -> Sequence[Mapping[str, Any]]:
    wanted = RequestFilter(selection=Selection(engine=engine))
    rows: Sequence[Mapping[str, Any]] = queries.requests(wanted, None, _ROWS).items
    return rows


def target_of(settings: Settings, *, same_machine: bool) -> SpansTarget:
    """Where an engine sends its spans by these settings."""
    security = settings.security
    return spans_target(
        grpc=settings.otlp.grpc,
        http=settings.otlp.http,
        encrypted=security.tls_certificate is not None,
        needs_token=security.ingest_tokens is not None,
        host=None if same_machine else socket.gethostname(),
    )


def proxy_url(settings: Settings) -> str | None:
    """The proxy's address as its clients on this machine write it; None without a proxy."""
    listen = settings.proxy.listen
    if listen is None:
        return None
    scheme = "http" if settings.security.tls_certificate is None else "https"
    parts = urlsplit(f"{scheme}://{listen}")
    if is_any_address(parts.hostname or ""):
        return f"{scheme}://{socket.gethostname()}:{parts.port}"
    return parts.geturl()
