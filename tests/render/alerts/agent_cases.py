"""Cases of the alerts on agents and on costs."""

from tests.render.alerts.cases import AGENT, AROUND, ENGINE, MODEL, Case, Series
from tests.render.alerts.engine_cases import PAGE, TICKET

ON_AGENT = {"instance": "a:9470"}
_INFO = f'llm_agent_info{{{AGENT},agent="a",version="1",simulated="false"}}'
_UP = f"up{{{AGENT}}}"
_LIMIT = f'llm_slo_limit_seconds{{{AGENT},objective="chat",measure="ttft"}}'
_TARGET = f'llm_slo_target_ratio{{{AGENT},objective="chat"}}'
_ROWS = f"llm_agent_store_waiting_rows{{{AGENT}}}"
_RECORDS = f"llm_agent_proxy_waiting_records{{{AGENT}}}"
_PUBLISH_LAG = f"llm_agent_publish_lag_seconds{{{AGENT}}}"
_REQUESTS = f'llm_requests_total{{{MODEL},status="ok"}}'
_CHAT = [name for name in AROUND if name.startswith("llm_slo_requests") and '"chat"' in name]


def _losing(alert: str, series: str, reason: str, what: str, label: str = "reason") -> Case:
    name = f'{series}{{{AGENT},{label}="{reason}"}}'
    return Case(
        alert=alert,
        incident={name: "0x5 0+4x10 40x60"},
        lookalike={name: "0x5 1x30 2x40"},
        minutes=(5, 14, 40),
        labels={**ON_AGENT, **TICKET, label: reason},
        summary=f"The agent a:9470 {what}: {reason}",
        description="About 32 times over 15m.",
        filled=("instance",),
    )


def _differing(incident: Series, judged_by: str, lookalike: Series) -> Case:
    return Case(
        alert="LlmObjectiveDiffers",
        incident=incident,
        lookalike=lookalike,
        minutes=(19, 23, 35),
        labels={**ON_AGENT, **TICKET, "objective": "chat"},
        summary="The agent a:9470 judges objective chat by other limits than these rules",
        description="These rules are made for 95 %, ttft 200 ms, tpot 120 ms. The agent judges by "
        f"{judged_by}. A rule on a limit that is not a bucket edge never fires.",
        filled=("objective", "instance"),
    )


def _behind(waiting: Series, figure: str, lookalike: Series) -> Case:
    return Case(
        alert="LlmAgentStoreBehind",
        # One row a second.
        incident={**waiting, _REQUESTS: "0+60x60"},
        lookalike=lookalike,
        minutes=(8, 18, 35),
        labels={**ON_AGENT, **TICKET},
        summary="The database of the agent a:9470 does not keep up",
        description=f"{figure} rows wait for their commit on average over 5m, more than the "
        "requests that were stored in 30 s of it.",
        filled=("instance",),
    )


def _late(alert: str, series: str, what: str, label: str, value: str) -> Case:
    name = f'{series}{{{AGENT},{label}="{value}"}}'
    return Case(
        alert=alert,
        incident={name: "0x5 0+60x30 0x30"},
        # As late as usual, and very late for a moment.
        lookalike={name: "0x5 0+60x14 0x5 5000x3 0x30"},
        minutes=(26, 28, 40),
        labels={**ON_AGENT, **TICKET, label: value},
        summary=f"The agent a:9470 {what}: {value}",
        description="It is 22m 0s late.",
        filled=("instance",),
    )


