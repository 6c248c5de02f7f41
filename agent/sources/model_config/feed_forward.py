"""The feed-forward part of a layer: dense matrices, or experts."""

from collections.abc import Iterator
from dataclasses import replace

from agent.catalog.architectures import Architecture, LayerKind
from agent.records.model import WeightBlock, WeightFormat
from agent.sources.model_config.config import (
    Block,
    ModelConfigInvalid,
    TextConfig,
    entry,
    needed,
)


class FeedForward:
    """Builds the feed-forward blocks of one layer, by its number."""

    def __init__(
        self, config: TextConfig, row: Architecture, block: Block, *, plain: WeightFormat
    ) -> None:
        self._config = config
        self._row = row
        self._block = block
        self._plain = plain
        self._prefix = row.feed_forward

    def blocks(self, kind: LayerKind, number: int) -> Iterator[WeightBlock]:
        """Every matrix; layers of the kinds `mlp` and `moe` say themselves what they are."""
        if self._row.parts_apart:
            yield from self._experts(number) if kind is LayerKind.MOE else self._dense()
        elif self._has_experts(number):
            if self._row.dense_beside_experts:
                yield from self._dense()
            yield from self._experts(number)
        elif self._row.shared_beside_dense:
            yield from self._shared()
        else:
            yield from self._dense()

    def _has_experts(self, number: int) -> bool:
        config = self._config
        if not self._row.experts or config.enable_moe_block is False:
            return False
        if config.experts == 0 and self._row.without_experts:
            return False
        if config.mlp_layer_types is not None:
            return bool(entry(config, "mlp_layer_types", number) != "dense")
        if config.moe_layers is not None:
            return number in config.moe_layers
        if number in (config.mlp_only_layers or ()) or number < self._dense_layers():
            return False
        last = config.moe_layer_end_index
        if last not in (None, -1) and number > last:
            return False
        step = 1 if config.decoder_sparse_step is None else config.decoder_sparse_step
        return step > 0 and (number + 1) % step == 0

    def _dense_layers(self) -> int:
        given = self._config.first_k_dense_replace
        return self._row.dense_layers if given is None else given

    def _dense(self) -> Iterator[WeightBlock]:
        width = self._config.dense_width or needed(self._config, "intermediate_size")
        biased = bool(self._config.mlp_bias)
        if width:
            yield from self._matrices(self._prefix, self._config.hidden_size, width, biased=biased)

    def _matrices(
        self, name: str, hidden: int, width: int, *, biased: bool = False
    ) -> Iterator[WeightBlock]:
        """The matrices of one feed-forward part, with or without a gate."""
        if self._row.gated_mlp:
            yield self._block(f"{name}.gate_proj", hidden, width, width if biased else 0)
        yield self._block(f"{name}.up_proj", hidden, width, width if biased else 0)
        yield self._block(f"{name}.down_proj", width, hidden, hidden if biased else 0)

    def _experts(self, number: int) -> Iterator[WeightBlock]:
        config, row = self._config, self._row
        copies, used = self._copies_and_used()
        yield WeightBlock(
            name=f"{self._prefix}.gate",
            parameters=config.hidden_size * copies,
            # No method quantises routers: they are small, and errors in them cost much.
            format=self._plain,
            vectors=self._of_router(copies, number),
        )
        yield from self._latent_matrices()
        hidden = config.moe_latent_size or config.hidden_size
        for block in self._matrices(
            f"{row.expert}.0", hidden, self._expert_width(), biased=row.expert_bias
        ):
            yield replace(block, copies=copies, used=used)
        yield from self._shared()

    def _of_router(self, copies: int, number: int) -> int:
        """Biases and scales of the router, and norms of layers with experts."""
        if self._row.dense_beside_experts:
            return copies + 4 * self._config.hidden_size
        listed = self._config.mlp_layer_types
        if listed is not None and entry(self._config, "mlp_layer_types", number) == "hash_moe":
            return 0
        if self._config.use_expert_bias is False:
            return 0
        return copies if self._row.router_bias or self._row.expert_bias else 0

    def _latent_matrices(self) -> Iterator[WeightBlock]:
        """Into the experts' own hidden size, and back."""
        hidden, latent = self._config.hidden_size, self._config.moe_latent_size
        if latent is None:
            return
        down, up = self._row.latent_names
        norm = latent if self._config.latent_moe_use_norm else 0
        for name, rows, columns, others in ((down, hidden, latent, norm), (up, latent, hidden, 0)):
            bias = columns if self._config.mlp_bias else 0
            yield self._block(f"{self._prefix}.{name}", rows, columns, bias + others)

    def _copies_and_used(self) -> tuple[int, int]:
        config = self._config
        copies, used = needed(config, "experts"), needed(config, "experts_per_token")
        if not 0 < used <= copies:
            raise ModelConfigInvalid(f"a token cannot use {used} of {copies} experts")
        return copies, used

    def _expert_width(self) -> int:
        return self._config.moe_intermediate_size or needed(self._config, "intermediate_size")

    def _shared(self) -> Iterator[WeightBlock]:
        """The expert that every token uses."""
        width = self._shared_width()
        hidden, biased = self._config.hidden_size, bool(self._config.mlp_bias)
        if width:
            yield from self._matrices(self._row.shared_expert, hidden, width, biased=biased)
        # Its class makes the gate of an expert of no width, too.
        if self._row.shared_gate:
            yield self._block(f"{self._row.shared_expert}_gate", self._config.hidden_size, 1)

    def _shared_width(self) -> int:
        if self._row.shared_as_wide_as_expert:
            return self._expert_width()
        if self._config.shared_width is not None:
            return self._config.shared_width
        return (self._config.shared_experts or 0) * self._expert_width()
