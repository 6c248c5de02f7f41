"""Reading a model's shape from disk."""

import json
import math
import os
import re
import struct
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.analysis.estimate import PlannedDeployment, estimate
from agent.analysis.physics import (
    active_parameters,
    coefficients,
    kv_bytes_per_token,
    parameters,
    weight_bytes,
)
from agent.catalog.architectures import ARCHITECTURES
from agent.catalog.hardware import Precision, find_gpu
from agent.errors import AgentError
from agent.records.model import ModelShape, Parallelism
from agent.settings.named_files import in_time
from agent.sources.model_config import (
    ArchitectureUnknown,
    CacheUnknown,
    ModelConfigInvalid,
    read_model,
)
from tests.sources.model_config.published import (
    FOREIGN_CONFIGS,
    PUBLISHED,
    published,
    read_config,
)

LLAMA: dict[str, Any] = PUBLISHED["llama-3.1-8b"]["config"]
OSS: dict[str, Any] = PUBLISHED["gpt-oss-20b"]["config"]


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


# Unknown shapes


WINDOWED = {**PUBLISHED["qwen2.5-7b"]["config"], "use_sliding_window": True}
MIXED = {**LLAMA, "layer_types": ["full_attention"] * 31 + ["linear_attention"]}
PATTERN = {"model_type": "nemotron_h", "num_hidden_layers": 4, "hybrid_override_pattern": "M-X*"}
SLIDING = {"model_type": "qwen3_next", "layer_types": ["sliding_attention"] * 48}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MIXED, "'llama' is unknown.*linear_attention"),
        (WINDOWED, "does not list the layers"),
        # An unknown wrapper must say whether it ties its embeddings.
        ({"model_type": "a-new-wrapper", "text_config": LLAMA}, "lacks tie_word_embeddings"),
        ({**LLAMA, "architectures": ["LlamaForRanking"]}, "'LlamaForRanking' is known"),
        ({"model_type": "qwen2", "architectures": ["Qwen2ForRewardModel"]}, "'Qwen2ForRewardModel"),
        ({"model_type": "nemotron_h", "num_hidden_layers": 4}, "does not list its layers"),
        (PATTERN, "hybrid_override_pattern has X"),
        ({"model_type": "exaone4", "sliding_window_pattern": "LLLG"}, "_pattern is 'LLLG'"),
        (SLIDING, "layers of the type sliding_attention"),
        *(
            ({**LLAMA, "model_type": name}, rf"'{name}' is unknown.*--enable-mfu-metrics")
            for name in ("mamba2", "zamba2", "qwen4_exp", "llama4_vision_model", "deepseek_v5")
        ),
    ],
)
def test_an_unknown_architecture_is_named_and_not_guessed(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArchitectureUnknown, match=message):
        read_config(config)


def test_the_page_that_the_error_names_lists_the_known_architectures() -> None:
    page = (Path(__file__).parents[3] / "docs/estimate.md").read_text()
    # Text parts of Qwen's multimodal models are named together.
    named = {name for name in ARCHITECTURES if not re.fullmatch(r"qwen\w+(vl|omni)\w*_text", name)}
    assert {name for name in named if f"`{name}`" not in page} == set()


def test_a_wrapped_model_is_read_by_its_text_part_alone() -> None:
    wrapped = {
        "model_type": "a-new-wrapper",
        "tie_word_embeddings": False,
        "text_config": LLAMA,
        "vision_config": {},
    }
    shape = read_config(wrapped)
    assert parameters(shape) == parameters(published("llama-3.1-8b"))
    assert any("only the text part" in remark for remark in shape.remarks)
    with pytest.raises(ArchitectureUnknown, match="'mamba2'"):
        read_config({**wrapped, "text_config": {"model_type": "mamba2"}})


