"""Builds a model's shape from the keys of its config.json."""

from collections import Counter
from collections.abc import Iterator

from agent.catalog.architectures import ARCHITECTURES, Architecture, LayerKind
from agent.catalog.hardware import Precision
from agent.records.model import (
    Attention,
    LayerGroup,
    ModelShape,
    RecurrentState,
    WeightBlock,
    WeightFormat,
)
from agent.sources.model_config.config import ModelConfigInvalid, TextConfig
from agent.sources.model_config.layers import (
    FeedForward,
    attention_blocks,
    attentions,
    layer_kinds,
    recurrent_blocks,
    recurrent_state,
    unknown,
)
from agent.sources.model_config.quantisation import Scheme

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


_PRECISIONS = {
    "float32": Precision.FP32,
    "bfloat16": Precision.BF16,
    "float16": Precision.FP16,
    "half": Precision.FP16,
}

_ATTENTIVE = frozenset({LayerKind.FULL, LayerKind.SLIDING, LayerKind.CHUNKED, LayerKind.INDEXED})

_Parts = tuple[tuple[Attention, ...], tuple[WeightBlock, ...], RecurrentState | None]


def precision_of(config: TextConfig) -> Precision | None:
    """The precision that the config names; None without one. Raises ModelConfigInvalid."""
    if config.dtype is None:
        return None
    name = config.dtype.removeprefix("torch.")
    if name not in _PRECISIONS:
        raise ModelConfigInvalid(
            f"the dtype of the config.json is {config.dtype!r}; known are {', '.join(_PRECISIONS)}"
        )
    return _PRECISIONS[name]


def shape_of(
    config: TextConfig, scheme: Scheme, *, cache_bits: float, remarks: tuple[str, ...] = ()
) -> ModelShape:
    """The shape. Raises ArchitectureUnknown if the architecture's row does not cover it."""
    architecture = ARCHITECTURES[config.architecture]
    plain = scheme.plain
    return ModelShape(
        architecture=config.architecture,
        embedding=WeightBlock(
            name="model.embed_tokens",
            parameters=config.vocab_size * config.hidden_size,
            format=plain,
        ),
        head=output_matrix(config, plain),
        groups=_groups(config, architecture, scheme),
        vectors=config.hidden_size,
        precision=plain.compute,
        compute=scheme.quantised.compute,
        cache_bits=cache_bits,
        max_context=config.max_position_embeddings,
        remarks=remarks,
    )


def _groups(
    config: TextConfig, architecture: Architecture, scheme: Scheme
) -> tuple[LayerGroup, ...]:
    alike = Counter(
        _Layer(config, architecture, scheme, number).parts(kind)
        for number, kind in enumerate(layer_kinds(config))
    )
    return tuple(
        LayerGroup(
            layers=count,
            attentions=attended,
            blocks=blocks,
            vectors=architecture.norms * config.hidden_size,
            state=state,
        )
        for (attended, blocks, state), count in alike.items()
    )


class _Layer:
    """Builds the parts of one layer, by its number."""

    def __init__(self, config: TextConfig, row: Architecture, scheme: Scheme, number: int) -> None:
        self._config = config
        self._row = row
        self._scheme = scheme
        self._number = number

    def parts(self, kind: LayerKind) -> _Parts:
        attends = kind in _ATTENTIVE
        return (
            tuple(attentions(self._config, self._row, kind)) if attends else (),
            tuple(self._blocks(kind)),
            self._state() if kind is LayerKind.LINEAR else None,
        )

    def _blocks(self, kind: LayerKind) -> Iterator[WeightBlock]:
        mixes = kind in _ATTENTIVE or kind is LayerKind.LINEAR
        if kind in _ATTENTIVE:
            yield from attention_blocks(self._config, self._row, kind, self._block)
        elif kind is LayerKind.LINEAR and self._row.recurrence is not None:
            yield from recurrent_blocks(self._config, self._row.recurrence, self._block)
        if not (mixes and self._row.parts_apart):
            forward = FeedForward(self._config, self._row, self._block, plain=self._scheme.plain)
            yield from forward.blocks(kind, self._number)

    def _state(self) -> RecurrentState | None:
        if self._row.recurrence is None:
            return None
        return recurrent_state(self._config, self._row.recurrence, self._scheme.plain.compute)

    def _block(self, name: str, rows: int, columns: int, vectors: int = 0) -> WeightBlock:
        if self._row.parts_apart:
            # The only part of a layer has one name, whatever it is.
            name = f"{self._row.feed_forward}.{name.split('.', 1)[1]}"
        return WeightBlock(
            name=name,
            parameters=rows * columns,
            format=self._scheme.format_of(f"model.layers.{self._number}.{name}"),
            vectors=vectors,
        )
