"""What a model has beside attention and feed-forward parts: embeddings and residuals of layers."""

from collections.abc import Iterator
from dataclasses import replace

from agent.catalog.architectures import Architecture
from agent.records.model import WeightBlock
from agent.sources.model_config.config import Block, TextConfig, needed


def residual_blocks(config: TextConfig, row: Architecture, block: Block) -> Iterator[WeightBlock]:
    """The matrices of one layer."""
    hidden, inputs = config.hidden_size, config.hidden_size_per_layer_input
    if inputs:
        yield block("per_layer_input_gate", hidden, inputs, hidden)
        yield block("per_layer_projection", inputs, hidden)
    yield from _alternating_blocks(config, block)
    if config.hc_mult:
        outputs, scales = 2 * config.hc_mult, 2
        if row.stream_products:
            outputs, scales = outputs + config.hc_mult**2, 3
        for name in ("hc_attn_fn", "hc_ffn_fn"):
            yield _hyper_connection(name, config, block, outputs, scales)
    if config.attn_res_block_size:
        for name in ("self_attention_res_proj", "mlp_res_proj"):
            yield block(name, hidden, 1, hidden)


def _alternating_blocks(config: TextConfig, block: Block) -> Iterator[WeightBlock]:
    """The matrices of Gemma 3n's streams and low-rank residual."""
    hidden = config.hidden_size
    if config.laurel_rank:
        yield block("laurel.linear_left", hidden, config.laurel_rank, hidden)
        yield block("laurel.linear_right", config.laurel_rank, hidden)
    if config.altup_num_inputs:
        streams = config.altup_num_inputs
        # A norm, and a scale of the output.
        yield block("altup.modality_router", hidden, streams, 2 * hidden)
        yield block("altup.prediction_coefs", streams, streams**2)
        yield block("altup.correction_coefs", streams, streams)


def _hyper_connection(
    name: str, config: TextConfig, block: Block, outputs: int, scales: int
) -> WeightBlock:
    streams = needed(config, "hc_mult")
    return block(name, streams * config.hidden_size, outputs, outputs + scales)


def outer_blocks(config: TextConfig, block: Block) -> Iterator[WeightBlock]:
    """The matrices outside of all layers, without embedding and output matrix."""
    hidden, inputs = config.hidden_size, config.hidden_size_per_layer_input
    if inputs:
        widths = config.num_hidden_layers * inputs
        table = block(
            "embed_tokens_per_layer", needed(config, "vocab_size_per_layer_input"), widths
        )
        # A token looks up its row alone.
        yield replace(table, used=0)
        yield block("per_layer_model_projection", hidden, widths, inputs)
    for number in range((config.altup_num_inputs or 1) - 1):
        yield block(f"altup_projections.{number}", hidden, hidden)
        yield block(f"altup_unembed_projections.{number}", hidden, hidden)
    if config.hc_mult:
        yield _hyper_connection("hc_head_fn", config, block, config.hc_mult, 1)
    if config.attn_res_block_size:
        yield block("output_attn_res_proj", hidden, 1, hidden)
