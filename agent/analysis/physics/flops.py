"""FLOPs of prefill and decode.

Exact for what a model must compute. They add up over requests and over the chunks of a prefill, but
for latent attention: each chunk expands the latents of all tokens before it again (`kv_b_proj`),
and those of a selection only while all tokens fit in it.
Norms, activations, softmax and the lookup in the input embedding are left out: far below 1 %.
"""

from agent.analysis.physics.coefficients import Coefficients, LayerAttention
from agent.analysis.physics.context import attended_pairs
from agent.records.model import Reach


def chunk_flops(model: Coefficients, new: int, cached: int = 0) -> int:
    """FLOPs of `new` prompt tokens after `cached` ones, without the output matrix."""
    if new == 0:
        return 0
    scores = sum(part.layers * _score_flops(part, new, cached) for part in model.attentions)
    return (2 * model.linear_parameters + model.state_flops) * new + scores


def _score_flops(part: LayerAttention, new: int, cached: int) -> int:
    """FLOPs of the scores of one layer.

    With sparse attention, engines gather the latents of the selected tokens and attend to these, as
    in decode. While the selection holds all tokens, a prefill expands the latents instead
    (`sparse_mla_attention.py` of vLLM 0.32).
    """
    pairs = attended_pairs(new, cached, part.window, part.reach)
    selected = part.window if part.reach is Reach.SELECTION else None
    if selected is not None and cached + new > selected:
        return part.decode_flops_per_pair * pairs
    return part.prefill_flops_per_pair * pairs + part.expand_flops * cached


def prefill_flops(model: Coefficients, prompt: int, cached: int = 0) -> int:
    """FLOPs from a prompt to its first output token, without its first `cached` tokens."""
    return chunk_flops(model, prompt - cached, cached) + 2 * model.head_parameters


def decode_flops(model: Coefficients, prompt: int, output: int) -> int:
    """FLOPs of all output tokens but the first, which prefill computes."""
    steps = max(output - 1, 0)
    scores = sum(
        part.layers
        * part.decode_flops_per_pair
        * attended_pairs(steps, prompt, part.window, part.reach)
        for part in model.attentions
    )
    parameters = model.linear_parameters + model.head_parameters
    return (2 * parameters + model.state_flops) * steps + scores


def decode_token_flops(model: Coefficients, context: int) -> int:
    """FLOPs of one output token whose context, itself included, is this long."""
    return decode_flops(model, context - 1, 2)
