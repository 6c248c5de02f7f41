"""Shapes read from published configurations against the figures that were published with them."""

from collections.abc import Callable

import pytest

from agent.analysis.physics import active_parameters, parameters, weight_bytes
from agent.records.model import ModelShape
from tests.sources.model_config.published import PUBLISHED, published

WITHIN = 0.005

every_model = pytest.mark.parametrize("name", PUBLISHED)


@pytest.mark.parametrize(
    ("figure", "calculated", "source", "within"),
    [
        ("parameters", parameters, "parameters_source", 0.0),
        ("rounded_parameters", parameters, "rounded_source", WITHIN),
        ("active_parameters", active_parameters, "active_source", "active_within"),
        ("weight_bytes", weight_bytes, "weight_bytes_source", "weight_bytes_within"),
    ],
)
def test_models_have_their_published_figures(
    figure: str, calculated: Callable[[ModelShape], float], source: str, within: float | str
) -> None:
    for name, model in PUBLISHED.items():
        if figure in model:
            tolerance = model[within] if isinstance(within, str) else within
            expected = pytest.approx(model[figure], rel=tolerance, abs=0)
            assert calculated(published(name)) == expected, (name, model[source])


@every_model
def test_active_parameters_are_fewer_only_where_there_are_experts(name: str) -> None:
    shape = published(name)
    experts = any(block.copies > 1 for group in shape.groups for block in group.blocks)
    assert (active_parameters(shape) < parameters(shape)) is experts


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
