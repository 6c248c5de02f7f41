"""Bytes of cache per request, bytes of weights per step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.analysis.physics.coefficients import Coefficients, coefficients
from agent.analysis.physics.flops_and_bytes import (
    decode_kv_bytes,
    kv_bytes,
    kv_bytes_per_token,
    prefill_kv_bytes,
    step_weight_bytes,
)
from tests.analysis.physics.shapes import LENGTHS, MODELS
from tests.sources.model_config.published import PUBLISHED, published, read_config

LLAMA_8B = coefficients(published("llama-3.1-8b"))
DEEPSEEK = coefficients(published("deepseek-v3"))


def test_a_token_of_llama_8b_takes_131072_bytes_of_cache() -> None:
    assert kv_bytes_per_token(LLAMA_8B) == 131_072


def test_a_latent_cache_holds_the_latent_and_the_rotated_part() -> None:
    assert kv_bytes_per_token(DEEPSEEK) == 61 * (512 + 64) * 2


def test_a_cache_in_8_bits_takes_half() -> None:
    halved = read_config(PUBLISHED["llama-3.1-8b"]["config"], cache_bits=8)
    assert kv_bytes_per_token(coefficients(halved)) == 131_072 / 2


@pytest.mark.parametrize(
    ("tensor", "share"), [(1, 1), (2, 1 / 2), (8, 1 / 8), (16, 1 / 8), (64, 1 / 8)]
)
def test_kv_heads_are_divided_until_each_gpu_has_one(tensor: int, share: float) -> None:
    assert kv_bytes(LLAMA_8B, 1000, tensor) == 131_072_000 * share


def test_a_latent_cache_is_whole_on_every_gpu() -> None:
    assert kv_bytes(DEEPSEEK, 1000, 8) == kv_bytes(DEEPSEEK, 1000)


def test_windows_limit_the_cache_of_a_request_per_layer() -> None:
    gemma = coefficients(published("gemma-3-27b"))
    layer = 2 * 16 * 128 * 2
    assert kv_bytes(gemma, 1000) == 62 * layer * 1000
    assert kv_bytes(gemma, 10_000) == layer * (10 * 10_000 + 52 * 1024)


# Qwen3-Next: 36 layers with a state, and 12 with 2 KV heads of 256.
QWEN3_NEXT = coefficients(read_config({"model_type": "qwen3_next", "dtype": "bfloat16"}))
# 32 heads with a matrix of 128 x 128, and the last 3 inputs of a convolution over 8,192 channels.
NEXT_STATE_BYTES = 36 * 2 * (32 * 128 * 128 + 3 * 8192)


def test_a_state_is_as_large_after_one_token_as_after_a_million() -> None:
    for context in (1, 1000, 1_000_000):
        token_bytes = 12 * 2 * 2 * 256 * 2
        assert kv_bytes(QWEN3_NEXT, context) == NEXT_STATE_BYTES + token_bytes * context
    assert kv_bytes(QWEN3_NEXT, 1, tensor=2) == kv_bytes(QWEN3_NEXT, 1) / 2


def test_each_output_token_reads_and_writes_the_state() -> None:
    moved = decode_kv_bytes(QWEN3_NEXT, 1000, 11)
    token_bytes = 12 * 2 * 2 * 256 * 2
    keys_and_values = token_bytes * (sum(range(1001, 1011)) + 10)
    assert moved == keys_and_values + 2 * 10 * NEXT_STATE_BYTES
    assert prefill_kv_bytes(QWEN3_NEXT, 10) == token_bytes * 20 + NEXT_STATE_BYTES
    after = prefill_kv_bytes(QWEN3_NEXT, 10, 1000)
    assert after == token_bytes * 1020 + 2 * NEXT_STATE_BYTES


def test_deepseek_v32_caches_the_latent_and_132_bytes_for_its_index() -> None:
    """vLLM: head_dim bytes, and a scale of 4 for each 128 of them."""
    sparse = coefficients(read_config({"model_type": "deepseek_v32", "dtype": "bfloat16"}))
    assert kv_bytes_per_token(sparse) == 61 * ((512 + 64) * 2 + 128 + 4)
    # A token reads 2,048 latents at most, and the keys of the index of all.
    read = decode_kv_bytes(sparse, 100_000, 2) - kv_bytes_per_token(sparse)
    assert read == 61 * (2048 * (512 + 64) * 2 + 100_001 * 132)


def test_llama_4_caches_the_chunk_of_a_token_and_a_quarter_of_the_layers_all() -> None:
    scout = coefficients(read_config({"model_type": "llama4_text", "dtype": "bfloat16"}))
    layer = 2 * 8 * 128 * 2
    assert kv_bytes(scout, 8192) == 48 * layer * 8192
    assert kv_bytes(scout, 8193) == 12 * layer * 8193 + 36 * layer


@given(MODELS, LENGTHS, st.integers(1, 64))
def test_more_gpus_hold_less_of_a_cache_each_and_all_of_it_together(
    model: Coefficients, context: int, tensor: int
) -> None:
    on_one, on_each = kv_bytes(model, context), kv_bytes(model, context, tensor)
    assert on_each <= kv_bytes(model, context, max(tensor - 1, 1))
    assert on_each * tensor >= on_one * (1 - 1e-12)
    assert on_one <= kv_bytes(model, context + 1)


@given(MODELS, LENGTHS, st.integers(1, 500))
def test_decode_reads_the_tokens_in_the_windows_and_writes_each_token_once(
    model: Coefficients, prompt: int, output: int
) -> None:
    read = sum(kv_bytes(model, prompt + token) for token in range(1, output))
    written = (output - 1) * kv_bytes_per_token(model)
    assert decode_kv_bytes(model, prompt, output) == pytest.approx(read + written)


def test_a_prefill_reads_its_prefix_and_itself_and_writes_itself() -> None:
    assert prefill_kv_bytes(LLAMA_8B, 300, 1000) == 131_072 * (1000 + 2 * 300)


@given(MODELS, LENGTHS, st.integers(1, 300), st.integers(0, 300))
def test_two_parts_of_a_decode_move_the_bytes_of_the_whole(
    model: Coefficients, prompt: int, first: int, more: int
) -> None:
    """The second part starts after the first; its first token belongs to the first part."""
    whole = decode_kv_bytes(model, prompt, first + more)
    parts = (
        decode_kv_bytes(model, prompt, first),
        decode_kv_bytes(model, prompt + first - 1, more + 1),
    )
    assert sum(parts) == pytest.approx(whole)


# Weights


def test_a_step_reads_all_matrices_of_a_dense_model_and_no_input_embedding() -> None:
    for tokens in (1, 4096):
        read = step_weight_bytes(published("llama-3.1-8b"), tokens)
        assert read / 1e9 == pytest.approx(15.01, abs=0.005)


def test_a_tied_embedding_is_read_as_output_matrix() -> None:
    tied, untied = published("llama-3.2-1b"), published("llama-3.1-8b")
    assert tied.head is None
    assert untied.head is not None
    layers = 2 * coefficients(tied).linear_parameters
    assert step_weight_bytes(tied, 1) == layers + 2 * tied.embedding.parameters


def test_a_step_reads_the_experts_that_its_tokens_are_expected_to_choose() -> None:
    model = published("qwen3-30b-a3b")
    expert = 48 * 3 * 2048 * 768 * 2
    others = step_weight_bytes(model, 0)
    assert step_weight_bytes(model, 1) - others == pytest.approx(8 * expert)
    # 16 tokens with 8 experts each choose about 82 of the 128 experts.
    assert (step_weight_bytes(model, 16) - others) / expert == pytest.approx(82.4, abs=0.1)
    assert step_weight_bytes(model, 10_000) - others == pytest.approx(128 * expert)


@given(st.integers(0, 10_000))
def test_more_tokens_never_read_fewer_experts(tokens: int) -> None:
    model = published("mixtral-8x7b")
    assert step_weight_bytes(model, tokens) <= step_weight_bytes(model, tokens + 1)