def test_keys_of_a_wrapper_apply_to_its_text_part() -> None:
    keys = ("torch_dtype", "quantization_config", "tie_word_embeddings")
    oss = {**OSS, "torch_dtype": "float16"}
    wrapped = {"model_type": "wrapper", "text_config": without(oss, *keys)}
    shape = read_config({**wrapped, **{key: oss[key] for key in keys}})
    assert shape.groups == read_config(oss).groups
    assert shape.precision is Precision.FP16


@pytest.mark.parametrize("name", ["llm_config", "language_config"])
def test_a_text_part_of_a_model_with_code_of_its_own_says_whether_it_ties(name: str) -> None:
    """As in InternVL and DeepSeek-VL2."""
    text = PUBLISHED["qwen2.5-0.5b"]["config"]
    shape = read_config({"model_type": "internvl_chat", name: text, "vision_config": {}})
    assert parameters(shape) == parameters(published("qwen2.5-0.5b"))
    untied = read_config({"model_type": "internvl_chat", name: text, "tie_word_embeddings": False})
    assert parameters(untied) == parameters(shape) + 151_936 * 896


def test_the_part_of_an_omni_model_that_thinks_is_read() -> None:
    config = without(PUBLISHED["qwen3-30b-a3b"]["config"], "torch_dtype")
    text = {**config, "model_type": "qwen3_omni_moe_text"}
    shape = read_config(
        {
            "model_type": "qwen3_omni_moe",
            "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
            "thinker_config": {"model_type": "qwen3_omni_moe_thinker", "text_config": text},
            "talker_config": {},
            "dtype": "float16",
        }
    )
    assert parameters(shape) == parameters(published("qwen3-30b-a3b"))
    assert shape.precision is Precision.FP16
    assert any("only the text part" in remark for remark in shape.remarks)


# Unusable files


def llama(**changes: Any) -> str:
    return json.dumps({**LLAMA, **changes})


def class_defaults(model_type: str, **changes: Any) -> str:
    return json.dumps({"model_type": model_type, **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "holds no JSON object"),
        ("{}", "names no model_type"),
        ("[" * 100_000, "nested too deeply"),
        (f'{{"hidden_size": {"9" * 5000}}}', "4300 digits"),
        (" " * (16 * 1024 * 1024 + 1), "more than 16,777,216 bytes"),
        ("\ud800", "cannot be read as JSON"),
        (llama(hidden_size="wide"), "hidden_size is 'wide': .*valid integer"),
        (llama(hidden_size=True), "hidden_size is True: .*valid integer"),
        (llama(hidden_size=None), "hidden_size is null, .*own .4096."),
        (llama(num_hidden_layers=0), "num_hidden_layers is 0: .*greater than 0"),
        (llama(num_hidden_layers=10**9), "num_hidden_layers is 1000000000: "),
        (llama(vocab_size=10**400), "vocab_size is 10000.*less than or equal"),
        (llama(attention_bias="no"), "attention_bias is 'no': .*boolean"),
        (llama(torch_dtype="int3"), "dtype of the config.json is 'int3'; known are"),
        (llama(model_type="mixtral", num_local_experts=None), "num_local_experts is null"),
        (llama(layer_types=["full_attention"]), "types 1 of 32 layers"),
        (llama(model_type="deepseek_v2"), "needs num_experts_per_tok"),
        (class_defaults("qwen3_moe", moe_intermediate_size=None), "own .768."),
        (class_defaults("mixtral", num_experts_per_tok=9), "use 9 of 8 experts"),
        (class_defaults("mixtral", num_local_experts=0), "use 2 of 0 experts"),
        (class_defaults("glm4_moe_lite", mlp_layer_types=["dense"]), "has 1 entries for 47 layers"),
        (class_defaults("llama4_text", no_rope_layers=[1, 1, 0]), "has 3 entries for 48 layers"),
        (class_defaults("nemotron_h"), "num_hidden_layers is missing"),
    ],
    ids=lambda value: value[:40],
)
def test_an_unusable_config_is_refused_in_a_sentence(
    text: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ModelConfigInvalid, match=message) as refused:
        read_model(file)
    assert len(str(refused.value)) < 400


