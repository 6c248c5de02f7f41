"""Files of models of 2025 and 2026, against the figures that were published with the models."""

from dataclasses import dataclass
from functools import cache

import pytest

from agent.analysis.physics import (
    active_parameters,
    coefficients,
    kv_bytes_per_token,
    parameters,
    weight_bytes,
)
from agent.catalog.hardware import Precision
from agent.records.model import ModelShape
from agent.sources.model_config import read_model
from tests.sources.model_config.published import FOREIGN_CONFIGS


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Parameters in billions. `alone` are the active ones without embedding and output matrix.

    Publishers count `active` or `alone`, and round.
    """

    total: float
    active: float | None = None
    alone: float | None = None
    within: float = 0.01
    kv_bytes: float
    compute: Precision = Precision.BF16
    gigabytes: float | None = None


EXPECTED = {
    # 428B with its vision encoder, 23B active.
    "MiniMaxAI--MiniMax-M3": Expected(
        total=426.2, alone=23, within=0.03, kv_bytes=60 * 2048 + 57 * 256
    ),
    "Qwen--Qwen3-32B-FP8-Static-PerTensor": Expected(
        total=32.76, kv_bytes=131_072, compute=Precision.FP8, gigabytes=34.3
    ),
    # 309B and 15B; 9 layers with 4 KV heads and 39 with 8, of 192 + 128 values.
    "XiaomiMiMo--MiMo-V2-Flash": Expected(
        total=309,
        active=15,
        within=0.04,
        kv_bytes=2 * 320 * (9 * 4 + 39 * 8),
        compute=Precision.FP8,
    ),
    # 284B and 13B: its files have 160 GB, with the layer for multi-token prediction.
    "deepseek-ai--DeepSeek-V4-Flash": Expected(
        total=284,
        alone=13,
        within=0.025,
        # A vector a token in each layer, and for 4 or 128 tokens; keys of the index for 4.
        kv_bytes=584 * (43 + 21 / 4 + 20 / 128) + 132 * 21 / 4,
        compute=Precision.FP8,
        gigabytes=155.6,
    ),
    # 1.6T and 49B.
    "deepseek-ai--DeepSeek-V4-Pro": Expected(
        total=1573,
        active=49,
        within=0.02,
        kv_bytes=584 * (61 + 30 / 4 + 31 / 128) + 132 * 30 / 4,
        compute=Precision.FP8,
    ),
    # E4B: 8B with its encoders, 4B without the embeddings of layers.
    "gemma-3n-e4b": Expected(total=6.84, active=4.5, kv_bytes=20 * 2048),
    # 25.2B and 3.8B; 25 layers with 8 heads of 256, 5 with 2 of 512.
    "google--gemma-4-26B-A4B": Expected(
        total=25.2, active=3.8, kv_bytes=2 * 2 * (25 * 8 * 256 + 5 * 2 * 512)
    ),
    # 10.67B with its encoder of images; text passes 32 of 40 layers: Llama-3.1-8B.
    "llama-3.2-11b-vision": Expected(total=9.775, active=8.03, kv_bytes=131_072),
    # 24B with its encoder; the output matrix is its own.
    "mistral-small-3.1": Expected(total=23.57, active=23.57, kv_bytes=163_840),
    # 2.8T; latents in 24 of 93 layers.
    "moonshotai--Kimi-K3": Expected(total=2779.5, within=0.001, kv_bytes=24 * 2 * 576),
    # 49.9B; 49 of 80 layers attend.
    "nvidia--Llama-3_3-Nemotron-Super-49B-v1": Expected(
        total=49.87, within=0.001, kv_bytes=49 * 4096
    ),
    # 16 of 64 layers attend, cached in 8 bits. The bulk, W4A16, is multiplied in 16 bits.
    "nvidia--Qwen3.6-27B-NVFP4": Expected(total=26.9, kv_bytes=16 * 2048, gigabytes=20.15),
    # 196B and 11B.
    "stepfun-ai--Step-3.7-Flash": Expected(total=196, active=11, within=0.015, kv_bytes=45 * 4096),
    # 744B and 40B; 78 latents, and an index in 21 layers. GLM-5 has one in each.
    "zai-org--GLM-5.2-FP8": Expected(
        total=744,
        active=40,
        within=0.04,
        kv_bytes=78 * 576 * 2 + 21 * 132,
        compute=Precision.FP8,
        gigabytes=745.6,
    ),
    "zai-org--GLM-5": Expected(total=744, active=40, within=0.05, kv_bytes=78 * (576 * 2 + 132)),
}


@cache
def shape(name: str) -> ModelShape:
    return read_model(FOREIGN_CONFIGS / f"{name}.json")


def test_every_file_has_an_expected_reading() -> None:
    assert {file.stem for file in FOREIGN_CONFIGS.glob("*.json")} == EXPECTED.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_a_model_has_its_published_parameters(name: str) -> None:
    model, expected = shape(name), EXPECTED[name]
    assert parameters(model) / 1e9 == pytest.approx(expected.total, rel=expected.within)
    active = active_parameters(model) / 1e9
    if expected.active is not None:
        assert active == pytest.approx(expected.active, rel=expected.within)
    if expected.alone is not None:
        head = 0 if model.head is None else model.head.parameters
        outside = (model.embedding.parameters + head) / 1e9
        assert active - outside == pytest.approx(expected.alone, rel=expected.within)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_token_takes_its_part_of_the_cache(name: str) -> None:
    assert kv_bytes_per_token(coefficients(shape(name))) == EXPECTED[name].kv_bytes


@pytest.mark.parametrize("name", EXPECTED)
def test_weights_are_stored_and_multiplied_as_the_quantisation_says(name: str) -> None:
    expected = EXPECTED[name]
    assert shape(name).compute is expected.compute
    if expected.gigabytes is not None:
        assert weight_bytes(shape(name)) / 1e9 == pytest.approx(expected.gigabytes, rel=0.01)


def test_kimi_k3_has_the_matrices_of_vllms_modules() -> None:
    """By hand from vllm/models/kimi_k3: transformers has no class for what it adds."""
    hidden, wide, latent, heads, expert = 7168, 96 * 128, 3584, 96, 3072
    delta = 5 * hidden * wide + hidden * 128 + 128 * wide + hidden * heads
    delta += 3 * wide * 4 + wide + heads + 128
    query = hidden * 1536 + 1536 + 1536 * heads * 192
    attention = query + hidden * 576 + 512 + 512 * heads * 256 + 2 * wide * hidden
    experts = 896 * 3 * latent * expert + 3 * hidden * 2 * expert
    experts += 2 * hidden * latent + latent + 896 * hidden + 896
    # Two norms, and two residuals with a norm and a matrix of one column.
    each = 6 * hidden
    outside = 2 * 163_840 * hidden + 3 * hidden
    layers = 69 * delta + 24 * attention + 92 * experts + 3 * hidden * 33_792 + 93 * each
    assert parameters(shape("moonshotai--Kimi-K3")) == layers + outside


def test_nemotron_nas_has_the_layers_of_its_list() -> None:
    """49 of 80 layers attend; a layer without attention has one norm."""
    model = shape("nvidia--Llama-3_3-Nemotron-Super-49B-v1")
    attending = sum(group.layers for group in model.groups if group.attentions)
    norms = sum(group.layers * group.vectors for group in model.groups)
    assert (attending, norms) == (49, (80 + 49) * 8192)
    widths = {block.parameters // 8192 for group in model.groups for block in group.blocks}
    # 0.5, 1, 1.3125, 2.625, 3.28125 and 5.25 times 2/3 of the hidden size, in whole 256.
    assert {2816, 5632, 7168, 14336, 17920, 28672} < widths
