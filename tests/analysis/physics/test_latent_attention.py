"""FLOPs of latent attention (MLA) against torch's counter, and vLLM's own figure beside them."""

from typing import Any

import pytest

from agent.analysis.efficiency.disagreement import Conditions, disagreements
from agent.analysis.efficiency.source_utilisation import Source, SourceUtilisation
from agent.analysis.physics.coefficients import coefficients
from agent.analysis.physics.flops import chunk_flops, decode_token_flops
from tests.real_parts.transformers_models import answer_of
from tests.sources.model_config.published import published

# New tokens of a prompt after cached ones, and contexts of a decoded token.
PREFILLS = ((1000, 0), (1000, 30_000), (200, 8_000))
CONTEXTS = (1000, 30_000)
LAYERS = 61

MODEL = published("deepseek-v3")
DEEPSEEK = coefficients(MODEL)
ATTENTION_PARAMETERS = sum(
    block.parameters for block in MODEL.groups[0].blocks if block.name.startswith("self_attn.")
)
OTHERS = DEEPSEEK.linear_parameters - LAYERS * ATTENTION_PARAMETERS


@pytest.fixture(scope="module")
def counted() -> dict[str, Any]:
    """FLOPs of one layer's attention of DeepSeek-V3, whose configuration is the class's own."""
    asked = {"config": {"model_type": "deepseek_v3"}, "prefills": PREFILLS, "contexts": CONTEXTS}
    found: dict[str, Any] = answer_of("run_latent_attention.py", asked)
    return found


@pytest.mark.parametrize("case", range(len(PREFILLS)))
def test_a_prefill_expands_the_latents_of_its_cached_tokens(
    counted: dict[str, Any], case: int
) -> None:
    """torch multiplies the masked pairs too, which a causal kernel leaves out."""
    new, cached = PREFILLS[case]
    masked = 2 * 128 * (192 + 128) * new * (new - 1) // 2
    ours = chunk_flops(DEEPSEEK, new, cached) - 2 * OTHERS * new
    assert ours == LAYERS * (counted["prefill"][case] - masked)


@pytest.mark.parametrize("case", range(len(CONTEXTS)))
def test_a_decoded_token_attends_to_the_latents_themselves(
    counted: dict[str, Any], case: int
) -> None:
    ours = decode_token_flops(DEEPSEEK, CONTEXTS[case])
    others = 2 * (OTHERS + DEEPSEEK.head_parameters)
    assert ours - others == LAYERS * counted["decode"][case]


def test_vllm_counts_a_decoded_token_as_if_keys_and_values_were_cached(
    counted: dict[str, Any],
) -> None:
    """Its figure is a third of what its kernels do, and that is the cause that is named."""
    (absorbed, expanded) = counted["decode"][1], counted["engines_decode"][1]
    assert absorbed > 3 * expanded
    views = (
        SourceUtilisation(source=Source.REQUESTS, mfu=0.03),
        SourceUtilisation(source=Source.ENGINE, mfu=0.01),
    )
    (found,) = disagreements(views, Conditions(latents=True))
    assert found.cause == "latents_counted_expanded"
    (without,) = disagreements(views, Conditions())
    assert without.cause != found.cause
