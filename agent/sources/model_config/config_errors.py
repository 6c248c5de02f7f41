"""Why a model's shape cannot be told."""

from collections.abc import Iterable

from agent.errors import AgentError


class ModelConfigInvalid(AgentError):
    """A config.json that cannot be read, or in which a number is missing or impossible."""


class ArchitectureUnknown(AgentError):
    """A model whose mathematics this version does not know."""

    def __init__(self, name: str, why: str, known: Iterable[str]) -> None:
        super().__init__(
            f"the model architecture {name!r} is unknown: {why}; its figures are not guessed. "
            f"Known are {', '.join(known)}; for others, use the engine's own counters "
            "(vLLM: --enable-mfu-metrics)"
        )
        self.name = name


class QuantisationUnknown(AgentError):
    """Weights kept in a way whose size this version does not know."""

    def __init__(self, method: str, why: str) -> None:
        super().__init__(
            f"the quantisation {method!r} is unknown: {why}; say how the weights are kept and "
            "multiplied, with --dtype or the engine's setting `dtype`"
        )
        self.method = method


class CacheUnknown(AgentError):
    """A KV cache kept in a way whose size this version does not know."""

    def __init__(self, told: object) -> None:
        super().__init__(
            f"the config keeps its KV cache as {told!r}, which is unknown; say how it is kept, "
            "with --kv-dtype or the engine's setting `kv_dtype`"
        )
