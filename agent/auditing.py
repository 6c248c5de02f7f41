"""The audit of a live deployment by the `audit` command: what it reads, and the printed result."""

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agent.agent_api import AgentApi, open_agent, own_agent
from agent.analysis.audit import audit, counts
from agent.analysis.audit.checks import AuditFinding
from agent.analysis.joined_record import is_from_front
from agent.analysis.setup_steps import SetupStep
from agent.app.engines import gpu_source
from agent.audited_setup import steps_of_agent, steps_of_evidence
from agent.catalog.causes import Cause
from agent.catalog.engine_flags import TRACES_ENDPOINT
from agent.catalog.gpu_problems import NO_GPU
from agent.catalog.hardware import WeightDtype
from agent.catalog.metrics import PLUGIN_UP
from agent.command_options import secret_in
from agent.errors import AgentError, ExpositionUnreadable, SettingsInvalid
from agent.outputs.audit import audit_json, print_audit
from agent.records.audit import (
    AgentEvidence,
    AuditEvidence,
    EngineEvidence,
    EvidencePart,
    LatencyLimits,
    LoadHistory,
    TrialRequest,
)
from agent.records.gpu import GpuSample
from agent.records.model import ModelShape
from agent.records.objective import Objective
from agent.records.request import ENGINE_VIEWS, PROXY_VIEWS, Status
from agent.settings import EngineSettings, Settings
from agent.sources.engines.exposition import read_exposition
from agent.sources.engines.live_engine import LiveEngine, outside_s
from agent.sources.host.processes import EngineProcesses, ProcessLocator, read_processes
from agent.sources.host.source import process_locator
from agent.sources.model_config import (
    ArchitectureUnknown,
    read_model,
    read_weights,
    weights_text,
)
from agent.terminal import TerminalConsole, echo

_MOST_ROWS = 1000
_ASK_EVERY_S = 0.25
_FOUND = 200
# vLLM quantises 16-bit weights at its start.
_AT_START = {"fp8": WeightDtype.FP8}

