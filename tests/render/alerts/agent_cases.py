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


def _losing(alert: str, series: str, reason: str, label: str = "reason") -> Case:
    name = f'{series}{{{AGENT},{label}="{reason}"}}'
    return Case(
        alert=alert,
        incident={name: "0x5 0+4x10 40x60"},
        lookalike={name: "0x5 1x30 2x40"},
        minutes=(5, 14, 40),
        labels={**ON_AGENT, **TICKET, label: reason},
        figures=("32",),
    )


def _differing(incident: Series, judged_by: str, lookalike: Series) -> Case:
    return Case(
        alert="LlmObjectiveDiffers",
        incident=incident,
        lookalike=lookalike,
        minutes=(19, 23, 35),
        labels={**ON_AGENT, **TICKET, "objective": "chat"},
        figures=(f" {judged_by}",),
    )


def _behind(waiting: Series, figure: str, lookalike: Series) -> Case:
    return Case(
        alert="LlmAgentStoreBehind",
        # One row a second.
        incident={**waiting, _REQUESTS: "0+60x60"},
        lookalike=lookalike,
        minutes=(8, 18, 35),
        labels={**ON_AGENT, **TICKET},
        figures=(figure,),
    )


def _late(alert: str, series: str, label: str, value: str) -> Case:
    name = f'{series}{{{AGENT},{label}="{value}"}}'
    return Case(
        alert=alert,
        incident={name: "0x5 0+60x30 0x30"},
        # As late as usual, and very late for a moment.
        lookalike={name: "0x5 0+60x14 0x5 5000x3 0x30"},
        minutes=(26, 28, 40),
        labels={**ON_AGENT, **TICKET, label: value},
        figures=("22m 0s",),
    )


CASES = (
    Case(
        alert="LlmAgentDown",
        incident={_UP: "1x10 0x10 1x20", _INFO: "1x10 stale _x9 1x20"},
        # Something else that Prometheus cannot read.
        lookalike={'up{job="node",instance="b:9100"}': "0x40"},
        minutes=(11, 14, 25),
        labels={**ON_AGENT, **PAGE, "job": "agents"},
    ),
    Case(
        alert="LlmAgentsMissing",
        incident={_UP: "1x10 stale", _INFO: "1x10 stale _x15 1x20"},
        # One agent of two was taken away.
        lookalike={'llm_agent_info{job="agents",instance="b:9470",agent="b"}': "1x10 stale"},
        minutes=(14, 20, 35),
        labels=PAGE,
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
        figures=("5%",),
    ),
    _losing("LlmAgentExportsRefused", "llm_agent_exports_refused_total", "busy"),
    _losing("LlmAgentForwardDropping", "llm_agent_forward_dropped_total", "full"),
    _losing("LlmAgentPushDropping", "llm_agent_metrics_push_dropped_total", "unreachable"),
    _losing("LlmAgentDiscoveryFailing", "llm_agent_discovery_failures_total", "forbidden"),
    _losing("LlmAgentProxyFailing", "llm_agent_proxy_failures_total", "full"),
    _losing("LlmAgentStoreFailing", "llm_agent_store_failures_total", "requests", "what"),
    _losing("LlmAgentRowsLost", "llm_agent_lost_rows_total", "age"),
    Case(
        alert="LlmAgentPublishingBehind",
        incident={_PUBLISH_LAG: "0x5 0+60x30 0x30"},
        # The shared database was away for a quarter of an hour.
        lookalike={_PUBLISH_LAG: "0x5 0+60x14 0x40"},
        minutes=(26, 28, 40),
        labels={**ON_AGENT, **TICKET},
        figures=("22m 0s",),
    ),
    _late("LlmAgentStageBehind", "llm_agent_stage_lag_seconds", "stage", "fold"),
    _late("LlmAgentJobLate", "llm_agent_job_late_seconds", "job_name", "settle requests"),
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

_OTHERS_REQUESTS = f'llm_slo_requests_total{{{MODEL},objective="other",verdict="met"}}'
_OTHERS_TARGET = f'llm_slo_target_ratio{{{AGENT},objective="other"}}'

# Beside the rules on objectives.
AGREEMENT = (
    Case(
        alert="LlmObjectiveNotPublished",
        incident={name: "0x10 stale _x20 0x20" for name in _CHAT},
        # One engine of two was taken away.
        lookalike={'llm_slo_requests_total{objective="chat",engine="b"}': "0x10 stale"},
        minutes=(18, 25, 40),
        labels={**TICKET, "objective": "chat"},
    ),
    Case(
        alert="LlmObjectiveTargetMissing",
        incident={_OTHERS_REQUESTS: "0x60", _OTHERS_TARGET: "_x30 0.9x30"},
        # An agent that does not answer for a while.
        lookalike={_OTHERS_REQUESTS: "0x60", _OTHERS_TARGET: "0.9x5 _x55"},
        minutes=(8, 20, 40),
        labels={**TICKET, "objective": "other"},
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
        labels={"model": "llama", "severity": "warning"},
        figures=("3.00",),
    ),
)
