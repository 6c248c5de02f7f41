"""Shapes that are read here against the modules that transformers builds of the same configs."""

import json
from collections import Counter
from functools import cache
from importlib.resources import files
from typing import Any

import pytest

from agent.analysis.physics import coefficients, parameters
from agent.catalog.architectures import ARCHITECTURES
from agent.records.model import ModelShape
from agent.sources.model_config.config import RENAMES, TextConfig
from tests.real_parts.engine_scripts import answer_of
from tests.sources.model_config.configurations import configurations
from tests.sources.model_config.published import PUBLISHED, read_config

CONFIGURATIONS = configurations()
SCRIPT = "run_model_classes.py"

# Without a list of layers, all of their layers slide where there is a window.
SLIDING = {"mistral", "mixtral", "phi3"}

KINDS = sorted({str(config["model_type"]) for config in CONFIGURATIONS.values()})

# One test for all configurations of a kind: there are hundreds.
every_kind = pytest.mark.parametrize("kind", KINDS)


def names_of(kind: str) -> list[str]:
    return [name for name, config in CONFIGURATIONS.items() if config["model_type"] == kind]


@cache
def found_there() -> dict[str, Any]:
    """The `defaults` of the classes, and what the modules of every configuration hold."""
    asked = {
        "configs": CONFIGURATIONS,
        "types": sorted({row.class_of or name for name, row in ARCHITECTURES.items()}),
        "keys": sorted(known_keys()),
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
    reach = {"full_attention": None, "sliding_attention": window, "chunked_attention": 8192}
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


@every_kind
def test_a_model_has_the_parameters_of_its_modules(kind: str) -> None:
    for name in names_of(kind):
        assert parameters(shape(name)) == built(name)["parameters"], name


@every_kind
def test_a_model_that_transformers_saved_again_is_the_same(kind: str) -> None:
    for name in names_of(kind):
        assert parameters(read_config(built(name)["saved"])) == built(name)["parameters"], name


@every_kind
def test_a_token_is_multiplied_with_the_matrices_that_it_passes(kind: str) -> None:
    for name in names_of(kind):
        found, ours = built(name), coefficients(shape(name))
        assert ours.linear_parameters == pytest.approx(found["linear"], rel=1e-12), name
        assert ours.head_parameters == found["head"], name


@every_kind
def test_a_token_caches_the_keys_and_values_of_its_modules(kind: str) -> None:
    """Modules of latent attention have none of their own."""
    for name in names_of(kind):
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
        )
        assert cached == found["cached_values"], name


@every_kind
def test_each_layer_attends_as_far_as_its_class_lets_it(kind: str) -> None:
    for name in names_of(kind):
        found, model = built(name), shape(name)
        if found["attention_layers"]:
            assert windows(model) == layers_windows(name, found), name


@every_kind
def test_a_layer_with_a_state_stores_what_the_engine_makes_room_for(kind: str) -> None:
    """Nemotron's class has its state in 32 bits."""
    for name in names_of(kind):
        states = built(name)["states"]
        width = 32 if CONFIGURATIONS[name]["model_type"] == "nemotron_h" else 16
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
