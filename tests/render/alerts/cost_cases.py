"""Cases of the alert on costs."""

from tests.render.alerts.cases import ENGINE, MODEL, Case, Series

BUDGET_USD = 2.5


def _spent(busy: str, idle: str, tokens: str) -> Series:
    return {
        f'llm_cost_usd_total{{{MODEL},share="decode"}}': busy,
        f'llm_cost_usd_total{{{MODEL},share="idle"}}': idle,
        f"llm_output_tokens_total{{{MODEL}}}": tokens,
    }


CASES = (
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
        before=30,
        at=120,
        after=1490,
        labels={"model": "llama", "severity": "ticket"},
        summary="Output tokens of llama cost more than the budget for them",
        description="A million cost 3.00 dollars over 1d, idle time included; the budget is 2.5.",
        dashboard="goodput-capacity",
        filled=("model",),
    ),
)
