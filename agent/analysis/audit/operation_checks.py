"""Checks of who may use the engine, of its version, how it stops, and what it reports."""

import json
from bisect import bisect
from collections.abc import Mapping, Sequence
from functools import partial
from ipaddress import ip_address
from math import isclose, isfinite

from agent.analysis.audit.checks import (
    AuditCheck,
    CheckResult,
    failed,
    finished,
    flag,
    flags_are_known,
    is_older,
    passed,
    unknown,
    version_key,
    warned,
    without_exposition,
    without_flags,
)
from agent.catalog import engine_facts as fact
from agent.catalog.engine_flags import NO_STATISTICS, TRACES_ENDPOINT
from agent.catalog.engines import PLUGIN_HOSTS
from agent.catalog.metric import Metric
from agent.catalog.security_notices import KNOWN_UNTIL, NOTICES, SecurityNotice
from agent.records.audit import AuditEvidence, EvidencePart, LatencyLimits

_CHECK = partial(AuditCheck, "Safety")

_HEALTHY = 200
_GRAVE = frozenset({"critical", "high"})
# The first release whose flag --shutdown-timeout was seen.
_HAS_SHUTDOWN = "0.32.0"


def security_notices(evidence: AuditEvidence) -> CheckResult:
    """Whether a published notice concerns the engine's version."""
    version = evidence.engine.version
    if version_key(version) is None:
        return unknown(evidence.why_unread(EvidencePart.VERSION))
    found = [notice for notice in NOTICES if _concerns(notice, version)]
    if not found:
        return passed(f"{version}: none of the {len(NOTICES)} in our table of {KNOWN_UNTIL}")
    listed = "; ".join(
        f"{each.advisory} ({each.severity}, with {each.concerns}): {each.effect}" for each in found
    )
    newest = max(found, key=lambda notice: version_key(notice.fixed) or ())
    change = f"vLLM {newest.fixed} or newer; {newest.url}"
    grave = any(notice.severity in _GRAVE for notice in found)
    return (failed if grave else warned)(f"{version}: {listed}", change)


def _concerns(notice: SecurityNotice, version: str | None) -> bool:
    introduced = notice.introduced is None or not is_older(version, notice.introduced)
    return introduced and bool(is_older(version, notice.fixed))


def access(evidence: AuditEvidence) -> CheckResult:
    """Whether others than this machine can use the engine without a key."""
    needs_key, addresses = evidence.engine.needs_key, evidence.addresses
    if needs_key is None:
        return unknown(evidence.why_unread(EvidencePart.MODELS))
    if needs_key:
        return passed("a key is needed; /metrics, /health and others are open all the same")
    if addresses is None and not evidence.remote:
        return unknown(f"no key is needed; {evidence.why_unread(EvidencePart.ADDRESSES)}")
    if addresses is None:
        seen = "no key is needed, and we reach it from another machine"
    else:
        seen = f"no key is needed at {', '.join(sorted(addresses))}"
        if all(ip_address(address).is_loopback for address in addresses):
            return passed(f"{seen}, which only this machine reaches")
    return warned(
        seen, "--api-key (VLLM_API_KEY), or --host 127.0.0.1 behind a proxy that asks who"
    )


def health(evidence: AuditEvidence) -> CheckResult:
    """Whether the health check answers."""
    status = evidence.engine.health
    if status == _HEALTHY:
        return passed(f"/health gives {status}")
    seen = "/health does not answer" if status is None else f"/health gives {status}"
    return failed(seen, "read the engine's log, and restart it")


def shutdown(evidence: AuditEvidence) -> CheckResult:
    """Whether a stop lets running requests end."""
    given = flag(evidence, "--shutdown-timeout")
    if given not in (None, "", "0"):
        return passed(f"--shutdown-timeout {given}")
    if is_older(evidence.engine.version, _HAS_SHUTDOWN) is not False:
        return unknown(f"known of vLLM {_HAS_SHUTDOWN} and newer only")
    if not flags_are_known(evidence):
        return unknown(without_flags(evidence))
    return warned(
        "0 s: running requests are aborted", "--shutdown-timeout 30, and as long in the pod"
    )


SAFETY_CHECKS = (
    _CHECK(
        "security notices",
        "clients or model files can do more than they should",
        security_notices,
    ),
    _CHECK("access", "everybody who reaches the address can use the GPUs", access),
    _CHECK("health", "orchestrators and load balancers ask it before they send requests", health),
    _CHECK(
        "graceful stop",
        "each restart or upgrade breaks the streams that run at that moment",
        shutdown,
    ),
)

_WATCH_CHECK = partial(AuditCheck, "Watching")

# HTTP's Date has whole seconds. Beyond a poll's usual interval a request is compared with samples
# of another time.
_SAME_CLOCK_S, _OTHER_CLOCK_S = 1.0, 5.0

