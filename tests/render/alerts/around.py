"""The healthy rest of the world, beside which a case plays."""

from tests.render.alerts.cases import AGENT, OBJECTIVES, Series

_OBJECTIVES = {
    f'llm_slo_requests_total{{{AGENT},objective="{objective.name}",engine="idle",model="idle",'
    f'verdict="{verdict}"}}': "0x1500"
    for objective in OBJECTIVES
    for verdict in ("met", "missed", "undetermined")
}

_PROMISED = {
    **{
        f'llm_slo_target_ratio{{{AGENT},objective="{objective.name}"}}': f"{objective.target}x1500"
        for objective in OBJECTIVES
    },
    **{
        f'llm_slo_limit_seconds{{{AGENT},objective="{objective.name}",measure="{measure}"}}': (
            f"{limit_s}x1500"
        )
        for objective in OBJECTIVES
        for measure, limit_s in (
            ("ttft", objective.ttft_s),
            ("tpot", objective.tpot_s),
            ("e2e", objective.e2e_s),
        )
        if limit_s is not None
    },
}

# An agent that is read, and publishes every objective, without any traffic.
AROUND: Series = {
    f"up{{{AGENT}}}": "1x1500",
    f'llm_agent_info{{{AGENT},agent="a",version="1",simulated="false"}}': "1x1500",
    **_OBJECTIVES,
    **_PROMISED,
}
