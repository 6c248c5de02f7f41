"""Shapes that are read here against the modules that transformers builds of the same configs."""

import json
from collections import Counter
from functools import cache
from importlib.resources import files
from typing import Any

import pytest

from agent.analysis.physics import chunk_flops, coefficients, decode_token_flops, parameters
from agent.catalog.architectures import ARCHITECTURES
from agent.records.model import ModelShape
from agent.sources.model_config.config import RENAMES, TextConfig
from tests.real_parts.engine_scripts import answer_of
from tests.sources.model_config.configurations import CONFIGURATIONS
from tests.sources.model_config.published import PUBLISHED, published, read_config

SCRIPT = "run_model_classes.py"

# Without a list of layers, all of their layers slide where there is a window.
SLIDING = {"mistral", "mixtral", "phi3"}


@cache
def found_there() -> dict[str, Any]:
    """The `defaults` of the classes, and what the modules of every configuration hold."""
    asked = {
        "configs": CONFIGURATIONS,
        "types": sorted({row.class_of or name for name, row in ARCHITECTURES.items()}),
        "keys": sorted(known_keys()),
        # The configuration is the class's own.
        "latent": {
            "config": {"model_type": "deepseek_v3"},
            "prefills": PREFILLS,
            "contexts": CONTEXTS,
            "selected": SELECTED,
        },
        "chunks": CHUNKS,
    }
    found: dict[str, Any] = answer_of(SCRIPT, asked)
    return found


def built(name: str) -> dict[str, Any]:
    found: dict[str, Any] = found_there()["models"][name]
    assert "refused" not in found, found
    return found


@cache
def shape(name: str) -> ModelShape:
    return read_config(CONFIGURATIONS[name])


def windows(model: ModelShape) -> Counter[int | None]:
    """How many layers attend how far."""
    counted: Counter[int | None] = Counter()
    for group in model.groups:
        for attention in group.attentions[:1]:
            counted[attention.window] += group.layers
    return counted


def layers_windows(name: str, found: dict[str, Any]) -> Counter[int | None]:
    """The same by the class's list of layers."""
    config = CONFIGURATIONS[name]
    model_type = config.get("text_config", config)["model_type"]
    window = found["sliding_window"] or None
    if found["layer_types"] is None:
        return Counter({window if model_type in SLIDING else None: found["layers"]})
    reach = {
        "full_attention": None,
        "hybrid": None,
        "sliding_attention": window,
        "chunked_attention": 8192,
        "minimax_m3_sparse": 16 * 128,
    }
    kinds = [kind for kind in found["layer_types"] if kind in reach]
    return Counter(reach[kind] for kind in kinds)


# Configurations


def test_the_generated_defaults_are_those_of_the_classes() -> None:
    """Otherwise write what this prints to agent/catalog/model_classes.json."""
    found = found_there()["defaults"]
    ours = json.loads(files("agent.catalog").joinpath("model_classes.json").read_text())
    assert ours == found, as_file(found)


def known_keys() -> set[str]:
    """Every key that any class may have, by its name there."""
    fields = {field.alias or name for name, field in TextConfig.model_fields.items()}
    return fields | RENAMES.keys() | {key for row in ARCHITECTURES.values() for key in row.renames}


def as_file(found: dict[str, Any]) -> str:
    """The content of model_classes.json: one line for each class."""
    sections = [
        f' "{section}": {{\n'
        + ",\n".join(
            f"  {json.dumps(name)}: {json.dumps(row, sort_keys=True)}"
            for name, row in sorted(found[section].items())
        )
        + "\n }"
        for section in ("classes", "wrappers")
    ]
    return "{\n" + ",\n".join(sections) + "\n}\n"


# Modules


def test_a_model_has_the_parameters_of_its_modules() -> None:
    theirs = {name: built(name)["parameters"] for name in CONFIGURATIONS}
    assert {name: parameters(shape(name)) for name in CONFIGURATIONS} == theirs
    saved = {name: read_config(built(name)["saved"]) for name in CONFIGURATIONS}
    assert {name: parameters(model) for name, model in saved.items()} == theirs


def test_a_token_is_multiplied_with_the_matrices_that_it_passes() -> None:
    for name in CONFIGURATIONS:
        found, ours = built(name), coefficients(shape(name))
        assert ours.linear_parameters == pytest.approx(found["linear"], rel=1e-12), name
        assert ours.head_parameters == found["head"], name


def test_a_token_caches_the_keys_and_values_of_its_modules() -> None:
    """Modules of latent attention have none of their own."""
    for name in CONFIGURATIONS:
        found, model = built(name), shape(name)
        if found["attention_layers"] == 0:
            assert all(
                attention.kv_heads == 1 for group in model.groups for attention in group.attentions
            )
            continue
        cached = sum(
            group.layers * attention.kv_heads * attention.values_per_kv_head
            for group in model.groups
            for attention in group.attentions
            if attention.stores
        )
        assert cached == found["cached_values"], name


def test_each_layer_attends_as_far_as_its_class_lets_it() -> None:
    for name in CONFIGURATIONS:
        found, model = built(name), shape(name)
        if found["attention_layers"]:
            assert windows(model) == layers_windows(name, found), name


def test_a_layer_with_a_state_stores_what_the_engine_makes_room_for() -> None:
    """Nemotron's class has its state in 32 bits, and so have engines that of Kimi-Linear."""
    for name, config in CONFIGURATIONS.items():
        states = built(name)["states"]
        width = 32 if config["model_type"] in ("nemotron_h", "kimi_linear") else 16
        bits = sum(16 * state["conv"] + width * state["state"] for state in states)
        ours = [
            (group.layers, group.state) for group in shape(name).groups if group.state is not None
        ]
        assert sum(layers for layers, _ in ours) == len(states), name
        assert sum(layers * state.bits for layers, state in ours) == bits, name