CASES = (
    Case(
        alert="LlmAgentDown",
        incident={_UP: "1x10 0x10 1x20", _INFO: "1x10 stale _x9 1x20"},
        # Something else that Prometheus cannot read.
        lookalike={'up{job="node",instance="b:9100"}': "0x40"},
        minutes=(11, 14, 25),
        labels={**ON_AGENT, **PAGE, "job": "agents"},
        summary="The agent a:9470 does not answer",
        description="Every scrape failed for 2m. Until the agent is back, the state of its "
        "engines and GPUs is unknown, and their alerts cannot fire.",
        filled=("instance",),
    ),
    Case(
        alert="LlmAgentsMissing",
        incident={_UP: "1x10 stale", _INFO: "1x10 stale _x15 1x20"},
        # One agent of two was taken away.
        lookalike={'llm_agent_info{job="agents",instance="b:9470",agent="b"}': "1x10 stale"},
        minutes=(14, 20, 35),
        labels=PAGE,
        summary="Prometheus sees no agent at all",
        description="No series llm_agent_info exists: every agent is gone, or none is scraped. No "
        "other alert of this file can fire.",
    ),
    Case(
        alert="LlmAgentSpansRejected",
        incident={
            f'llm_agent_spans_total{{{AGENT},outcome="stored"}}': "0+95x80",
            f'llm_agent_spans_total{{{AGENT},outcome="rejected"}}': "0+5x20 100x60",
        },
        lookalike={
            f'llm_agent_spans_total{{{AGENT},outcome="stored"}}': "0+995x80",
            f'llm_agent_spans_total{{{AGENT},outcome="rejected"}}': "0+5x80",
        },
        minutes=(1, 15, 45),
        labels={**ON_AGENT, **TICKET},
        summary="The agent a:9470 cannot read spans that it receives",
        description="5% of the spans over 15m were rejected; llm_agent_spans_rejected_total has "
        "the reasons.",
        filled=("instance",),
    ),
    _losing(
        "LlmAgentExportsRefused", "llm_agent_exports_refused_total", "busy", "refuses OTLP bodies"
    ),
    _losing(
        "LlmAgentForwardDropping",
        "llm_agent_forward_dropped_total",
        "full",
        "does not forward OTLP bodies",
    ),
    _losing(
        "LlmAgentPushDropping",
        "llm_agent_metrics_push_dropped_total",
        "unreachable",
        "does not push its metrics",
    ),
    _losing(
        "LlmAgentDiscoveryFailing",
        "llm_agent_discovery_failures_total",
        "forbidden",
        "cannot find its engines",
    ),
    _losing(
        "LlmAgentProxyFailing",
        "llm_agent_proxy_failures_total",
        "full",
        "does not measure proxied requests",
    ),
    _losing(
        "LlmAgentStoreFailing",
        "llm_agent_store_failures_total",
        "requests",
        "cannot write to its database",
        "what",
    ),
    _losing(
        "LlmAgentRowsLost",
        "llm_agent_lost_rows_total",
        "age",
        "loses rows that it should publish",
    ),
    Case(
        alert="LlmAgentPublishingBehind",
        incident={_PUBLISH_LAG: "0x5 0+60x30 0x30"},
        # The shared database was away for a quarter of an hour.
        lookalike={_PUBLISH_LAG: "0x5 0+60x14 0x40"},
        minutes=(26, 28, 40),
        labels={**ON_AGENT, **TICKET},
        summary="The shared database does not get the rows of the agent a:9470",
        description="It has lacked some for 22m 0s. What waits for longer than "
        "storage.keep_in_file is dropped.",
        filled=("instance",),
    ),
    _late(
        "LlmAgentStageBehind",
        "llm_agent_stage_lag_seconds",
        "is behind with its work",
        "stage",
        "fold",
    ),
    _late(
        "LlmAgentJobLate",
        "llm_agent_job_late_seconds",
        "does not get round to a job",
        "job_name",
        "settle requests",
    ),
    # As many as a sender of spans has at a time: it waits for them.
    _behind(
        {_ROWS: "0x5 40x15 0x30"},
        "40",
        # Far more, and a database that takes them in half a minute.
        {_ROWS: "2000x60", _RECORDS: "2900x60", _REQUESTS: "0+6000x60"},
    ),
    _behind(
        # Of the proxy's only the oldest were handed to the writer.
        {_ROWS: "0x5 20x15 0x30", _RECORDS: "0x5 5000x15 0x30"},
        "5k",
        # A row that was seen on its way, once, at a time without traffic.
        {_ROWS: "0x9 3 0x30", _RECORDS: "0x40", _REQUESTS: "7x40"},
    ),
)

# Beside the rules on objectives.
AGREEMENT = (
    Case(
        alert="LlmObjectiveNotPublished",
        incident={name: "0x10 stale _x20 0x20" for name in _CHAT},
        # One engine of two was taken away.
        lookalike={'llm_slo_requests_total{objective="chat",engine="b"}': "0x10 stale"},
        minutes=(18, 25, 40),
        labels={**TICKET, "objective": "chat"},
        summary="No agent publishes objective chat",
        description="Prometheus has no llm_slo_requests_total of objective chat: the agents' "
        "settings and these rules do not agree, or no agent is scraped.",
        filled=("objective",),
    ),
    _differing(
        {_LIMIT: "0.2x10 0.3x14 0.2x30"},
        "95%, tpot 0.12 s, ttft 0.3 s",
        # Settings that arrive one agent after the other.
        {_LIMIT: "0.2x10 0.3x5 0.2x40"},
    ),
    _differing(
        {_TARGET: "0.95x10 0.99x14 0.95x30"},
        "99%, tpot 0.12 s, ttft 0.2 s",
        # Another objective's.
        {f'llm_slo_target_ratio{{{AGENT},objective="other"}}': "0.5x60"},
    ),
    _differing({_LIMIT: "0.2x10 stale _x13 0.2x30"}, "95%, tpot 0.12 s", {}),
    _differing(
        {f'llm_slo_limit_seconds{{{AGENT},objective="chat",measure="e2e"}}': "_x11 9x14 stale"},
        "95%, tpot 0.12 s, ttft 0.2 s, e2e 9 s",
        {},
    ),
)

BUDGET_USD = 2.5


def _spent(busy: str, idle: str, tokens: str) -> Series:
    return {
        f'llm_cost_usd_total{{{MODEL},share="decode"}}': busy,
        f'llm_cost_usd_total{{{MODEL},share="idle"}}': idle,
        f"llm_output_tokens_total{{{MODEL}}}": tokens,
    }


COST_CASES = (
    Case(
        alert="LlmTokenCostOverBudget",
        # Three dollars a minute for a million tokens, then two for as many.
        incident=_spent("0+1x300 300+1x1200", "0+2x300 600+1x1200", "0+1000000x1500"),
        # Just what may be spent, and on the first day a model that nobody asks for.
        lookalike={
            **_spent("0+1x1500", "0+1.5x1500", "0+1000000x1500"),
            f'llm_cost_usd_total{{{ENGINE},model="idle",share="idle"}}': "0+1x1500",
            f'llm_output_tokens_total{{{ENGINE},model="idle"}}': "0x1500",
        },
        minutes=(30, 120, 1490),
        labels={"model": "llama", "severity": "ticket"},
        summary="Output tokens of llama cost more than the budget for them",
        description="A million cost 3.00 dollars over 1d, idle time included; the budget is 2.5.",
        dashboard="goodput-capacity",
        filled=("model",),
    ),
)
