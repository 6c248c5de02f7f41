"""Builds a model's shape from the keys of its config.json."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from agent.catalog.architectures import ARCHITECTURES, Architecture, AttentionType, LayerKind
from agent.catalog.hardware import Precision
from agent.records.model import (
    Attention,
    LayerGroup,
    ModelShape,
    RecurrentState,
    WeightBlock,
    WeightFormat,
)
from agent.sources.model_config.attention import attention_blocks, attentions
from agent.sources.model_config.compressed_attention import (
    compressed_attentions,
    compressed_blocks,
)
from agent.sources.model_config.config import Block, ModelConfigInvalid, TextConfig
from agent.sources.model_config.feed_forward import FeedForward
from agent.sources.model_config.layer_kinds import layer_kinds, unknown
from agent.sources.model_config.quantisation import Scheme
from agent.sources.model_config.recurrence import recurrent_blocks, recurrent_state
from agent.sources.model_config.residuals import outer_blocks, residual_blocks

# A model without an architecture is taken to generate.
_GENERATING = "ForCausalLM"
_GENERATORS = (_GENERATING, "ForConditionalGeneration", "ForImageTextToText", "LMHeadModel")

# As many labels as transformers has without a list of them.
_LABELS = 2


def output_matrix(config: TextConfig, stored: WeightFormat) -> WeightBlock | None:
    """The output matrix; None if it is the embedding. Raises ArchitectureUnknown.

    A model that classifies has a row for each label in its place, one that embeds has nothing.
    """
    name = (config.architectures or (_GENERATING,))[0]
    if name.endswith(_GENERATORS):
        if config.tie_word_embeddings:
            return None
        return _matrix("lm_head", config.vocab_size * config.hidden_size, stored)
    if name.endswith("ForSequenceClassification"):
        return _matrix("score", _labels(config) * config.hidden_size, stored)
    # A name such as Qwen2ForRewardModel is of another head.
    if name.endswith("Model") and "For" not in name:
        return _matrix("none", 0, stored)
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

_NOT_ATTENTIVE = frozenset({LayerKind.LINEAR, LayerKind.MLP, LayerKind.MOE, LayerKind.NO_ATTENTION})

_WITH_STATE = frozenset({LayerKind.LINEAR, LayerKind.HYBRID})

_Parts = tuple[tuple[Attention, ...], tuple[WeightBlock, ...], int, RecurrentState | None]


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
    plain = scheme.plain
    groups = _groups(config, scheme)
    rows = config.vocab_size + config.extra_embeddings
    return ModelShape(
        architecture=config.architecture,
        embedding=_matrix("model.embed_tokens", rows * config.hidden_size, plain),
        head=output_matrix(config, scheme.format_of_head()),
        groups=groups,
        vectors=_norm_size(config) + (config.vocab_size if config.lm_head_bias else 0),
        precision=plain.compute,
        compute=_most_products(groups, plain),
        cache_bits=cache_bits,
        max_context=config.max_position_embeddings,
        remarks=remarks,
    )


def _norm_size(config: TextConfig) -> int:
    """The values of one norm."""
    return config.hidden_size * (2 if ARCHITECTURES[config.architecture].norm_bias else 1)


def _most_products(groups: tuple[LayerGroup, ...], plain: WeightFormat) -> Precision:
    """The precision of most products with quantised weights."""
    weights: Counter[Precision] = Counter()
    for group in groups:
        for block in group.blocks:
            if block.format != plain:
                weights[block.format.compute] += group.layers * block.used * block.parameters
    return max(weights, key=weights.__getitem__, default=plain.compute)


def _groups(config: TextConfig, scheme: Scheme) -> tuple[LayerGroup, ...]:
    row = ARCHITECTURES[config.architecture]
    modules: set[str] = set()

    def block_at(prefix: str) -> Block:
        def block(name: str, rows: int, columns: int, vectors: int = 0) -> WeightBlock:
            module = f"{prefix}.{name}"
            modules.add(module)
            stored = scheme.format_of(module)
            return WeightBlock(name=name, parameters=rows * columns, format=stored, vectors=vectors)

        return block

    alike = Counter(
        _Layer(config, row, scheme.plain, number, block_at(f"model.layers.{number}")).parts(kind)
        for number, kind in enumerate(layer_kinds(config))
    )
    groups = [
        LayerGroup(layers=count, attentions=attended, blocks=blocks, vectors=vectors, state=state)
        for (attended, blocks, vectors, state), count in alike.items()
    ]
    scheme.require_modules(modules)
    formats = {block.format for group in groups for block in group.blocks}
    scheme.require_some(formats - {scheme.plain})
    outer = tuple(outer_blocks(config, block_at("model")))
    if outer:
        groups.append(LayerGroup(layers=1, attentions=(), blocks=outer, vectors=0))
    return tuple(groups)


class _Layer:
    """Builds the parts of one layer, by its number."""

    def __init__(
        self, config: TextConfig, row: Architecture, plain: WeightFormat, number: int, block: Block
    ) -> None:
        own = (config.per_layer_config or {}).get(number)
        changed = {} if own is None else own.model_dump(exclude_none=True)
        self._config = config.model_copy(update=changed) if changed else config
        self._row = row
        self._plain = plain
        self._number = number
        self._named_block = block

    def parts(self, kind: LayerKind) -> _Parts:
        """(attentions, matrices, values of norms, state) of the layer."""
        config = self._config
        if kind is LayerKind.FULL and not config.attends:
            kind = LayerKind.NO_ATTENTION
        blocks = (*self._mixing(kind), *self._forward(kind))
        if kind is LayerKind.CROSS:
            # Requests without images skip the layer.
            blocks = tuple(replace(block, used=0) for block in blocks)
        # Such a layer has a gate for each of its parts.
        gates = 2 if kind is LayerKind.CROSS else 0
        vectors = self._norms(kind) * _norm_size(config) + gates + self._row.of_activation
        return tuple(self._attentions(kind)), blocks, vectors, self._state(kind)

    def _attentions(self, kind: LayerKind) -> Iterator[Attention]:
        if kind in _NOT_ATTENTIVE or kind is LayerKind.CROSS:
            return
        if self._row.attention is AttentionType.COMPRESSED:
            yield from compressed_attentions(self._config, kind)
        else:
            yield from attentions(self._config, self._row, kind)

    def _mixing(self, kind: LayerKind) -> Iterator[WeightBlock]:
        """The matrices of the attention or of the recurrence."""
        config, row = self._config, self._row
        if kind in _WITH_STATE and row.recurrence is not None:
            yield from recurrent_blocks(config, row.recurrence, self._block)
        if kind in _NOT_ATTENTIVE:
            return
        elif row.attention is AttentionType.COMPRESSED:
            yield from compressed_blocks(config, kind, self._block)
        else:
            yield from attention_blocks(config, row, kind, self._block)

    def _forward(self, kind: LayerKind) -> Iterator[WeightBlock]:
        mixes = kind not in (LayerKind.MLP, LayerKind.MOE)
        if mixes and self._row.parts_apart:
            return
        forward = FeedForward(self._config, self._row, self._block, plain=self._plain)
        yield from forward.blocks(kind, self._number)
        yield from residual_blocks(self._config, self._row, self._block)

    def _norms(self, kind: LayerKind) -> int:
        """A layer without a part has no norm for it."""
        lacks_forward = self._config.intermediate_size == 0
        return self._row.norms - (kind is LayerKind.NO_ATTENTION) - lacks_forward

    def _state(self, kind: LayerKind) -> RecurrentState | None:
        if self._row.recurrence is None or kind not in _WITH_STATE:
            return None
        return recurrent_state(self._config, self._row.recurrence, self._plain.compute)

    def _block(self, name: str, rows: int, columns: int, vectors: int = 0) -> WeightBlock:
        if self._row.parts_apart:
            # The only part of a layer has one name, whatever it is.
            name = f"{self._row.feed_forward}.{name.split('.', 1)[1]}"
        return self._named_block(name, rows, columns, vectors)
