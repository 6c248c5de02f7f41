"""FLOPs of recurrent states against torch's counter on transformers' own chunked algorithms.

A chunk of C tokens takes a fixed part, a part for each token and a part for each pair in it. The
second is the recurrence's own work, which is ours; the third is what an engine spends more to have
products of matrices, so that it depends on the engine's chunks.
"""

import pytest

from agent.analysis.physics.coefficients import coefficients
from tests.real_parts.engine_scripts import answer_of
from tests.sources.model_config.published import read_config

# Equally spaced, for the differences below.
CHUNKS = (64, 128, 192)
# Its class has no layers by default.
LAYERS = {"nemotron_h": {"hybrid_override_pattern": "M*", "num_hidden_layers": 2}}


@pytest.fixture(scope="module")
def counted() -> dict[str, list[int]]:
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
    model = read_config({"model_type": model_type, **LAYERS.get(model_type, {})})
    layers = sum(group.layers for group in model.groups if group.state is not None)
    return coefficients(model).state_flops / layers


@pytest.mark.parametrize("model_type", ["qwen3_next", "nemotron_h"])
def test_flops_of_a_state_are_those_of_the_recurrence(
    counted: dict[str, list[int]], model_type: str
) -> None:
    recurrence, _ = by_token(counted[model_type])
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
    counted: dict[str, list[int]], model_type: str, chunk: int, times: float
) -> None:
    recurrence, by_pair = by_token(counted[model_type])
    assert (recurrence + by_pair * chunk) / recurrence == pytest.approx(times, rel=0.01)
