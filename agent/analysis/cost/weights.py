"""What a request's work weighs beside that of others, which is how busy time is split."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from agent.analysis.efficiency.serving import Serving
from agent.analysis.efficiency.work import Steps, TokenWork
from agent.analysis.physics.roofline import Roof

# A decoded token takes the weights' way through memory, shared by the batch; a token of a prompt is
# computed among hundreds. At a batch of some tens one is worth a few of the other, and price lists
# of hosted models say 3 to 5 too.
OUTPUT_TOKEN_WEIGHT = 4.0


class Method(StrEnum):
    """How the work of prefill and of decode was weighed against each other."""

    ROOFLINE = "roofline"
    TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class Weights:
    """Functions that give each load its weight; weights add up as loads do."""

    method: Method
    prefill: Callable[[TokenWork], float]
    decode: Callable[[TokenWork], float]


def weights_for(serving: Serving, prefill: TokenWork, decode: TokenWork, steps: Steps) -> Weights:
    """By the least seconds that the GPUs need, where these and the model are known, else by tokens.

    `prefill` and `decode` are the loads of the whole window, whose tokens are computed ones: what
    binds a phase binds it for each request. The weights of the model are read by steps, and that
    is shared evenly by the tokens of a phase.
    """
    roof = serving.roof
    if roof is None:
        return Weights(
            Method.TOKENS,
            prefill=lambda load: load.tokens,
            decode=lambda load: OUTPUT_TOKEN_WEIGHT * load.tokens,
        )
    return Weights(
        Method.ROOFLINE,
        prefill=_seconds(roof, prefill, serving.weight_bytes(steps.prefill, prefill.tokens)),
        decode=_seconds(roof, decode, serving.weight_bytes(steps.decode, decode.tokens)),
    )


def _seconds(roof: Roof, whole: TokenWork, weight_bytes: float) -> Callable[[TokenWork], float]:
    """The seconds of a part of a phase, by what bounds the whole of it."""
    if whole.flops / roof.flops_per_s >= (whole.kv_bytes + weight_bytes) / roof.bytes_per_s:
        return lambda load: load.flops / roof.flops_per_s
    per_token = weight_bytes / whole.tokens if whole.tokens > 0 else 0.0
    return lambda load: (load.kv_bytes + load.tokens * per_token) / roof.bytes_per_s
