"""The `estimate` command, called as a user does."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from agent.errors import AgentError
from agent.estimating import estimate
from agent.sources.model_config import ArchitectureUnknown
from tests.sources.model_config.published import PUBLISHED

Call = Callable[..., Result]


@pytest.fixture
def call(tmp_path: Path) -> Call:
    """The command with a published model's config.json before the given options."""
    app = typer.Typer()
    app.command()(estimate)

    def called(model: str, *options: str) -> Result:
        file = tmp_path / "config.json"
        file.write_text(json.dumps(PUBLISHED[model]["config"]))
        return CliRunner().invoke(app, [str(file), *options])

    return called


def estimate_of(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    estimated: dict[str, Any] = json.loads(result.output)
    return estimated


def test_the_json_has_null_for_unknown_values(call: Call) -> None:
    estimated = estimate_of(call("llama-3.1-8b", "--json"))
    assert estimated["kv_bytes_per_token"] == 131_072
    for unknown in ("max_concurrent_requests", "min_ttft_s", "min_tpot_s"):
        assert estimated[unknown] is None
    assert estimated["note"].startswith("an estimate")


def test_the_options_name_the_deployment(call: Call) -> None:
    options = ("--gpu", "H100-SXM", "--tp", "2", "--context", "8192", "--dtype", "fp8")
    estimated = estimate_of(call("llama-3.1-8b", *options, "--json"))
    assert estimated["gpus"] == 2
    assert estimated["weight_bytes"] < 9.1e9
    assert estimated["min_ttft_s"] == pytest.approx(estimated["prefill_flops"] / 2 / 1978.9e12)
    assert estimated["max_concurrent_requests"] > 100


def test_options_say_how_much_memory_requests_have(call: Call) -> None:
    deployment = ("llama-3.1-70b", "--gpu", "H200-SXM", "--pp", "2", "--dp", "2", "--json")
    usual = estimate_of(call(*deployment))
    fitting = usual["max_concurrent_requests"]
    narrow = estimate_of(call(*deployment, "--kv-dtype", "fp8"))
    assert narrow["kv_bytes_per_token"] == usual["kv_bytes_per_token"] / 2
    assert narrow["max_concurrent_requests"] in range(2 * fitting, 2 * fitting + 3)
    half = estimate_of(call(*deployment, "--memory-fraction", "0.5"))
    assert half["max_concurrent_requests"] < fitting
    # vLLM's own default.
    assert usual == estimate_of(call(*deployment, "--memory-fraction", "0.92"))


def test_the_table_has_the_same_figures_and_names_them_an_estimate(call: Call) -> None:
    result = call("llama-3.1-8b", "--gpu", "H100-SXM")
    assert result.exit_code == 0
    for words in ("8.03 G", "16.06 GB", "131.07 kB", "131.94 TFLOP", "bandwidth-bound"):
        assert words in result.output
    text = " ".join(result.output.split())
    assert "memory-capacity-bound: keep the KV cache in FP8" in text
    assert "an estimate from the model's shape" in text


def test_the_table_shows_unknown_values_as_unknown(call: Call) -> None:
    lines = call("llama-3.1-8b").output.splitlines()
    for row in ("best TTFT", "best TPOT", "that fit", "memory of a GPU", "decode of one request"):
        (line,) = [line for line in lines if row in line]
        assert "unknown" in line


def test_the_files_of_an_unknown_architecture_tell_its_parameters_and_bytes(tmp_path: Path) -> None:
    config = {**PUBLISHED["llama-3.1-8b"]["config"], "model_type": "strange"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    app = typer.Typer()
    app.command()(estimate)
    refused = CliRunner().invoke(app, [str(tmp_path)])
    assert isinstance(refused.exception, ArchitectureUnknown)
    index = {"metadata": {"total_size": 16_060_522_496}, "weight_map": {"lm_head.weight": "a"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    estimated = estimate_of(CliRunner().invoke(app, [str(tmp_path), "--json"]))
    assert estimated["parameters"] == 8_030_261_248
    assert estimated["weight_bytes"] == 16_060_522_496
    unknown = ("active_parameters", "kv_bytes_per_token", "prefill_flops", "min_tpot_s")
    assert {estimated[key] for key in unknown} == {None}
    assert "from the index of its files" in estimated["remarks"][0]
    shown = CliRunner().invoke(app, [str(tmp_path)]).output
    assert "16.06 GB" in shown
    # A format that the engine makes of the weights is not that of the files.
    assert CliRunner().invoke(app, [str(tmp_path), "--dtype", "fp8"]).exit_code != 0


def test_given_figures_override_the_tables_and_describe_a_gpu_without_a_row(call: Call) -> None:
    known = ("--gpu", "H100-SXM", "--json")
    table = estimate_of(call("llama-3.1-8b", *known))
    faster = estimate_of(call("llama-3.1-8b", *known, "--bandwidth-gb-per-s", "6700"))
    assert faster["min_tpot_s"] == pytest.approx(table["min_tpot_s"] / 2)
    assert faster["gpu"] == "H100-SXM"
    figures = ("--peak-tflops", "148", "--bandwidth-gb-per-s", "4000", "--memory-gb", "96")
    estimated = estimate_of(call("llama-3.1-8b", "--gpu", "H20-3e", *figures, "--json"))
    assert estimated["gpu"] == "H20-3e"
    assert estimated["gpu_memory_bytes"] == 96e9
    assert estimated["min_ttft_s"] == pytest.approx(estimated["prefill_flops"] / 148e12)
    assert estimate_of(call("llama-3.1-8b", *figures, "--json"))["gpu"] == "given"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gpu", "H100"), "the GPU 'H100' is unknown; did you mean H100-SXM, H100-PCIe or"),
        (("--gpu", "H20-3e"), "the GPU 'H20-3e' is unknown; --gpu knows H100-SXM"),
        (("--memory-gb", "80"), "the GPU has no name.*--peak-tflops"),
    ],
)
def test_an_unknown_gpu_is_refused_with_the_known_ones_and_the_options(
    call: Call, options: tuple[str, ...], message: str
) -> None:
    result = call("llama-3.1-8b", *options)
    assert isinstance(result.exception, AgentError)
    with pytest.raises(AgentError, match=message):
        raise result.exception


def test_an_unknown_architecture_is_an_error_with_a_name(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "falcon_mamba"}')
    app = typer.Typer()
    app.command()(estimate)
    result = CliRunner().invoke(app, [str(file)])
    assert isinstance(result.exception, ArchitectureUnknown)
    assert result.exception.name == "falcon_mamba"


@pytest.mark.parametrize("option", ["--tp", "--pp", "--dp", "--context"])
def test_counts_of_zero_are_refused(call: Call, option: str) -> None:
    assert call("llama-3.1-8b", option, "0").exit_code == 2


@pytest.mark.parametrize("number", ["inf", "nan", "1e308", "9" * 400])
@pytest.mark.parametrize(
    "option",
    [
        *("--tp", "--pp", "--dp", "--context"),
        *("--peak-tflops", "--bandwidth-gb-per-s", "--memory-gb", "--memory-fraction"),
    ],
)
def test_numbers_beyond_any_machine_are_refused(call: Call, option: str, number: str) -> None:
    assert call("llama-3.1-8b", "--gpu", "H100-SXM", option, number).exit_code == 2


def test_the_largest_numbers_are_estimated(call: Call) -> None:
    largest = ("--tp", "10000", "--pp", "10000", "--dp", "10000", "--context", "100000000")
    assert (
        estimate_of(call("llama-3.1-8b", "--gpu", "H100-SXM", *largest, "--json"))["gpus"] == 1e12
    )
