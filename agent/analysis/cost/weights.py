"""How the work of prefill and of decode is weighed, which is how busy time is split."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from agent.analysis.efficiency.serving import Serving
from agent.analysis.efficiency.work import Steps, TokenWork
from agent.analysis.physics.roofline import Roof

# A decoded token reads the weights together with its batch; a prompt token is computed among
# hundreds. At batches of some tens one weighs a few of the other. Price lists of hosted models have
# 3 to 5 too.
OUTPUT_TOKEN_WEIGHT = 4.0


class Method(StrEnum):
    """How prefill was weighed against decode."""

    ROOFLINE = "roofline"
    TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class Weights:
    """Functions from work to its weight. The weight of a sum of works is the sum of the weights."""

    method: Method
    prefill: Callable[[TokenWork], float]
    decode: Callable[[TokenWork], float]


def weights_for(serving: Serving, prefill: TokenWork, decode: TokenWork, steps: Steps) -> Weights:
    """By the least seconds that the GPUs need, where GPUs and model are known, else by tokens.

    `prefill` and `decode` are all work of the minute: the roof that bounds a phase bounds it for
    each request. Bytes of the model's weights belong to steps, and the tokens of a phase share them
    evenly.
    """
    roof = serving.roof
    if roof is None:
        return Weights(
            Method.TOKENS,
            prefill=lambda work: work.tokens,
            decode=lambda work: OUTPUT_TOKEN_WEIGHT * work.tokens,
        )
    return Weights(
        Method.ROOFLINE,
        prefill=_seconds(roof, prefill, serving.weight_bytes(steps.prefill, prefill.tokens)),
        decode=_seconds(roof, decode, serving.weight_bytes(steps.decode, decode.tokens)),
    )


def _seconds(roof: Roof, whole: TokenWork, weight_bytes: float) -> Callable[[TokenWork], float]:
    """The seconds of a part of a phase, by the roof that bounds the whole phase."""
    if whole.flops / roof.flops_per_s >= (whole.kv_bytes + weight_bytes) / roof.bytes_per_s:
        return lambda work: work.flops / roof.flops_per_s
    per_token = weight_bytes / whole.tokens if whole.tokens > 0 else 0.0
    return lambda work: (work.kv_bytes + work.tokens * per_token) / roof.bytes_per_s
