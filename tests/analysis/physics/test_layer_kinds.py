"""Models with latent attention, and with recurrent states."""

from typing import Any

import pytest

from agent.analysis.physics.coefficients import coefficients
from agent.analysis.physics.flops_and_bytes import chunk_flops, decode_token_flops
from tests.real_parts.engine_scripts import answer_of
from tests.sources.model_config.published import published, read_config

# New tokens of a prompt after cached ones, and contexts of a decoded token.
PREFILLS = (
    *((1000, 0), (1000, 30_000), (200, 8_000)),
    # On both sides of a selection of 2048 tokens.
    *((2048, 0), (48, 2000), (49, 2000), (200, 2048)),
)
CONTEXTS = (1000, 30_000, 2048)
LAYERS = 61

MODEL = published("deepseek-v3")
DEEPSEEK = coefficients(MODEL)
ATTENTION_PARAMETERS = sum(
    block.parameters for block in MODEL.groups[0].blocks if block.name.startswith("self_attn.")
)
OTHERS = DEEPSEEK.linear_parameters - LAYERS * ATTENTION_PARAMETERS

# DeepSeek-V3.2: the same attention, to the tokens that an index selects.
SELECTING = coefficients(read_config({"model_type": "deepseek_v32"}))
(SELECTED,) = {part.window for part in SELECTING.attentions} - {None}
OTHERS_SELECTING = SELECTING.linear_parameters - LAYERS * ATTENTION_PARAMETERS
INDEX_PAIR = 2 * 64 * 128


@pytest.fixture(scope="module")
def counted() -> dict[str, Any]:
    """FLOPs of one layer's attention of DeepSeek-V3, whose configuration is the class's own."""
    asked = {"config": {"model_type": "deepseek_v3"}, "prefills": PREFILLS, "contexts": CONTEXTS}
    found: dict[str, Any] = answer_of("run_latent_attention.py", {**asked, "selected": SELECTED})
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


@pytest.mark.parametrize("case", range(len(PREFILLS)))
def test_a_prefill_by_selection_is_expanded_where_vllm_expands_it(
    counted: dict[str, Any], case: int
) -> None:
    """Else each token attends to the latents of the selected ones, as torch counts in decode."""
    new, cached = PREFILLS[case]
    index = INDEX_PAIR * (new * cached + new * (new + 1) // 2)
    ours = chunk_flops(SELECTING, new, cached) - 2 * OTHERS_SELECTING * new - LAYERS * index
    if counted["engine_expands"][case]:
        masked = 2 * 128 * (192 + 128) * new * (new - 1) // 2
        assert ours == LAYERS * (counted["prefill"][case] - masked)
    else:
        by_token = (counted["decode"][0] - counted["decode"][2]) // (CONTEXTS[0] - CONTEXTS[2])
        contexts = [min(cached + token, 2048) for token in range(1, new + 1)]
        full = counted["decode"][2]
        assert ours == LAYERS * sum(full - by_token * (2048 - context) for context in contexts)


def test_vllm_expands_a_prefill_of_as_many_tokens_as_are_selected(counted: dict[str, Any]) -> None:
    assert counted["engine_expands"] == [True, False, False, True, True, False, False]


def test_vllm_counts_a_decoded_token_as_if_keys_and_values_were_cached(
    counted: dict[str, Any],
) -> None:
    """Its figure is a third of what its kernels do."""
    assert counted["decode"][1] > 3 * counted["engines_decode"][1]


# Equally spaced, for the differences below.
CHUNKS = (64, 128, 192)
# Its class has no layers by default.
RECURRENT_LAYERS = {"nemotron_h": {"hybrid_override_pattern": "M*", "num_hidden_layers": 2}}


@pytest.fixture(scope="module")
def counted_by_hand() -> dict[str, list[int]]:
    """FLOPs of one layer's state over one chunk of each length, by model type."""
    found: dict[str, list[int]] = answer_of("run_recurrent_states.py", {"chunks": CHUNKS})
    return found


def by_token(totals: list[int]) -> tuple[float, float]:
    """The FLOPs for each token of a chunk, and for each pair of tokens."""
    one, two, three = totals
    step = CHUNKS[1] - CHUNKS[0]
    by_pair = (three - 2 * two + one) / (2 * step**2)
    return (two - one) / step - by_pair * (CHUNKS[0] + CHUNKS[1]), by_pair


def ours(model_type: str) -> float:
    """The FLOPs of a token with the state of one recurrent layer, by our count."""
    model = read_config({"model_type": model_type, **RECURRENT_LAYERS.get(model_type, {})})
    layers = sum(group.layers for group in model.groups if group.state is not None)
    return coefficients(model).state_flops / layers


@pytest.mark.parametrize("model_type", ["qwen3_next", "nemotron_h"])
def test_flops_of_a_state_are_those_of_the_recurrence(
    counted_by_hand: dict[str, list[int]], model_type: str
) -> None:
    recurrence, _ = by_token(counted_by_hand[model_type])
    assert ours(model_type) == recurrence


@pytest.mark.parametrize(
    ("model_type", "chunk", "times"),
    [
        # FLA_CHUNK_SIZE of vLLM 0.32, and the model's own chunk_size.
        ("qwen3_next", 64, 1.5),
        ("nemotron_h", 128, 2.5),
    ],
)
def test_an_engine_spends_more_on_the_pairs_of_a_chunk(
    counted_by_hand: dict[str, list[int]], model_type: str, chunk: int, times: float
) -> None:
    recurrence, by_pair = by_token(counted_by_hand[model_type])
    assert (recurrence + by_pair * chunk) / recurrence == pytest.approx(times, rel=0.01)