def test_a_missing_file_is_named_and_a_pipe_or_a_device_is_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(AgentError, match=r"nowhere\.json: cannot be read"):
        read_model(tmp_path / "nowhere.json")
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ModelConfigInvalid, match="Is a named pipe; name a regular file"):
        read_model(tmp_path)
    with pytest.raises(ModelConfigInvalid, match="Is a device; name a regular file"):
        read_model(Path("/dev/zero"))


def test_a_file_system_that_hangs_is_left_in_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    soon = partial(in_time, within_s=0.05)
    monkeypatch.setattr("agent.sources.model_config.reading.in_time", soon)
    monkeypatch.setattr(Path, "is_dir", lambda _: answers.wait())
    try:
        with pytest.raises(ModelConfigInvalid, match="no response from its file system within"):
            read_model(folder)
    finally:
        answers.set()


ODD = st.sampled_from(
    [math.inf, -math.inf, math.nan, 10**400, 10**9, -1, 0, 1.5, 1e308, True, None, "x" * 300]
) | st.sampled_from([[], {}, [math.inf], [[]], {"bits": 10**400, "quant_method": "gptq"}])


CONFIGS = [
    *(json.dumps(model["config"]) for model in PUBLISHED.values()),
    *(file.read_text() for file in sorted(FOREIGN_CONFIGS.glob("*.json"))),
]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_change_of_a_config_gives_an_estimate_or_a_sentence(
    tmp_path: Path, data: st.DataObject
) -> None:
    config = json.loads(data.draw(st.sampled_from(CONFIGS)))
    part = config.get("text_config", config)
    keys = st.sampled_from([*sorted(part), "quantization_config"])
    for key in data.draw(st.lists(keys, min_size=1, max_size=3)):
        part[key] = data.draw(ODD)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    spread = Parallelism(tensor=8, pipeline=1, data=1)
    planned = PlannedDeployment(context=8192, parallelism=spread, gpu=find_gpu("H100-SXM"))
    said: object = None
    try:
        said = estimate(read_model(file), planned)
    except AgentError as error:
        said = str(error)
    assert said


# Keys that a config omits


def test_a_null_window_overrides_the_default_of_the_class() -> None:
    shape = read_config({**PUBLISHED["mistral-7b-v0.1"]["config"], "sliding_window": None})
    assert [group.attentions[0].window for group in shape.groups] == [None]
    defaulted = read_config(without(PUBLISHED["mistral-7b-v0.1"]["config"], "sliding_window"))
    assert [group.attentions[0].window for group in defaulted.groups] == [4096]


def test_a_null_elsewhere_is_a_missing_key() -> None:
    nulls = dict.fromkeys(("head_dim", "mlp_only_layers", "quantization_config"))
    assert read_config({**LLAMA, **nulls}) == published("llama-3.1-8b")


def test_float32_is_served_in_16_bits_and_the_size_of_the_files_is_not_used(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**LLAMA, "torch_dtype": "float32"}))
    (folder / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 32e9}}')
    shape = read_model(folder)
    assert weight_bytes(shape) == 2 * 8_030_261_248
    assert any("float32" in remark for remark in shape.remarks)


def test_a_config_without_dtype_notes_that_16_bits_were_assumed() -> None:
    shape = read_config(without(LLAMA, "torch_dtype"))
    assert shape.precision is Precision.BF16
    assert any("has no dtype" in remark for remark in shape.remarks)
    assert published("llama-3.1-8b").remarks == ()
    assert any("multi-token" in remark for remark in published("deepseek-v3").remarks)


# Files beside the config