# vLLM's name of the buckets of each histogram that an objective limits.
_FAMILIES: tuple[tuple[Metric, str, str], ...] = (
    (fact.TIME_TO_FIRST_TOKEN, "time_to_first_token", "ttft_s"),
    (fact.TIME_PER_OUTPUT_TOKEN, "inter_token_latency", "tpot_s"),
    (fact.REQUEST_DURATION, "request_latency", "e2e_s"),
)
_HAS_BUCKETS = "0.32.0"
_VLLM = "vllm"
_NAMES = {"tgi": "Text Generation Inference", "trtllm": "TensorRT-LLM", "llamacpp": "llama.cpp"}


def statistics(evidence: AuditEvidence) -> CheckResult:
    """Whether the engine publishes metrics of its own."""
    sample = evidence.engine.sample
    if sample is not None:
        return passed(f"{len(sample.facts) + len(sample.histograms)} facts of {sample.dialect}")
    if flag(evidence, NO_STATISTICS) is not None:
        return failed(f"off, by {NO_STATISTICS}", f"remove {NO_STATISTICS}")
    seen = evidence.why_unread(EvidencePart.EXPOSITION)
    return failed(seen, f"remove {NO_STATISTICS}, and give the address of the engine itself")


def expected_series(evidence: AuditEvidence) -> CheckResult:
    """Whether every fact that this kind of engine gives is in the exposition."""
    sample = evidence.engine.sample
    if sample is None:
        return unknown(without_exposition(evidence))
    given = {name for name, _ in sample.facts} | sample.histograms.keys()
    absent = sorted(evidence.engine.expected - given)
    if not absent:
        return passed(f"all {len(evidence.engine.expected)} of {sample.dialect}")
    seen = f"{len(absent)} of {len(evidence.engine.expected)} absent: {', '.join(absent)}"
    if not finished(evidence):
        return unknown(
            f"{seen}; some come with the first request", "send a request, and check again"
        )
    renamed = "its metrics were renamed: report it"
    newer = f"use vLLM 0.12 or newer; if it is, {renamed}"
    return warned(seen, newer if sample.dialect == _VLLM else renamed)


def bucket_edges(evidence: AuditEvidence) -> CheckResult:
    """Whether each limit of an objective is an edge of the engine's histogram."""
    sample = evidence.engine.sample
    if sample is None:
        return unknown(without_exposition(evidence))
    between: list[str] = []
    wanted: dict[str, list[float]] = {}
    judged = 0
    for metric, family, limits in _FAMILIES:
        histogram = sample.histograms.get(metric.name)
        bounds = [] if histogram is None else [b for b in histogram.bounds if isfinite(b)]
        for limit_s in _limits(evidence.limits, limits) if bounds else ():
            judged += 1
            if not any(isclose(limit_s, bound) for bound in bounds):
                between.append(f"{limits[:-2]} {_between(limit_s, bounds)}")
                wanted[family] = sorted({*wanted.get(family, bounds), limit_s})
    if not judged:
        return unknown("no objective limits a latency that the engine has a histogram of")
    if not between:
        return passed(f"{judged} limits are edges")
    return warned("; ".join(between), _edges_for(evidence, sample.dialect, wanted))


def _edges_for(evidence: AuditEvidence, dialect: str, wanted: Mapping[str, Sequence[float]]) -> str:
    if dialect != _VLLM:
        return f"as edges, if the engine lets you choose them: {json.dumps(wanted)}"
    flag_given = f"--custom-histogram-buckets '{json.dumps(wanted)}'"
    if is_older(evidence.engine.version, _HAS_BUCKETS):
        return f"vLLM {_HAS_BUCKETS} or newer, with {flag_given}"
    return flag_given


def _limits(limits: LatencyLimits, name: str) -> tuple[float, ...]:
    found: tuple[float, ...] = getattr(limits, name)
    return found


def _between(limit_s: float, bounds: list[float]) -> str:
    index = bisect(bounds, limit_s)
    below = 0.0 if not index else bounds[index - 1]
    if index == len(bounds):
        return f"{limit_s:g} s is above the last edge, {below:g}"
    return f"{limit_s:g} s is between the edges {below:g} and {bounds[index]:g}"


def single_requests(evidence: AuditEvidence) -> CheckResult:
    """Whether the agent has a row of each request, with the engine's figures."""
    trial = evidence.trial
    if trial is not None and trial.lead_s is not None:
        by = "by the middleware in its front" if trial.in_front else "by its span"
        return passed(f"the request's row was there after {trial.waited_s:.1f} s ({by})")
    without = _without_rows(evidence)
    if without is not None:
        return _proxied_rows(evidence, without)
    plugin_sends = evidence.agent is not None and evidence.agent.plugin
    no_spans = flags_are_known(evidence) and not flag(evidence, TRACES_ENDPOINT)
    if no_spans and not plugin_sends:
        return failed(
            f"no plugin is heard of, and no span comes without {TRACES_ENDPOINT}",
            _for_rows(evidence),
        )
    if trial is None:
        return _earlier_rows(evidence)
    if trial.problem is not None:
        return unknown(f"the request failed: {trial.problem}")
    if evidence.agent is None:
        return unknown(evidence.why_unread(EvidencePart.AGENT), "start the agent, or give --agent")
    none_came = f"none within {trial.waited_s:.0f} s of a request"
    if plugin_sends:
        look = "read the engine's log for goodput-agent-vllm: docs/vllm-plugin.md"
        return unknown(f"{none_came}, though its plugin is heard of", look)
    return failed(none_came, _for_rows(evidence))


