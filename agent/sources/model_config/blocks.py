"""The matrices of one layer, under the names that quantisation configs use."""

from collections.abc import Iterator
from dataclasses import replace

from agent.catalog.architectures import Architecture
from agent.records.model import Attention, WeightBlock
from agent.sources.model_config.config import TextConfig
from agent.sources.model_config.config_errors import ModelConfigInvalid
from agent.sources.model_config.quantisation import Scheme


class Layer:
    """Builds the blocks and the attention of one layer, by its number."""

    def __init__(
        self, config: TextConfig, architecture: Architecture, scheme: Scheme, number: int
    ) -> None:
        self._config = config
        self._architecture = architecture
        self._scheme = scheme
        self._prefix = f"model.layers.{number}"
        self._number = number

    def blocks(self) -> tuple[WeightBlock, ...]:
        """Every matrix of the layer."""
        parts = self._latent if self._architecture.latent_attention else self._grouped
        forward = self._experts if self._has_experts() else self._dense
        return (*parts(), *forward())

    def attention(self) -> Attention:
        """The layer's attention, with its sliding window."""
        if self._architecture.latent_attention:
            return self._latent_attention()
        config = self._config
        return Attention(
            kv_heads=_kv_heads(config),
            values_per_kv_head=2 * _head_dim(config),
            # Products with the keys and with the values, two FLOPs each.
            prefill_flops_per_pair=4 * config.num_attention_heads * _head_dim(config),
            decode_flops_per_pair=4 * config.num_attention_heads * _head_dim(config),
            window=self._window(),
        )

    def _window(self) -> int | None:
        if self._config.layer_types is not None:
            slides = self._config.layer_types[self._number] == "sliding_attention"
            return self._config.sliding_window if slides else None
        every = self._config.sliding_window_pattern or self._architecture.full_attention_every
        if self._architecture.full_attention_every is None:
            return None
        full = every and (self._number + 1) % every == 0
        return None if full else self._config.sliding_window

    def _latent_attention(self) -> Attention:
        config = self._config
        rank, rope = needed(config, "kv_lora_rank"), needed(config, "qk_rope_head_dim")
        nope, value = needed(config, "qk_nope_head_dim"), needed(config, "v_head_dim")
        heads = config.num_attention_heads
        return Attention(
            kv_heads=1,
            values_per_kv_head=rank + rope,
            prefill_flops_per_pair=2 * heads * (nope + rope + value),
            # Engines cache the latent alone, and a prefill attends to keys and values.
            expand_flops=2 * rank * heads * (nope + value),
            # Decode uses the latent itself: its matrices are absorbed into query and output.
            decode_flops_per_pair=2 * heads * ((rank + rope) + rank),
        )

    def _has_experts(self) -> bool:
        config, number = self._config, self._number
        if not self._architecture.experts or number in config.mlp_only_layers:
            return False
        if number < config.first_k_dense_replace or number % config.moe_layer_freq:
            return False
        step = config.decoder_sparse_step
        return step > 0 and (number + 1) % step == 0

    def _block(self, name: str, rows: int, columns: int, vectors: int = 0) -> WeightBlock:
        return WeightBlock(
            name=name,
            parameters=rows * columns,
            format=self._scheme.format_of(f"{self._prefix}.{name}"),
            vectors=vectors,
        )

    def _grouped(self) -> Iterator[WeightBlock]:
        config, head_dim = self._config, _head_dim(self._config)
        hidden, query = config.hidden_size, config.num_attention_heads * head_dim
        key = _kv_heads(config) * head_dim
        norm = head_dim if self._has_head_norms() else 0
        sinks = config.num_attention_heads if self._architecture.sinks else 0
        for name, rows, columns, other in (
            ("q", hidden, query, norm + sinks),
            ("k", hidden, key, norm),
            ("v", hidden, key, 0),
            ("o", query, hidden, 0),
        ):
            bias = columns if self._has_bias(name) else 0
            yield self._block(f"self_attn.{name}_proj", rows, columns, bias + other)

    def _has_head_norms(self) -> bool:
        configured = self._config.use_qk_norm
        return self._architecture.head_norms if configured is None else configured

    def _has_bias(self, matrix: str) -> bool:
        configured = self._config.attention_bias
        biased = self._architecture.attention_bias if configured is None else configured
        return biased and matrix in self._architecture.biased

    def _latent(self) -> Iterator[WeightBlock]:
        config, hidden = self._config, self._config.hidden_size
        rank, rope = needed(config, "kv_lora_rank"), needed(config, "qk_rope_head_dim")
        nope, value = needed(config, "qk_nope_head_dim"), needed(config, "v_head_dim")
        heads, query_rank = config.num_attention_heads, config.q_lora_rank
        query = heads * (nope + rope)
        if query_rank is None:
            yield self._block("self_attn.q_proj", hidden, query)
        else:
            yield self._block("self_attn.q_a_proj", hidden, query_rank, query_rank)
            yield self._block("self_attn.q_b_proj", query_rank, query)
        yield self._block("self_attn.kv_a_proj_with_mqa", hidden, rank + rope, rank)
        yield self._block("self_attn.kv_b_proj", rank, heads * (nope + value))
        yield self._block("self_attn.o_proj", heads * value, hidden)

    def _dense(self) -> Iterator[WeightBlock]:
        width = self._config.intermediate_size
        return self._gated("mlp", width, biased=self._config.mlp_bias)

    def _gated(self, name: str, width: int, *, biased: bool = False) -> Iterator[WeightBlock]:
        """The three matrices of a feed-forward part with a gate."""
        hidden = self._config.hidden_size
        for matrix, rows, columns in (
            ("gate_proj", hidden, width),
            ("up_proj", hidden, width),
            ("down_proj", width, hidden),
        ):
            yield self._block(f"{name}.{matrix}", rows, columns, columns if biased else 0)

    def _experts(self) -> Iterator[WeightBlock]:
        config, architecture = self._config, self._architecture
        copies, used = needed(config, "experts"), needed(config, "experts_per_token")
        width = config.moe_intermediate_size or config.intermediate_size
        yield WeightBlock(
            name="mlp.gate",
            parameters=config.hidden_size * copies,
            # No method quantises routers: they are small, and errors in them cost much.
            format=self._scheme.plain,
            vectors=copies if architecture.router_bias else 0,
        )
        for block in self._gated("mlp.experts.0", width, biased=architecture.expert_bias):
            yield replace(block, copies=copies, used=used)
        if config.shared_experts:
            yield from self._gated("mlp.shared_experts", config.shared_experts * width)
        if config.shared_expert_intermediate_size:
            yield from self._gated("mlp.shared_expert", config.shared_expert_intermediate_size)
            yield self._block("mlp.shared_expert_gate", config.hidden_size, 1)


def needed(config: TextConfig, key: str) -> int:
    """A number that the architecture needs. Raises ModelConfigInvalid where it is missing."""
    value: int | None = getattr(config, key)
    if value is None:
        raise ModelConfigInvalid(
            f"the architecture {config.architecture!r} needs {key}, which its config.json lacks"
        )
    return value


def _kv_heads(config: TextConfig) -> int:
    return config.num_key_value_heads or config.num_attention_heads


def _head_dim(config: TextConfig) -> int:
    return config.head_dim or config.hidden_size // config.num_attention_heads