def test_the_size_is_read_from_the_index_beside_the_config(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text('{"metadata": {"total_size": 16060522496}, "weight_map": {}}')
    assert weight_bytes(read_model(folder)) == 16_060_522_496


def test_the_size_of_a_single_file_excludes_its_header(folder: Path) -> None:
    header = b'{"__metadata__": {}}'
    content = struct.pack("<Q", len(header)) + header + bytes(1000)
    (folder / "model.safetensors").write_bytes(content)
    assert weight_bytes(read_model(folder / "config.json")) == 1000
    # Cut off, it is ignored.
    (folder / "model.safetensors").write_bytes(b"\x10")
    assert weight_bytes(read_model(folder)) == 2 * 8_030_261_248


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", '{"metadata": {"total_size": null}}', "[1]", "[" * 100_000),
        *(f'{{"metadata": {{"total_size": {size}}}}}' for size in ("1e999", "NaN", "9" * 400)),
    ],
)
def test_a_broken_index_is_ignored(text: str, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    assert weight_bytes(read_model(folder)) == 2 * 8_030_261_248


def test_weights_in_another_format_do_not_have_the_size_of_the_files(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text('{"metadata": {"total_size": 16060522496}}')
    shape = read_model(folder, dtype="fp8")
    assert shape.compute is Precision.FP8
    # A byte for each weight, two for those of embedding, output matrix and norms.
    outside = 2 * 128256 * 4096 + 65 * 4096
    assert weight_bytes(shape) == 8_030_261_248 + outside


# The KV cache

FP8_SCHEME = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {
            "weights": {"type": "float", "num_bits": 8},
            "input_activations": {"type": "float", "num_bits": 8},
        }
    },
}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}


def kv_bytes(quantisation: dict[str, Any], **overrides: Any) -> float:
    """KV cache bytes of one token of Llama-3.1-8B."""
    shape = read_config({**LLAMA, "quantization_config": quantisation}, **overrides)
    return kv_bytes_per_token(coefficients(shape))


@pytest.mark.parametrize(
    ("quantisation", "expected"),
    [
        (COMPRESSED, 131_072),
        ({**COMPRESSED, "kv_cache_scheme": None}, 131_072),
        ({**COMPRESSED, "kv_cache_scheme": FP8_SCHEME}, 65_536),
        ({**MODELOPT, "kv_cache_scheme": FP8_SCHEME}, 65_536),
        ({**MODELOPT, "kv_cache_quant_algo": "FP8"}, 65_536),
        ({**MODELOPT, "kv_cache_quant_algo": "NVFP4"}, 36_864),
        ({**MODELOPT, "kv_cache_quant_algo": None}, 131_072),
    ],
)
def test_the_cache_has_the_width_of_the_quantisation(
    quantisation: dict[str, Any], expected: float
) -> None:
    assert kv_bytes(quantisation) == expected


def test_the_configured_cache_width_overrides_the_config() -> None:
    fp8 = {**COMPRESSED, "kv_cache_scheme": FP8_SCHEME}
    assert kv_bytes(fp8, cache_bits=16) == 131_072
    assert kv_bytes({**MODELOPT, "kv_cache_quant_algo": "FP2"}, cache_bits=16) == 131_072
    assert kv_bytes(fp8, dtype="bf16") == 65_536, "the format of weights does not set the cache's"


@pytest.mark.parametrize(
    "keys",
    [
        {"kv_cache_quant_algo": "FP2"},
        {"kv_cache_scheme": {"type": "float", "num_bits": 6}},
        {"kv_cache_scheme": {"type": ["float"], "num_bits": [8]}},
    ],
)
def test_a_cache_of_unknown_width_is_named_and_not_guessed(keys: dict[str, Any]) -> None:
    with pytest.raises(CacheUnknown, match=r"the KV cache of the config is .* `kv_dtype`"):
        kv_bytes({**MODELOPT, **keys})


def test_the_modelopt_file_beside_the_config_is_read(folder: Path) -> None:
    quantisation = {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head"],
    }
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": quantisation}))
    shape = read_model(folder)
    assert (shape.compute, shape.cache_bits) == (Precision.FP8, 8)
    (folder / "hf_quant_config.json").write_text("{}")
    with pytest.raises(
        ModelConfigInvalid, match=r"hf_quant_config\.json: has no .quantization. object"
    ):
        read_model(folder)


# Shapes read from published configurations against the figures that were published with them

WITHIN = 0.005


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
