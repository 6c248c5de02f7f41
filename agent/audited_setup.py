"""The steps of an audited engine: those of its agent, else those of the audit's evidence."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agent.agent_api import AgentApi
from agent.analysis.setup_steps import (
    SetupAction,
    SetupFacts,
    SetupStep,
    StepName,
    setup_steps,
)
from agent.app.engine_setup import proxy_url, target_of
from agent.catalog.engine_flags import NO_STATISTICS
from agent.errors import SettingsInvalid
from agent.records.audit import AuditEvidence, EvidencePart
from agent.records.gpu import GpuSample
from agent.settings import EngineSettings, Settings

_KNOWN = frozenset(StepName)


def steps_of_agent(api: AgentApi, engine: str) -> Sequence[SetupStep]:
    """The steps of an engine by its agent; empty without the agent, or by one of another version.

    If the agent watches one engine alone, its name may be another one.
    """
    try:
        items = api("setup")["items"]
    except SettingsInvalid:
        return ()
    named = items if len(items) == 1 else [each for each in items if each["engine"] == engine]
    return [_step(row) for row in named[0]["steps"] if row["name"] in _KNOWN] if named else ()


def _step(row: Mapping[str, Any]) -> SetupStep:
    return SetupStep(
        name=StepName(row["name"]),
        state=row["state"],
        shows=row["shows"],
        actions=tuple(SetupAction(each["where"], tuple(each["lines"])) for each in row["actions"]),
    )


def steps_of_evidence(
    evidence: AuditEvidence, settings: Settings, configured: EngineSettings
) -> Sequence[SetupStep]:
    """The steps of an engine by what the audit itself read."""
    engine, config = evidence.engine, configured.model_config_path
    line, log, plugin = evidence.command_line, configured.log, configured.plugin_socket
    kind = evidence.dialect if configured.kind == "auto" else configured.kind
    priced = _is_priced(evidence, settings, configured)
    return setup_steps(
        SetupFacts(
            engine=configured.name,
            url=engine.url,
            program=kind if engine.sample is None else engine.sample.dialect,
            version=engine.version,
            model=next(iter(engine.models), None),
            seen=frozenset(_seen(evidence, configured, priced=priced)),
            impossible=frozenset(_left_out(evidence, priced=priced)),
            measured_in_front=_is_measured_in_front(evidence),
            statistics_off=line is not None and NO_STATISTICS in line.flags,
            rust_frontend=evidence.rust_frontend,
            remote=evidence.remote,
            spans=target_of(settings, same_machine=not evidence.remote),
            plugin_socket=None if plugin is None else str(plugin),
            proxy_url=proxy_url(settings),
            gpus=tuple(sorted(gpu.index for gpu in evidence.gpus or ())),
            log=None if log is None else str(log),
            model_config=None if config is None else str(config),
            model_problem=None if config is None else evidence.unread.get(EvidencePart.WEIGHTS),
            priced=priced,
        )
    )


def _engine_gpus(evidence: AuditEvidence, configured: EngineSettings) -> list[GpuSample]:
    gpus = evidence.gpus or ()
    return [gpu for gpu in gpus if configured.gpus or gpu.pids() & evidence.pids]


def _is_priced(evidence: AuditEvidence, settings: Settings, configured: EngineSettings) -> bool:
    names = [gpu.name for gpu in _engine_gpus(evidence, configured)]
    return settings.price_list().has_prices(configured.name, names, time.time())


def _left_out(evidence: AuditEvidence, *, priced: bool) -> Iterator[StepName]:
    if evidence.agent is None:
        # Only the agent knows whether requests come through its proxy.
        yield StepName.PROXY
    if evidence.gpus is not None and not evidence.gpus:
        yield StepName.GPU
        if not priced:
            yield StepName.PRICE


def _is_measured_in_front(evidence: AuditEvidence) -> bool | None:
    agent, trial = evidence.agent, evidence.trial
    if (agent is not None and agent.in_front) or (trial is not None and trial.in_front):
        return True
    return False if agent is not None and agent.engine_views else None


def _has_spans(evidence: AuditEvidence) -> bool:
    agent, trial = evidence.agent, evidence.trial
    if trial is not None and trial.lead_s is not None and not trial.in_front:
        return True
    return agent is not None and agent.engine_views > agent.in_front


def _seen(
    evidence: AuditEvidence, configured: EngineSettings, *, priced: bool
) -> Iterator[StepName]:
    agent, in_front = evidence.agent, _is_measured_in_front(evidence)
    gpus = _engine_gpus(evidence, configured)
    sees = {
        StepName.METRICS: evidence.engine.sample is not None,
        StepName.SPANS: _has_spans(evidence),
        StepName.PLUGIN: agent is not None and bool(agent.plugin),
        # Of a row that the engine had no figures of, nothing says which of the two measured it.
        StepName.PROXY: agent is not None and agent.proxy_views > 0 and not in_front,
        StepName.GPU: bool(gpus),
        StepName.PRICE: priced and bool(gpus or configured.gpus or configured.parallelism),
        StepName.MODEL_CONFIG: evidence.model is not None,
        StepName.LOG: configured.log is not None and os.access(configured.log, os.R_OK),
    }
    yield from (step for step, is_seen in sees.items() if is_seen)
