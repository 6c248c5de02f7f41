"""The errors of reading a model's config.json."""

from collections.abc import Iterable

from agent.errors import AgentError


class ModelConfigInvalid(AgentError):
    """A config.json cannot be parsed, or a number in it is missing or impossible."""


class ArchitectureUnknown(AgentError):
    """This version does not know how the model computes."""

    def __init__(self, name: str, why: str, known: Iterable[str]) -> None:
        super().__init__(
            f"the model architecture {name!r} is unknown: {why}; its figures are not guessed. "
            f"Known are {', '.join(known)}; for others, use the engine's own counters "
            "(vLLM: --enable-mfu-metrics)"
        )
        self.name = name


class QuantisationUnknown(AgentError):
    """The weights are stored in a format whose size this version does not know."""

    def __init__(self, method: str, why: str) -> None:
        super().__init__(
            f"the quantisation {method!r} is unknown: {why}; set how the weights are stored "
            "and multiplied, with --dtype or the engine's setting `dtype`"
        )
        self.method = method


class CacheUnknown(AgentError):
    """The KV cache is stored in a format whose size this version does not know."""

    def __init__(self, value: object) -> None:
        super().__init__(
            f"the KV cache of the config is {value!r}, which is unknown; set how it is stored, "
            "with --kv-dtype or the engine's setting `kv_dtype`"
        )