def _dialect(evidence: AuditEvidence) -> str:
    sample = evidence.engine.sample
    return _VLLM if sample is None else sample.dialect


def _for_rows(evidence: AuditEvidence) -> str:
    """What gives the agent rows of requests."""
    dialect = _dialect(evidence)
    install = f"pip install ./plugins/vllm beside {PLUGIN_HOSTS[dialect]} (docs/vllm-plugin.md)"
    if dialect != _VLLM:
        return install
    return f"{install}; or {TRACES_ENDPOINT} http://AGENT:4317, and OTEL_TRACES_SAMPLER=always_on"


def _without_rows(evidence: AuditEvidence) -> str | None:
    """Why the engine can report no single request; None if it can, or if it is unknown."""
    dialect = _dialect(evidence)
    if dialect not in PLUGIN_HOSTS:
        name = _NAMES.get(dialect, dialect)
        return f"{name} sends no spans that the agent reads, and loads no plugin"
    if evidence.rust_frontend:
        return "vLLM's Rust frontend sends no spans, and loads no plugin"
    return None


def _proxied_rows(evidence: AuditEvidence, without: str) -> CheckResult:
    agent = evidence.agent
    if agent is not None and agent.proxy_views:
        return passed(f"{without}; {agent.proxy_views} newest requests came through the proxy")
    return warned(without, "let its requests go through the agent's proxy: docs/proxy.md")


def _earlier_rows(evidence: AuditEvidence) -> CheckResult:
    agent = evidence.agent
    if agent is not None and agent.engine_views:
        return passed(f"the agent has rows of its {agent.engine_views} newest requests")
    reason = evidence.why_unread(EvidencePart.REQUEST if agent else EvidencePart.AGENT)
    return unknown(reason, "give --send-request, with the agent running")


def clocks(evidence: AuditEvidence) -> CheckResult:
    """How far the engine's clocks are from ours, at least."""
    engine, trial = evidence.engine, evidence.trial
    started_at = None if engine.sample is None else engine.sample.process_started_at
    ahead = None if started_at is None else max(0.0, started_at - evidence.at)
    leads = {
        "the request's row": None if trial is None else trial.lead_s,
        "HTTP's Date": engine.date_lead_s,
        "the process' start": ahead,
    }
    known = {name: lead for name, lead in leads.items() if lead is not None}
    if not known:
        return unknown("no response has a time, and no row of a request is there")
    worst = max(known, key=lambda name: abs(known[name]))
    off_s = abs(known[worst])
    if off_s <= _SAME_CLOCK_S:
        return passed(f"within {_SAME_CLOCK_S:g} s by {', '.join(known)}")
    side = "ahead" if known[worst] > 0 else "behind"
    seen = f"{off_s:,.1f} s {side} by {worst}"
    change = "run chrony or systemd-timesyncd on the machines of the engine and of the agent"
    return warned(seen, change) if off_s <= _OTHER_CLOCK_S else failed(seen, change)


def plugin(evidence: AuditEvidence) -> CheckResult:
    """Whether the engine's plugin is heard of."""
    agent = evidence.agent
    if agent is None:
        return unknown(evidence.why_unread(EvidencePart.AGENT))
    if agent.plugin:
        return passed(
            "the agent hears of it"
            + (f", and has its rows of {agent.in_front} newest requests" if agent.in_front else "")
        )
    without = _without_rows(evidence)
    if without is not None:
        return unknown(without)
    silent = "the agent hears nothing of it"
    return warned(
        "the agent has never heard of it" if agent.plugin is None else silent,
        f"pip install ./plugins/vllm beside {PLUGIN_HOSTS[_dialect(evidence)]}; not of the agent's "
        "user: docs/vllm-plugin.md",
    )


WATCHING_CHECKS = (
    _WATCH_CHECK(
        "statistics",
        "without them queue, cache and failures cannot be seen; with tracing on, the engine dies",
        statistics,
    ),
    _WATCH_CHECK(
        "expected series", "panels, alerts and causes that need an absent one stay empty",
        expected_series,
    ),
    _WATCH_CHECK(
        "bucket edges",
        "only at an edge does a histogram show how many requests met a limit",
        bucket_edges,
    ),
    _WATCH_CHECK(
        "single requests",
        "attainment, causes and cost need a row of each request, by the plugin or by spans",
        single_requests,
    ),
    _WATCH_CHECK(
        "clocks",
        "a request is compared with what engine and GPUs did at its time",
        clocks,
    ),
    _WATCH_CHECK(
        "plugin",
        "it measures each request as its user sees it, also refused ones, and reports each step",
        plugin,
    ),
)  # fmt: skip
