"""Shapes read from published configurations against the figures that were published with them."""

import pytest

from agent.analysis.physics.coefficients import active_parameters, parameters, weight_bytes
from tests.sources.model_config.published import PUBLISHED, published

WITHIN = 0.005

every_model = pytest.mark.parametrize("name", PUBLISHED)
with_rounded = pytest.mark.parametrize(
    "name", [name for name, model in PUBLISHED.items() if "rounded_parameters" in model]
)
with_active = pytest.mark.parametrize(
    "name", [name for name, model in PUBLISHED.items() if "active_parameters" in model]
)
with_bytes = pytest.mark.parametrize(
    "name", [name for name, model in PUBLISHED.items() if "weight_bytes" in model]
)


def test_enough_models_of_each_kind_are_compared_with_published_figures() -> None:
    kinds = {model["config"]["model_type"] for model in PUBLISHED.values()}
    assert len(PUBLISHED) >= 14
    assert {"llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral"} <= kinds
    assert {"deepseek_v3", "gpt_oss", "gemma2", "gemma3", "phi3"} <= kinds
    counted = [model["parameters_source"] for model in PUBLISHED.values()]
    assert sum(source.startswith("safetensors") for source in counted) >= 14


@every_model
def test_a_model_has_exactly_the_parameters_of_its_files_or_class(name: str) -> None:
    model = PUBLISHED[name]
    assert parameters(published(name)) == model["parameters"], model["parameters_source"]


@with_rounded
def test_a_model_has_the_parameters_that_its_makers_published(name: str) -> None:
    model = PUBLISHED[name]
    assert parameters(published(name)) == pytest.approx(model["rounded_parameters"], rel=WITHIN), (
        model["rounded_source"]
    )


@with_active
def test_a_model_of_experts_has_the_published_number_of_active_parameters(name: str) -> None:
    model = PUBLISHED[name]
    assert active_parameters(published(name)) == pytest.approx(
        model["active_parameters"], rel=model["active_within"]
    ), model["active_source"]


@every_model
def test_active_parameters_are_fewer_only_where_there_are_experts(name: str) -> None:
    shape = published(name)
    experts = any(block.copies > 1 for group in shape.groups for block in group.blocks)
    assert (active_parameters(shape) < parameters(shape)) is experts


@with_bytes
def test_quantised_weights_take_the_published_bytes(name: str) -> None:
    model = PUBLISHED[name]
    assert weight_bytes(published(name)) == pytest.approx(
        model["weight_bytes"], rel=model["weight_bytes_within"]
    ), model["weight_bytes_source"]


@every_model
def test_every_figure_names_its_source(name: str) -> None:
    model = PUBLISHED[name]
    assert model["source"].startswith("https://huggingface.co/")
    for figure, source in (
        ("parameters", "parameters_source"),
        ("rounded_parameters", "rounded_source"),
        ("active_parameters", "active_source"),
        ("weight_bytes", "weight_bytes_source"),
    ):
        assert figure not in model or model[source]


def test_deepseek_in_fp8_takes_a_byte_for_nearly_every_weight() -> None:
    assert weight_bytes(published("deepseek-v3")) == pytest.approx(671e9, rel=WITHIN)


def test_windows_are_in_the_layers_of_the_architecture() -> None:
    windows = {
        name: [
            (group.attentions[0].window, group.layers)
            for group in sorted(
                published(name).groups, key=lambda group: group.attentions[0].window or 0
            )
        ]
        for name in ("gemma-2-9b", "gemma-3-27b", "gpt-oss-20b", "mistral-7b-v0.1", "qwen2.5-7b")
    }
    assert windows == {
        "gemma-2-9b": [(None, 21), (4096, 21)],
        "gemma-3-27b": [(None, 10), (1024, 52)],
        "gpt-oss-20b": [(None, 12), (128, 12)],
        "mistral-7b-v0.1": [(4096, 32)],
        "qwen2.5-7b": [(None, 28)],
    }
