"""Cases of alerts on agents."""

from tests.render.alerts.around import AROUND
from tests.render.alerts.cases import AGENT, Case
from tests.render.alerts.engine_cases import PAGE, TICKET

ON_AGENT = {"instance": "a:9470"}
_INFO = f'llm_agent_info{{{AGENT},agent="a",version="1",simulated="false"}}'
_UP = f"up{{{AGENT}}}"
_CHAT = [name for name in AROUND if 'objective="chat"' in name]


def _losing(alert: str, series: str, reason: str, what: str, label: str = "reason") -> Case:
    name = f'{series}{{{AGENT},{label}="{reason}"}}'
    return Case(
        alert=alert,
        incident={name: "0x5 0+4x10 40x60"},
        lookalike={name: "0x5 1x30 2x40"},
        before=5,
        at=14,
        after=40,
        labels={**ON_AGENT, **TICKET, label: reason},
        summary=f"The agent a:9470 {what}: {reason}",
        description="About 32 times over 15m.",
        filled=("instance",),
    )


CASES = (
    Case(
        alert="LlmAgentDown",
        incident={_UP: "1x10 0x10 1x20", _INFO: "1x10 stale _x9 1x20"},
        # Something else that Prometheus cannot read.
        lookalike={'up{job="node",instance="b:9100"}': "0x40"},
        before=11,
        at=14,
        after=25,
        labels={**ON_AGENT, **PAGE, "job": "agents"},
        summary="The agent a:9470 does not answer",
        description="Prometheus could not read it for 2m. Until it is back, nothing is known of "
        "its engines and GPUs, and their alerts are silent.",
        filled=("instance",),
    ),
    Case(
        alert="LlmAgentsMissing",
        incident={_UP: "1x10 stale", _INFO: "1x10 stale _x15 1x20"},
        # One agent of two was taken away.
        lookalike={'llm_agent_info{job="agents",instance="b:9470",agent="b"}': "1x10 stale"},
        before=14,
        at=20,
        after=35,
        labels=PAGE,
        summary="Prometheus sees no agent at all",
        description="No series llm_agent_info exists: every agent is gone, or none is scraped. All "
        "other alerts of this file are blind.",
    ),
    Case(
        alert="LlmObjectiveNotPublished",
        incident={name: "0x10 stale _x20 0x20" for name in _CHAT},
        # One engine of two was taken away.
        lookalike={'llm_slo_requests_total{objective="chat",engine="b"}': "0x10 stale"},
        before=18,
        at=25,
        after=40,
        labels={**TICKET, "objective": "chat"},
        summary="No agent publishes objective chat",
        description="Prometheus has no llm_slo_requests_total of objective chat: the agents' "
        "settings and these rules do not agree, or no agent is scraped.",
        filled=("objective",),
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
        before=1,
        at=15,
        after=45,
        labels={**ON_AGENT, **TICKET},
        summary="The agent a:9470 cannot read spans that it receives",
        description="5% of the spans over 15m were rejected; llm_agent_spans_rejected_total says "
        "why.",
        filled=("instance",),
    ),
    _losing(
        "LlmAgentExportsRefused", "llm_agent_exports_refused_total", "store", "refuses OTLP bodies"
    ),
    _losing(
        "LlmAgentForwardDropping",
        "llm_agent_forward_dropped_total",
        "full",
        "does not forward OTLP bodies",
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
    Case(
        alert="LlmAgentStoreBehind",
        incident={
            f"llm_agent_store_waiting_rows{{{AGENT}}}": "0x5 5000x15 0x20",
            f'llm_agent_spans_total{{{AGENT},outcome="stored"}}': "0+600x60",
        },
        # As many rows, and a database that takes them in half a minute.
        lookalike={
            f"llm_agent_store_waiting_rows{{{AGENT}}}": "5000x60",
            f'llm_agent_spans_total{{{AGENT},outcome="stored"}}': "0+12000x60",
        },
        before=4,
        at=15,
        after=25,
        labels={**ON_AGENT, **TICKET},
        summary="The database of the agent a:9470 does not keep up",
        description="5k requests wait to be stored, more than the database takes in 30 s.",
        filled=("instance",),
    ),
)
