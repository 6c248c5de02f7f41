"""FLOPs against check values and closed formulas."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.analysis.physics.coefficients import Coefficients, coefficients
from agent.analysis.physics.flops_and_bytes import (
    chunk_flops,
    decode_flops,
    decode_token_flops,
    prefill_flops,
)
from tests.analysis.physics.shapes import LENGTHS, MODELS
from tests.sources.model_config.published import published, read_config

LLAMA_8B = coefficients(published("llama-3.1-8b"))
DEEPSEEK = coefficients(published("deepseek-v3"))
MISTRAL = coefficients(published("mistral-7b-v0.1"))

K = 1024


@pytest.mark.parametrize(("context", "gflop"), [(1 * K, 15.55), (8 * K, 19.30), (128 * K, 83.73)])
def test_flops_of_a_decoded_token_of_llama_8b(context: int, gflop: float) -> None:
    assert decode_token_flops(LLAMA_8B, context) / 1e9 == pytest.approx(gflop, abs=0.005)


@pytest.mark.parametrize(
    ("prompt", "tflop"), [(1 * K, 14.57), (8 * K, 131.9), (32 * K, 738.9), (128 * K, 6333)]
)
def test_flops_of_a_causal_prefill_of_llama_8b(prompt: int, tflop: float) -> None:
    assert prefill_flops(LLAMA_8B, prompt) / 1e12 == pytest.approx(tflop, rel=4e-4)


def test_flops_of_a_request_equal_the_closed_formula() -> None:
    prompt, cached, output = 5000, 1200, 300
    matrices, scores, head = 6_979_321_856, 4 * 32 * 128 * 32, 4096 * 128256
    computed = prompt - cached
    expected = (
        2 * matrices * (computed + output - 1)
        + scores * (computed * cached + computed * (computed + 1) // 2)
        + scores * ((output - 1) * prompt + (output - 1) * output // 2)
        + 2 * head * output
    )
    assert LLAMA_8B.linear_parameters == matrices
    whole = prefill_flops(LLAMA_8B, prompt, cached) + decode_flops(LLAMA_8B, prompt, output)
    assert whole == expected


def test_a_token_of_a_mixture_of_experts_counts_only_its_own_experts() -> None:
    mixtral = coefficients(published("mixtral-8x7b"))
    attention, router = 4096 * 128 * (2 * 32 + 2 * 8), 4096 * 8
    assert mixtral.linear_parameters == 32 * (attention + router + 2 * 3 * 4096 * 14336)


def test_latent_attention_is_expanded_in_prefill_and_absorbed_in_decode() -> None:
    (part,) = DEEPSEEK.attentions
    assert part.prefill_flops_per_pair == 2 * 128 * (128 + 64 + 128)
    assert part.decode_flops_per_pair == 2 * 128 * (512 + 64 + 512)
    step = decode_token_flops(DEEPSEEK, 1001) - decode_token_flops(DEEPSEEK, 1000)
    assert step == 61 * part.decode_flops_per_pair


def test_flops_of_a_token_stop_growing_at_the_attention_window() -> None:
    assert decode_token_flops(MISTRAL, 4096) == decode_token_flops(MISTRAL, 100_000)
    assert decode_token_flops(MISTRAL, 4095) < decode_token_flops(MISTRAL, 4096)


def test_only_the_layers_with_a_window_are_bounded_by_it() -> None:
    oss = coefficients(published("gpt-oss-20b"))
    growth = decode_token_flops(oss, 2001) - decode_token_flops(oss, 2000)
    assert growth == 12 * 4 * 64 * 64


def test_a_state_takes_the_same_flops_for_every_token() -> None:
    """A gated delta net reads its state by key and by query and adds to it: 6 FLOPs a value."""
    qwen = coefficients(read_config({"model_type": "qwen3_next"}))
    assert qwen.state_flops == 36 * 6 * 32 * 128 * 128
    growth = decode_token_flops(qwen, 2001) - decode_token_flops(qwen, 2000)
    assert growth == 12 * 4 * 16 * 256
    parameters = qwen.linear_parameters + qwen.head_parameters
    first = 2 * parameters + qwen.state_flops + growth
    assert decode_token_flops(qwen, 1) == first


def test_a_selection_bounds_the_scores_and_its_index_does_not() -> None:
    sparse = coefficients(read_config({"model_type": "deepseek_v32"}))
    growth = decode_token_flops(sparse, 50_001) - decode_token_flops(sparse, 50_000)
    assert growth == 61 * 2 * 64 * 128


def test_one_output_token_needs_no_decode() -> None:
    for output in (0, 1):
        assert decode_flops(LLAMA_8B, 100, output) == 0


def test_cached_tokens_are_attended_to_but_not_computed() -> None:
    cold, warm = prefill_flops(LLAMA_8B, 2000), prefill_flops(LLAMA_8B, 2000, cached=1000)
    assert cold - warm == chunk_flops(LLAMA_8B, 1000)


@given(MODELS, LENGTHS, st.lists(st.integers(0, 5000), max_size=5))
def test_a_prefill_needs_the_same_flops_in_any_chunks(
    model: Coefficients, cached: int, chunks: list[int]
) -> None:
    done = [cached + sum(chunks[:place]) for place in range(len(chunks))]
    pieces = [chunk_flops(model, new, before) for new, before in zip(chunks, done, strict=True)]
    assert sum(pieces) == chunk_flops(model, sum(chunks), cached)


@given(MODELS, LENGTHS, st.integers(1, 500), st.integers(1, 500))
def test_flops_of_a_decode_are_the_sum_of_its_tokens(
    model: Coefficients, prompt: int, first: int, second: int
) -> None:
    longer = decode_flops(model, prompt, first + second)
    assert longer == decode_flops(model, prompt, first) + decode_flops(
        model, prompt + first - 1, second + 1
    )


@given(MODELS, st.integers(1, 20_000), st.integers(0, 5000))
def test_more_tokens_need_more_flops(model: Coefficients, prompt: int, output: int) -> None:
    assert prefill_flops(model, prompt + 1) > prefill_flops(model, prompt)
    assert decode_flops(model, prompt, output + 2) > decode_flops(model, prompt, output + 1)
    assert decode_token_flops(model, prompt + 1) >= decode_token_flops(model, prompt)


@given(MODELS, st.integers(1, 20_000), st.data())
def test_a_cached_prefix_never_adds_flops(
    model: Coefficients, prompt: int, data: st.DataObject
) -> None:
    cached = data.draw(st.integers(0, prompt))
    assert prefill_flops(model, prompt, cached) <= prefill_flops(model, prompt)
