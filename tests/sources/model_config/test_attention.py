"""FLOPs and cache of attention that leaves tokens out, by hand."""

import pytest

from agent.analysis.physics import (
    Coefficients,
    chunk_flops,
    coefficients,
    decode_token_flops,
    kv_bytes,
)
from agent.sources.model_config import read_model
from tests.sources.model_config.published import FOREIGN_CONFIGS

CONTEXT = 102_400


def of_file(name: str) -> Coefficients:
    return coefficients(read_model(FOREIGN_CONFIGS / f"{name}.json"))


def score_flops(model: Coefficients, context: int) -> int:
    """FLOPs of a decoded token without those of matrices."""
    others = 2 * (model.linear_parameters + model.head_parameters) + model.state_flops
    return decode_token_flops(model, context) - others


def test_deepseek_v4_attends_to_a_window_and_to_compressed_caches() -> None:
    """Of 43 layers, 21 select among entries of 4 tokens, and 20 attend to entries of 128."""
    model = of_file("deepseek-ai--DeepSeek-V4-Flash")
    entry = 4 * 64 * 512
    selecting = 512 * entry + CONTEXT // 4 * 2 * 64 * 128
    compressed = CONTEXT // 128 * entry
    assert score_flops(model, CONTEXT) == 43 * 128 * entry + 21 * selecting + 20 * compressed
    entries = 43 * 128 + 21 * CONTEXT / 4 + 20 * CONTEXT / 128
    index = 21 * CONTEXT / 4 * (128 + 4)
    assert kv_bytes(model, CONTEXT) == pytest.approx(584 * entries + index)


def test_a_short_context_of_deepseek_v4_is_attended_to_in_full() -> None:
    model = of_file("deepseek-ai--DeepSeek-V4-Flash")
    entry = 4 * 64 * 512
    selecting = 16 * entry + 16 * 2 * 64 * 128
    # 64 tokens are half of an entry of 128.
    assert score_flops(model, 64) == 43 * 64 * entry + 21 * selecting + 20 * entry // 2


def test_minimax_m3_attends_to_the_blocks_that_its_index_selects() -> None:
    model = of_file("MiniMaxAI--MiniMax-M3")
    pair, index = 4 * 64 * 128, 2 * 4 * 128
    selecting = 2048 * pair + CONTEXT * index
    assert score_flops(model, CONTEXT) == 3 * CONTEXT * pair + 57 * selecting
    # All tokens stay in the cache, with a key of the index.
    assert kv_bytes(model, CONTEXT) == CONTEXT * (60 * 2048 + 57 * 256)


def test_layers_of_glm_5_2_share_the_selection_of_an_earlier_one() -> None:
    new, old = of_file("zai-org--GLM-5.2-FP8"), of_file("zai-org--GLM-5")
    latents = 78 * 2048 * 2 * 64 * (512 + 64 + 512)
    index = CONTEXT * 2 * 32 * 128
    assert score_flops(old, CONTEXT) == latents + 78 * index
    assert score_flops(new, CONTEXT) == latents + 21 * index


def test_gemma_4_and_mimo_have_heads_of_other_sizes_in_layers_with_a_window() -> None:
    gemma = of_file("google--gemma-4-26B-A4B")
    assert score_flops(gemma, CONTEXT) == 4 * 16 * (25 * 1024 * 256 + 5 * CONTEXT * 512)
    assert kv_bytes(gemma, CONTEXT) == 4 * (25 * 1024 * 8 * 256 + 5 * CONTEXT * 2 * 512)
    mimo = of_file("XiaomiMiMo--MiMo-V2-Flash")
    assert score_flops(mimo, CONTEXT) == 2 * 64 * 320 * (39 * 128 + 9 * CONTEXT)


def test_text_skips_layers_that_attend_to_images() -> None:
    model = of_file("llama-3.2-11b-vision")
    assert score_flops(model, CONTEXT) == 32 * CONTEXT * 4 * 4096


def test_layers_of_kimi_k3_have_latents_or_a_state() -> None:
    model = of_file("moonshotai--Kimi-K3")
    assert score_flops(model, CONTEXT) == 24 * CONTEXT * 2 * 96 * (512 + 64 + 512)
    # In 32 bits, with three tokens of the convolution in 16.
    assert model.state_bytes == 69 * (96 * 128 * 128 * 4 + 3 * 3 * 96 * 128 * 2)
    assert model.state_flops == 69 * 3 * 2 * 96 * 128 * 128


def test_chunks_of_a_prefill_of_deepseek_v4_add_up() -> None:
    model = of_file("deepseek-ai--DeepSeek-V4-Flash")
    halves = chunk_flops(model, 4096) + chunk_flops(model, 4096, 4096)
    assert chunk_flops(model, 8192) == halves
