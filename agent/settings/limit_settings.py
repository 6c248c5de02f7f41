"""Settings of an engine's limits."""

from pydantic import Field

from agent.catalog import engine_facts as fact
from agent.settings.section import Section
from agent.settings.values import WholeNumber


class LimitSettings(Section):
    """Limits of one data-parallel rank, for engines whose exposition does not contain them."""

    running_requests: WholeNumber | None = Field(default=None, ge=1)
    """Most requests that may run at once; vLLM's `--max-num-seqs`."""
    step_tokens: WholeNumber | None = Field(default=None, ge=1)
    """Most tokens that one step may compute; vLLM's `--max-num-batched-tokens`."""
    context_tokens: WholeNumber | None = Field(default=None, ge=1)
    """Most tokens of one request, input and output; vLLM's `--max-model-len`."""

    def by_fact(self) -> dict[str, int]:
        """The limits that are set, by the name of their fact."""
        limits = {
            fact.MAX_RUNNING_REQUESTS.name: self.running_requests,
            fact.MAX_STEP_TOKENS.name: self.step_tokens,
            fact.MAX_CONTEXT_TOKENS.name: self.context_tokens,
        }
        return {name: limit for name, limit in limits.items() if limit is not None}
