"""A model's shape, read from its Hugging Face config.json and the sizes of the files beside it."""

from agent.sources.model_config.config import (
    ArchitectureUnknown,
    CacheUnknown,
    ModelConfigInvalid,
    QuantisationUnknown,
)
from agent.sources.model_config.reading import read_model, read_weights, weights_text

__all__ = [
    "ArchitectureUnknown",
    "CacheUnknown",
    "ModelConfigInvalid",
    "QuantisationUnknown",
    "read_model",
    "read_weights",
    "weights_text",
]
