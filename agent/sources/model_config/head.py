"""The output matrix of a model, by the class that its config.json names."""

from agent.records.model import WeightBlock, WeightFormat
from agent.sources.model_config.config import TextConfig
from agent.sources.model_config.layer_kinds import unknown

# A model without an architecture is taken to generate.
_GENERATING = "ForCausalLM"
_GENERATORS = (_GENERATING, "ForConditionalGeneration", "ForImageTextToText", "LMHeadModel")

# As many labels as transformers has without a list of them.
_LABELS = 2


def output_matrix(config: TextConfig, plain: WeightFormat) -> WeightBlock | None:
    """The output matrix; None if it is the embedding. Raises ArchitectureUnknown.

    A model that classifies has a row for each label in its place, one that embeds has nothing.
    """
    name = (config.architectures or (_GENERATING,))[0]
    if name.endswith(_GENERATORS):
        if config.tie_word_embeddings:
            return None
        return _matrix("lm_head", config.vocab_size * config.hidden_size, plain)
    if name.endswith("ForSequenceClassification"):
        return _matrix("score", _labels(config) * config.hidden_size, plain)
    # A name such as Qwen2ForRewardModel is of another head.
    if name.endswith("Model") and "For" not in name:
        return _matrix("none", 0, plain)
    raise unknown(config, f"no output matrix of the class {name!r} is known")


def _labels(config: TextConfig) -> int:
    if config.num_labels is not None:
        return config.num_labels
    return _LABELS if config.id2label is None else len(config.id2label)


def _matrix(name: str, parameters: int, stored: WeightFormat) -> WeightBlock:
    return WeightBlock(name=name, parameters=parameters, format=stored)