# Figures


def test_the_wrapper_says_whether_qwen3_vl_ties_its_embeddings() -> None:
    """As transformers writes Qwen3-VL-30B-A3B: 30.53 billion, and not 30.22."""
    text = {**PUBLISHED["qwen3-30b-a3b"]["config"], "model_type": "qwen3_vl_moe_text"}
    saved = {
        "model_type": "qwen3_vl_moe",
        "text_config": {**text, "tie_word_embeddings": True},
        "tie_word_embeddings": False,
    }
    assert parameters(read_config(saved)) == PUBLISHED["qwen3-30b-a3b"]["parameters"]


# FLOPs

# New tokens of a prompt after cached ones, and contexts of a decoded token.
PREFILLS = (
    *((1000, 0), (1000, 30_000), (200, 8_000)),
    # On both sides of a selection of 2048 tokens.
    *((2048, 0), (48, 2000), (49, 2000), (200, 2048)),
)
CONTEXTS = (1000, 30_000, 2048)
DEPTH = 61

MODEL = published("deepseek-v3")
DEEPSEEK_MODEL = coefficients(MODEL)
ATTENTION_PARAMETERS = sum(
    block.parameters for block in MODEL.groups[0].blocks if block.name.startswith("self_attn.")
)
OTHERS = DEEPSEEK_MODEL.linear_parameters - DEPTH * ATTENTION_PARAMETERS

# DeepSeek-V3.2: the same attention, to the tokens that an index selects.
SELECTING = coefficients(read_config({"model_type": "deepseek_v32"}))
(SELECTED,) = {part.window for part in SELECTING.attentions} - {None}
OTHERS_SELECTING = SELECTING.linear_parameters - DEPTH * ATTENTION_PARAMETERS
INDEX_PAIR = 2 * 64 * 128


@pytest.fixture
def counted() -> dict[str, Any]:
    """FLOPs of one layer's attention of DeepSeek-V3, by torch's counter."""
    found: dict[str, Any] = found_there()["latent"]
    return found


@pytest.mark.parametrize("case", range(len(PREFILLS)))
def test_a_prefill_expands_the_latents_of_its_cached_tokens(
    counted: dict[str, Any], case: int
) -> None:
    """torch multiplies the masked pairs too, which a causal kernel leaves out."""
    new, cached = PREFILLS[case]
    masked = 2 * 128 * (192 + 128) * new * (new - 1) // 2
    ours = chunk_flops(DEEPSEEK_MODEL, new, cached) - 2 * OTHERS * new
    assert ours == DEPTH * (counted["prefill"][case] - masked)


@pytest.mark.parametrize("case", range(len(CONTEXTS)))
def test_a_decoded_token_attends_to_the_latents_themselves(
    counted: dict[str, Any], case: int
) -> None:
    ours = decode_token_flops(DEEPSEEK_MODEL, CONTEXTS[case])
    others = 2 * (OTHERS + DEEPSEEK_MODEL.head_parameters)
    assert ours - others == DEPTH * counted["decode"][case]


@pytest.mark.parametrize("case", range(len(PREFILLS)))
def test_a_prefill_by_selection_is_expanded_where_vllm_expands_it(
    counted: dict[str, Any], case: int
) -> None:
    """Else each token attends to the latents of the selected ones, as torch counts in decode."""
    new, cached = PREFILLS[case]
    index = INDEX_PAIR * (new * cached + new * (new + 1) // 2)
    ours = chunk_flops(SELECTING, new, cached) - 2 * OTHERS_SELECTING * new - DEPTH * index
    if counted["engine_expands"][case]:
        masked = 2 * 128 * (192 + 128) * new * (new - 1) // 2
        assert ours == DEPTH * (counted["prefill"][case] - masked)
    else:
        by_token = (counted["decode"][0] - counted["decode"][2]) // (CONTEXTS[0] - CONTEXTS[2])
        contexts = [min(cached + token, 2048) for token in range(1, new + 1)]
        full = counted["decode"][2]
        assert ours == DEPTH * sum(full - by_token * (2048 - context) for context in contexts)


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


def counted_by_hand(model_type: str) -> tuple[float, float]:
    """The FLOPs of one layer's state for each token of a chunk, and for each pair of tokens."""
    one, two, three = found_there()["recurrent"][model_type]
    step = CHUNKS[1] - CHUNKS[0]
    by_pair = (three - 2 * two + one) / (2 * step**2)
    return (two - one) / step - by_pair * (CHUNKS[0] + CHUNKS[1]), by_pair


@pytest.mark.parametrize(
    ("model_type", "chunk", "times"),
    [
        # FLA_CHUNK_SIZE of vLLM 0.32, and the model's own chunk_size.
        ("qwen3_next", 64, 1.5),
        ("nemotron_h", 128, 2.5),
    ],
)
def test_flops_of_a_state_are_those_of_the_recurrence(
    model_type: str, chunk: int, times: float
) -> None:
    """An engine spends more, on the pairs of a chunk."""
    model = read_config({"model_type": model_type, **RECURRENT_LAYERS.get(model_type, {})})
    layers = sum(group.layers for group in model.groups if group.state is not None)
    recurrence, by_pair = counted_by_hand(model_type)
    assert coefficients(model).state_flops / layers == recurrence
    assert (recurrence + by_pair * chunk) / recurrence == pytest.approx(times, rel=0.01)