Unread = dict[EvidencePart, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOptions:
    """What to audit. Without `agent_url` the agent is that of the settings, if it runs.

    A request is sent only if `send` is true; its row has `wait_s` to be there. `step` is called
    with what the audit does.
    """

    url: str
    settings: Settings
    step: Callable[[str], None]
    agent_url: str | None = None
    token_file: Path | None = None
    key: str | None = None
    send: bool = False
    wait_s: float = 20.0


def gather(options: AuditOptions) -> AuditEvidence:
    """All evidence that can be had. Raises EngineUnreachable and SettingsInvalid."""
    configured = _configured(options)
    unread: Unread = {}
    options.step("reading the engine")
    ca = options.settings.tls.ca
    with closing(LiveEngine(options.url, key=options.key, kind=configured.kind, ca=ca)) as live:
        read = live.read()
        unread |= read.unread
        processes = _processes(options, configured, unread)
        gpus = _gpus(options, configured, unread)
        model = _model(configured, processes, unread)
        engine = read.evidence
        options.step("asking the agent")
        with open_agent(*_agent_of(options), ca) as api:
            agent = _agent(api, options, configured, engine, unread)
            awaits_row = agent is not None and _may_have_rows(agent, processes)
            trial = _trial(api if awaits_row else None, live, options, engine)
    if trial is None:
        unread[EvidencePart.REQUEST] = "no request was sent"
    return AuditEvidence(
        at=time.time(),
        engine=engine,
        limits=_limits(options.settings.all_objectives()),
        command_line=processes.command_line,
        stated_limits=configured.limits.by_fact(),
        addresses=processes.addresses,
        remote=not _locator(options, configured).same_machine,
        rust_frontend=processes.rust_frontend,
        pids=processes.pids,
        gpus=gpus,
        model=model,
        agent=agent,
        trial=trial,
        unread=unread,
    )


def _configured(options: AuditOptions) -> EngineSettings:
    """The settings of the engine at this URL; without any, the defaults."""
    url = options.url.rstrip("/")
    found = (each for each in options.settings.engines if str(each.url).rstrip("/") == url)
    return next(found, None) or EngineSettings(name="engine-0", url=options.url)


def _locator(options: AuditOptions, configured: EngineSettings) -> ProcessLocator:
    return process_locator(options.url, configured.pids, configured.same_machine)


def _limits(objectives: Sequence[Objective]) -> LatencyLimits:
    def of(name: str) -> tuple[float, ...]:
        given = (getattr(objective, name) for objective in objectives)
        return tuple(sorted({limit for limit in given if limit is not None}))

    return LatencyLimits(ttft_s=of("ttft_s"), tpot_s=of("tpot_s"), e2e_s=of("e2e_s"))


def _processes(
    options: AuditOptions, configured: EngineSettings, unread: Unread
) -> EngineProcesses:
    found = read_processes(_locator(options, configured), time.time())
    if found.problem is not None:
        unread[EvidencePart.COMMAND_LINE] = found.problem
    if found.addresses is None:
        unread[EvidencePart.ADDRESSES] = found.problem or "its addresses cannot be seen"
    return found


def _gpus(
    options: AuditOptions, configured: EngineSettings, unread: Unread
) -> tuple[GpuSample, ...] | None:
    """The GPUs of this machine, or of dcgm-exporter; None if they cannot be read."""
    source = gpu_source(options.settings)
    locator = _locator(options, configured)
    if source is None or not (locator.same_machine or locator.pids):
        unread[EvidencePart.GPUS] = (
            "nvml.enabled is false" if source is None else "the engine is not on this machine"
        )
        return None
    options.step("reading the GPUs")
    with closing(source):
        read = source.read(time.time())
    if not read.samples and set(read.failures) - {NO_GPU}:
        unread[EvidencePart.GPUS] = f"no GPU can be read: {', '.join(read.failures)} (docs/gpus.md)"
        return None
    return read.samples


def _model(
    configured: EngineSettings, processes: EngineProcesses, unread: Unread
) -> ModelShape | None:
    """The model that the settings name; None if they name none, or it cannot be read."""
    if configured.model_config_path is None:
        unread[EvidencePart.WEIGHTS] = "the settings name no config.json of the model"
        return None
    line = processes.command_line
    by_flag = None if line is None else _AT_START.get(line.flags.get("--quantization", ""))
    try:
        return read_model(configured.model_config_path, dtype=configured.dtype or by_flag)
    except ArchitectureUnknown as error:
        weights = read_weights(configured.model_config_path, error)
        text = str(error) if weights is None else weights_text(error, weights)
        unread[EvidencePart.WEIGHTS] = text
    except AgentError as error:
        unread[EvidencePart.WEIGHTS] = str(error)
    return None


def _agent_of(options: AuditOptions) -> tuple[str, Path | None]:
    """The URL of the agent and the file with its token."""
    own_url, own_tokens = own_agent(options.settings)
    return options.agent_url or own_url, options.token_file or own_tokens


def _agent(
    api: AgentApi,
    options: AuditOptions,
    configured: EngineSettings,
    engine: EngineEvidence,
    unread: Unread,
) -> AgentEvidence | None:
    """What the agent knows. Raises SettingsInvalid if it was named and does not respond."""
    try:
        names = [each["name"] for each in api("engines")["items"]]
        name = configured.name if configured.name in names else None
        if name is None and len(names) == 1:
            name = names[0]
        if name is None:
            watched = ", ".join(names) or "no engine"
            unread[EvidencePart.AGENT] = f"the agent watches {watched}; --config says which it is"
            return None
        return _rows(api, name, engine)
    except SettingsInvalid as error:
        if options.agent_url is not None:
            raise
        unread[EvidencePart.AGENT] = error.problems[0]
        return None


def _rows(api: AgentApi, name: str, engine: EngineEvidence) -> AgentEvidence:
    since = {} if engine.sample is None else _since(engine.sample.process_started_at)
    rows = api("requests", engine=name, limit=_MOST_ROWS, **since)["items"]
    proxy_views = _count(rows, PROXY_VIEWS)
    cold = api("requests", engine=name, cause=Cause.COLD_START, limit=_MOST_ROWS, **since)["items"]
    plugin = _plugin(api, name)
    return AgentEvidence(
        requests=len(rows),
        lengths=tuple(
            (row["input_tokens"], row["output_tokens"])
            for row in rows
            if None not in (row["input_tokens"], row["output_tokens"])
        ),
        engine_views=_count(rows, ENGINE_VIEWS),
        proxy_views=proxy_views,
        in_front=sum(_is_from_front(row) for row in rows),
        left_after_s=_left_after_s(rows) if plugin or proxy_views else None,
        cold=len(cold),
        plugin=plugin,
        load=_load(api("summary", engine=name, window="1h")),
    )


def _load(summary: Mapping[str, Any]) -> LoadHistory | None:
    counted = summary["engine_counts"]
    if counted is None:
        return None
    over_ms = within_ms = summary["queue_ms"]["p95"]
    if over_ms is None and (by_engine := counted["latencies_ms"].get("queue")):
        over_ms, within_ms = by_engine["p95"]["lower"], by_engine["p95"]["upper"]
    return LoadHistory(
        covered_s=counted["covered_s"],
        waiting=counted["waiting"],
        running=counted["running"],
        cache_usage=counted["kv_cache_usage"],
        waited_over_s=None if over_ms is None else over_ms / 1000,
        waited_within_s=None if within_ms is None else within_ms / 1000,
    )


def _count(rows: Sequence[Mapping[str, Any]], views: Set[str]) -> int:
    return sum(row["vantage"] in views for row in rows)


def _is_from_front(row: Mapping[str, Any]) -> bool:
    return is_from_front(row["span_id"], row["proxy_span_id"], row["engine_request_id"])


def _left_after_s(rows: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    """How long the requests took whose clients left."""
    left = [row["e2e_s"] for row in rows if row["status"] == Status.CANCELLED]
    return tuple(each for each in left if each is not None)


def _plugin(api: AgentApi, name: str) -> bool | None:
    try:
        series = read_exposition(api.content("/metrics"), {PLUGIN_UP.name}).series
    except ExpositionUnreadable:
        return None
    up = [each.value for each in series.get(PLUGIN_UP.name, ()) if each.labels["engine"] == name]
    return bool(up[0]) if up else None


def _since(started_at: float | None) -> Mapping[str, str]:
    """Only requests since the engine's start: an earlier one may have had another limit."""
    if started_at is None:
        return {}
    return {"started_from": datetime.fromtimestamp(started_at, UTC).isoformat()}


def _may_have_rows(agent: AgentEvidence, processes: EngineProcesses) -> bool:
    """Whether a row of a request may come: by the plugin, or by a span unless none is sent."""
    line = processes.command_line
    no_spans = line is not None and line.whole and TRACES_ENDPOINT not in line.flags
    return bool(agent.plugin) or not no_spans


def _trial(
    api: AgentApi | None, live: LiveEngine, options: AuditOptions, engine: EngineEvidence
) -> TrialRequest | None:
    """Send a request if that is allowed, and wait for its row at the API of the agent, if any."""
    if not options.send or not engine.models:
        return None
    options.step("sending a request")
    trial, response_id = live.send(engine.models[0])
    if api is None or response_id is None:
        return trial
    options.step("waiting for its row")
    return _with_row(api, trial, (f"{response_id}-0", response_id), options.wait_s)


def _with_row(
    api: AgentApi, trial: TrialRequest, ids: Sequence[str], wait_s: float
) -> TrialRequest:
    begun = time.monotonic()
    while (waited_s := time.monotonic() - begun) < wait_s:
        for request_id in ids:
            status, row = api.read(f"/api/v1/requests/{request_id}")
            if status == _FOUND and row["vantage"] in ENGINE_VIEWS:
                lead_s, in_front = _lead_s(trial, row), _is_from_front(row)
                return replace(trial, waited_s=waited_s, lead_s=lead_s, in_front=in_front)
        time.sleep(_ASK_EVERY_S)
    return replace(trial, waited_s=waited_s)


def _lead_s(trial: TrialRequest, row: Mapping[str, Any]) -> float:
    """How far a row lies outside the request; negative before it."""
    if row["clock_skew_s"] is not None:
        # So far ahead that the agent has replaced its times.
        return float(row["clock_skew_s"])
    started_at, ended_at = (
        datetime.fromisoformat(row[name]).timestamp() for name in ("started_at", "ended_at")
    )
    behind_s = outside_s(started_at, started_at, trial.sent_at, trial.ended_at)
    ahead_s = outside_s(ended_at, ended_at, trial.sent_at, trial.ended_at)
    return behind_s if behind_s < 0 else max(0.0, ahead_s)


def _setup_steps(options: AuditOptions, evidence: AuditEvidence) -> Sequence[SetupStep]:
    configured = _configured(options)
    found: Sequence[SetupStep] = ()
    if evidence.agent is not None:
        with open_agent(*_agent_of(options), options.settings.tls.ca) as api:
            found = steps_of_agent(api, configured.name)
    return found or steps_of_evidence(evidence, options.settings, configured)


def audit_deployment(
    url: str,
    settings: Settings,
    *,
    agent_url: str | None,
    token_file: Path | None,
    key_file: Path | None,
    send: bool,
    as_json: bool,
) -> int:
    """Print the audit; 1 if a line fails, else 0. Raises EngineUnreachable, SettingsInvalid."""
    # What could not be read is in the lines.
    logging.getLogger("agent").addHandler(logging.NullHandler())
    progress = TerminalConsole(file=sys.stderr)
    with progress.status("reading the settings") as status:
        options = AuditOptions(
            url=url,
            settings=settings,
            step=status.update,
            agent_url=agent_url,
            token_file=token_file,
            key=None if key_file is None else secret_in("--key-file", key_file),
            send=send,
        )
        evidence = gather(options)
    lines, steps = audit(evidence), _setup_steps(options, evidence)
    if as_json:
        echo(audit_json(evidence, lines, steps))
    else:
        print_audit(evidence, lines, TerminalConsole(), steps)
    return 1 if counts(lines)[AuditFinding.FAIL] else 0
