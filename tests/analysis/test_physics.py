"""FLOPs and bytes of models by hand, and the roofline."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.analysis.physics import (
    Bound,
    Coefficients,
    LayerAttention,
    Roof,
    attended_pairs,
    bound,
    cached_tokens,
    chunk_flops,
    coefficients,
    decode_flops,
    decode_kv_bytes,
    decode_token_flops,
    expert_bytes,
    gpu_weight_bytes,
    kv_bytes,
    kv_bytes_per_token,
    position,
    prefill_flops,
    prefill_kv_bytes,
    requests_that_fit,
    step_weight_bytes,
    weight_bytes,
)
from agent.records.model import Parallelism, Reach, Work
from tests.sources.model_config.published import published, read_config

WINDOWS = st.none() | st.integers(1, 5000)
LENGTHS = st.integers(0, 20_000)


@st.composite
def attentions(draw: st.DrawFn) -> LayerAttention:
    """Attention of some layers, expanded or latent, with or without a window."""
    heads = draw(st.integers(1, 16))
    return LayerAttention(
        layers=draw(st.integers(1, 40)),
        window=draw(WINDOWS),
        kv_heads=heads,
        token_bytes=heads * draw(st.integers(1, 256)),
        prefill_flops_per_pair=draw(st.integers(1, 10_000)),
        decode_flops_per_pair=draw(st.integers(1, 10_000)),
    )


MODELS = st.builds(
    Coefficients,
    linear_parameters=st.integers(1, 10**12),
    head_parameters=st.integers(1, 10**10),
    attentions=st.lists(attentions(), min_size=1, max_size=3).map(tuple),
)


@given(st.integers(0, 60), st.integers(0, 60), st.none() | st.integers(1, 70))
def test_each_token_attends_to_itself_and_to_earlier_tokens_in_the_window(
    new: int, cached: int, window: int | None
) -> None:
    contexts = range(cached + 1, cached + new + 1)
    bounded = [context if window is None else min(context, window) for context in contexts]
    assert attended_pairs(new, cached, window) == sum(bounded)


@given(LENGTHS, LENGTHS, LENGTHS, WINDOWS)
def test_the_pairs_of_a_prompt_are_the_sum_of_its_chunks(
    first: int, second: int, cached: int, window: int | None
) -> None:
    chunks = attended_pairs(first, cached, window) + attended_pairs(second, cached + first, window)
    assert chunks == attended_pairs(first + second, cached, window)


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 20))
def test_a_token_in_a_chunk_attends_to_itself_and_to_earlier_tokens_of_its_chunk(
    new: int, cached: int, size: int
) -> None:
    """As in `create_chunked_causal_mask` of transformers: same quotient, and not later."""
    pairs = sum(
        1
        for token in range(cached, cached + new)
        for other in range(token + 1)
        if other // size == token // size
    )
    assert attended_pairs(new, cached, size, Reach.CHUNK) == pairs
    kept = [other for other in range(cached) if other // size == (cached - 1) // size]
    assert cached_tokens(cached, size, Reach.CHUNK) == len(kept)


@given(LENGTHS, st.integers(1, 5000))
def test_a_selection_bounds_the_pairs_and_not_the_cache(context: int, selected: int) -> None:
    assert cached_tokens(context, selected, Reach.SELECTION) == context
    assert attended_pairs(1, context, selected, Reach.SELECTION) == min(context + 1, selected)


LLAMA_8B = coefficients(published("llama-3.1-8b"))
DEEPSEEK = coefficients(published("deepseek-v3"))


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


def test_only_the_layers_with_a_window_are_bounded_by_it() -> None:
    oss = coefficients(published("gpt-oss-20b"))
    increase = decode_token_flops(oss, 2001) - decode_token_flops(oss, 2000)
    assert increase == 12 * 4 * 64 * 64


def test_a_selection_bounds_the_scores_and_its_index_does_not() -> None:
    sparse = coefficients(read_config({"model_type": "deepseek_v32"}))
    increase = decode_token_flops(sparse, 50_001) - decode_token_flops(sparse, 50_000)
    assert increase == 61 * 2 * 64 * 128


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


# Qwen3-Next: 36 layers with a state, and 12 with 2 KV heads of 256.
QWEN3_NEXT = coefficients(read_config({"model_type": "qwen3_next", "dtype": "bfloat16"}))
# 32 heads with a matrix of 128 x 128, and the last 3 inputs of a convolution over 8,192 channels.
NEXT_STATE = 36 * 2 * (32 * 128 * 128 + 3 * 8192)
NEXT_TOKEN = 12 * 2 * 2 * 256 * 2
GEMMA = coefficients(published("gemma-3-27b"))
GEMMA_LAYER = 2 * 16 * 128 * 2
SCOUT = coefficients(read_config({"model_type": "llama4_text", "dtype": "bfloat16"}))
SCOUT_LAYER = 2 * 8 * 128 * 2
V32 = coefficients(read_config({"model_type": "deepseek_v32", "dtype": "bfloat16"}))
# vLLM's index: head_dim bytes, and a scale of 4 for each 128 of them.
V32_TOKEN = 61 * ((512 + 64) * 2 + 128 + 4)


@pytest.mark.parametrize(
    ("model", "context", "tensor", "cached_bytes"),
    [
        # Heads are divided until each GPU has one; a latent cache is whole on every GPU.
        (LLAMA_8B, 1000, 1, 131_072_000),
        (LLAMA_8B, 1000, 8, 131_072_000 / 8),
        (LLAMA_8B, 1000, 64, 131_072_000 / 8),
        (DEEPSEEK, 1000, 1, 1000 * 61 * (512 + 64) * 2),
        (DEEPSEEK, 1000, 8, 1000 * 61 * (512 + 64) * 2),
        (V32, 1000, 1, 1000 * V32_TOKEN),
        # Only the layers with a window are bounded by it.
        (GEMMA, 1000, 1, 62 * GEMMA_LAYER * 1000),
        (GEMMA, 10_000, 1, GEMMA_LAYER * (10 * 10_000 + 52 * 1024)),
        # The chunk of a token, and a quarter of the layers all.
        (SCOUT, 8192, 1, 48 * SCOUT_LAYER * 8192),
        (SCOUT, 8193, 1, 12 * SCOUT_LAYER * 8193 + 36 * SCOUT_LAYER),
        # A state is as large after one token as after a million.
        (QWEN3_NEXT, 1, 1, NEXT_STATE + NEXT_TOKEN),
        (QWEN3_NEXT, 1_000_000, 1, NEXT_STATE + NEXT_TOKEN * 1_000_000),
        (QWEN3_NEXT, 1, 2, (NEXT_STATE + NEXT_TOKEN) / 2),
    ],
)
def test_bytes_that_a_request_has_in_the_cache_of_a_gpu(
    model: Coefficients, context: int, tensor: int, cached_bytes: float
) -> None:
    assert kv_bytes(model, context, tensor) == cached_bytes


def test_each_output_token_reads_and_writes_the_state() -> None:
    moved = decode_kv_bytes(QWEN3_NEXT, 1000, 11)
    assert moved == NEXT_TOKEN * (sum(range(1001, 1011)) + 10) + 2 * 10 * NEXT_STATE
    assert prefill_kv_bytes(QWEN3_NEXT, 10) == NEXT_TOKEN * 20 + NEXT_STATE
    assert prefill_kv_bytes(QWEN3_NEXT, 10, 1000) == NEXT_TOKEN * 1020 + 2 * NEXT_STATE


def test_a_token_reads_the_selected_latents_and_the_index_of_all() -> None:
    read = decode_kv_bytes(V32, 100_000, 2) - kv_bytes_per_token(V32)
    assert read == 61 * (2048 * (512 + 64) * 2 + 100_001 * 132)


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


# Weights


def test_a_step_reads_all_matrices_and_the_output_matrix_but_no_input_embedding() -> None:
    for tokens in (1, 4096):
        read = step_weight_bytes(published("llama-3.1-8b"), tokens)
        assert read / 1e9 == pytest.approx(15.01, abs=0.005)
    tied = published("llama-3.2-1b")
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


LLAMA_70B = published("llama-3.1-70b")
QWEN_MOE = published("qwen3-235b-a22b")
WAYS = st.sampled_from([1, 2, 4, 8])


@given(WAYS, WAYS)
def test_tensor_and_pipeline_parallelism_divide_all_weights(tensor: int, pipeline: int) -> None:
    for model in (LLAMA_70B, QWEN_MOE):
        spread = Parallelism(tensor=tensor, pipeline=pipeline)
        assert gpu_weight_bytes(model, spread) * spread.gpus == pytest.approx(weight_bytes(model))


def test_each_replica_holds_a_dense_model_and_experts_are_shared() -> None:
    replicas = Parallelism(data=4)
    assert gpu_weight_bytes(LLAMA_70B, replicas) == weight_bytes(LLAMA_70B)
    shared = weight_bytes(QWEN_MOE) - expert_bytes(QWEN_MOE)
    assert gpu_weight_bytes(QWEN_MOE, replicas) == pytest.approx(
        shared + expert_bytes(QWEN_MOE) / 4
    )


@pytest.mark.parametrize(
    ("spread", "cache_bytes", "fitting"),
    [
        # 327,680 bytes a token and so 1.31 GB a request, on each GPU divided by at most 8 heads.
        (Parallelism(), 9.8e9, 7),
        (Parallelism(tensor=2), 9.8e9, 14),
        (Parallelism(tensor=16), 9.8e9, 59),
        (Parallelism(tensor=2, pipeline=2, data=3), 9.8e9, 87),
        (Parallelism(), 1e6, 0),
        (Parallelism(), -5e9, 0),
    ],
)
def test_how_many_requests_fit_into_the_cache(
    spread: Parallelism, cache_bytes: float, fitting: int
) -> None:
    sums = coefficients(LLAMA_70B)
    assert requests_that_fit(sums, 4000, spread, cache_bytes=cache_bytes) == fitting


@pytest.mark.parametrize("way", ["tensor", "pipeline", "data"])
def test_a_model_is_spread_over_at_least_one_gpu(way: str) -> None:
    with pytest.raises(ValueError, match=f"{way} parallelism is 0"):
        Parallelism(**{way: 0})


H100 = Roof(989.4e12, 3.35e12)
AMOUNTS = st.floats(1e6, 1e18)


def test_the_ridge_is_where_both_roofs_meet() -> None:
    assert H100.ridge == pytest.approx(295.3, abs=0.1)
    assert H100.attainable_flops_per_s(H100.ridge) == pytest.approx(H100.flops_per_s)
    assert H100.attainable_flops_per_s(1) == H100.bytes_per_s


# Gemma 3n: 15 of its 35 layers have no keys and values of their own.

GEMMA_3N = {"model_type": "gemma3n_text", "layer_types": ["full_attention"] * 35}
LAYER_BYTES = 2 * 2 * 256 * 2


def test_layers_without_a_cache_of_their_own_read_that_of_others() -> None:
    model = coefficients(read_config(GEMMA_3N))
    assert kv_bytes(model, 1000) == 20 * LAYER_BYTES * 1000
    # A step reads the cache in each layer, and writes one token in 20.
    assert decode_kv_bytes(model, 1000, 2) == (35 * 1001 + 20) * LAYER_BYTES
    assert prefill_kv_bytes(model, 1000) == (20 * 2 + 15) * 1000 * LAYER_BYTES


def test_a_step_does_not_read_embeddings_of_layers() -> None:
    model = read_config(GEMMA_3N)
    table = 262_144 * 35 * 256 * 2
    assert step_weight_bytes(model, 1) == pytest.approx(weight_bytes(model) - table, rel=1e-3)


@pytest.mark.parametrize(
    ("work", "cache_full", "found"),
    [
        (Work(1e9, 1e9), False, Bound.BANDWIDTH),
        (Work(1e9, 1e9), True, Bound.CAPACITY),
        (Work(1e12, 1e9), False, Bound.COMPUTE),
        (Work(1e12, 1e9), True, Bound.COMPUTE),
        (Work(H100.ridge * 1e9, 1e9), False, Bound.COMPUTE),
        (Work(1e9, 0), False, None),
    ],
)
def test_below_the_ridge_the_bound_is_bandwidth_or_capacity_with_a_full_cache(
    work: Work, cache_full: bool, found: Bound | None
) -> None:
    assert bound(work, H100, cache_full=cache_full) is found


@pytest.mark.parametrize(("work", "seconds"), [(Work(0, 1e9), 1.0), (Work(1e9, 1e9), 0.0)])
def test_work_without_flops_or_time_has_no_position(work: Work, seconds: float) -> None:
    assert position(work, seconds, H100) is None


def test_a_position_has_the_share_of_the_attainable_flops() -> None:
    found = position(Work(100e12, 1e12), 0.5, H100)
    assert found is not None
    assert found.intensity == 100
    assert found.achieved_flops_per_s == 200e12
    assert found.attainable_flops_per_s == pytest.approx(335e12)
    assert found.share == pytest.approx(200 / 335)


@given(AMOUNTS, AMOUNTS)
def test_work_done_in_its_least_time_reaches_the_roof(flops: float, moved: float) -> None:
    work = Work(flops, moved)
    found = position(work, H100.seconds(work), H100)
    assert found is not None
    assert found.share == pytest.approx(1)
