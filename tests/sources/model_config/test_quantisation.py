"""Bytes of quantised weights, modules that are spared, and the precision of products."""

from typing import Any

import pytest

from agent.catalog.hardware import Precision
from agent.records.model import WeightFormat
from agent.sources.model_config import QuantisationUnknown
from agent.sources.model_config.quantisation import scheme
from tests.sources.model_config.published import published, read_config

BF16, FP8, INT8, FP4 = Precision.BF16, Precision.FP8, Precision.INT8, Precision.FP4
MODULE = "model.layers.3.mlp.experts.0.down_proj"


def compressed(weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    group = {"weights": weights, "input_activations": activations, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def quark(weights: str, activations: str | None, **more: Any) -> dict[str, Any]:
    inputs = None if activations is None else {"dtype": activations}
    config = {"weight": {"dtype": weights, **more}, "input_tensors": inputs}
    return {"quant_method": "quark", "global_quant_config": config, "exclude": ["lm_head"]}


@pytest.mark.parametrize(
    ("keys", "bits", "compute"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128, BF16),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8, BF16),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, 4 + 20 / 64, BF16),
        ({"quant_method": "fp8", "activation_scheme": "static"}, 8, FP8),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / 128**2, FP8),
        ({"quant_method": "fbgemm_fp8"}, 8, FP8),
        ({"quant_method": "mxfp4"}, 4.25, BF16),
        ({"quant_method": "mxfp8", "ignored_layers": ["lm_head"]}, 8.25, FP8),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 128}, 4 + 20 / 128, BF16),
        (quark("fp4", "fp4", group_size=32, scale_format="e8m0"), 4.25, FP4),
        (quark("fp8_e4m3", "fp8_e4m3"), 8, FP8),
        (quark("uint4", None, group_size=128), 4 + 16 / 128, BF16),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5, BF16),
        (
            {
                "quant_method": "bitsandbytes",
                "load_in_4bit": True,
                "bnb_4bit_use_double_quant": True,
            },
            4 + 8 / 64 + 32 / 64 / 256,
            BF16,
        ),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8, INT8),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5, FP4),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 8, FP8),
        ({"quant_algo": "FP8", "producer": {"name": "modelopt"}}, 8, FP8),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, 8.25, FP8),
        ({"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}, 8 + 32 / 128**2, FP8),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, 4.5, BF16),
        (
            compressed(
                {"type": "float", "num_bits": 8, "strategy": "tensor"},
                {"type": "float", "num_bits": 8},
            ),
            8,
            FP8,
        ),
        (
            compressed(
                {"type": "int", "num_bits": 8, "strategy": "channel"},
                {"type": "int", "num_bits": 8},
            ),
            8,
            INT8,
        ),
        (compressed({"type": "int", "num_bits": 4, "group_size": 128}, None), 4.125, BF16),
        (
            compressed({"type": "int", "num_bits": 4, "group_size": 128, "symmetric": False}, None),
            4 + 20 / 128,
            BF16,
        ),
        (
            compressed(
                {"type": "float", "num_bits": 4, "group_size": 16}, {"type": "float", "num_bits": 4}
            ),
            4.5,
            FP4,
        ),
    ],
    ids=lambda value: value.get("quant_method") if isinstance(value, dict) else None,
)
def test_a_weight_takes_its_bits_and_its_share_of_scales(
    keys: dict[str, Any], bits: float, compute: Precision
) -> None:
    assert scheme(keys, BF16).format_of(MODULE) == WeightFormat(bits, compute)


@pytest.mark.parametrize(
    ("keys", "method"),
    [
        ({"quant_method": "aqlm"}, "aqlm"),
        ({}, "None"),
        ({"quant_method": "gptq"}, "gptq"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*": {"bits": 8}}}, "gptq"),
        ({"quant_method": "auto-round", "bits": 4, "extra_config": {"a": {"bits": 8}}}, "auto"),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp6"}}}, "quark"),
        ({"quant_method": "quark", "layer_quant_config": {"*lm_head": {}}}, "quark"),
        ({"quant_method": "awq", "bits": "four", "group_size": 1}, "awq"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "fp8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": False}, "bitsandbytes"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8"}, "modelopt"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "modelopt"),
        ({"quant_algo": "FP8", "producer": {"name": "another"}}, "None"),
        (compressed({"type": "int", "num_bits": 4}, {"type": "int", "num_bits": 3}), "compressed"),
        # Otherwise the weights have fewer bytes than none, or those of no format.
        ({"quant_method": "gptq", "bits": -4}, "gptq"),
        ({"quant_method": "gptq", "bits": 0}, "gptq"),
        ({"quant_method": "gptq", "bits": 10**6}, "gptq"),
        ({"quant_method": "fp8", "weight_block_size": [0.5, 2]}, "fp8"),
        (compressed({"type": "int", "num_bits": -4}, None), "compressed"),
        ({"quant_method": "fp8", "ignored_layers": ["re:("]}, "fp8"),
        ({"quant_method": "compressed-tensors", "config_groups": []}, "compressed"),
    ],
)
def test_an_unknown_quantisation_is_named_with_a_remedy(keys: dict[str, Any], method: str) -> None:
    with pytest.raises(QuantisationUnknown, match=rf"'{method}.*' is unknown.*--dtype"):
        scheme(keys, BF16)


@pytest.mark.parametrize(
    ("targets", "experts", "attention"),
    [
        (["Linear"], 4.125, 4.125),
        ("Linear", 4.125, 4.125),
        (None, 4.125, 4.125),
        (["re:.*mlp\\.experts\\..*"], 4.125, 16),
        (["re:.*self_attn.*", "re:.*experts.*"], 4.125, 4.125),
        (["model.layers.3.self_attn.q_proj"], 16, 4.125),
    ],
)
def test_a_group_quantises_its_targets_alone(
    targets: object, experts: float, attention: float
) -> None:
    keys = compressed({"type": "int", "num_bits": 4, "group_size": 128}, None)
    keys["config_groups"]["group_0"]["targets"] = targets
    found = scheme(keys, BF16)
    assert found.format_of(MODULE).bits == experts
    assert found.format_of("model.layers.3.self_attn.q_proj").bits == attention


def test_groups_that_differ_are_unknown_rather_than_averaged() -> None:
    keys = compressed({"type": "int", "num_bits": 4, "group_size": 128}, None)
    other = compressed({"type": "int", "num_bits": 8}, None)["config_groups"]["group_0"]
    keys["config_groups"]["group_1"] = other
    with pytest.raises(QuantisationUnknown, match="different formats"):
        scheme(keys, BF16)


def test_groups_for_other_modules_may_differ() -> None:
    """As vLLM names the modules of DeepSeek-V4, of which it has two as one."""
    keys = compressed({"type": "int", "num_bits": 4, "group_size": 128}, None)
    wide = compressed({"type": "int", "num_bits": 8}, None)["config_groups"]["group_0"]
    keys["config_groups"]["group_0"]["targets"] = ["re:.*ffn.*(gate|up|down)_proj$"]
    keys["config_groups"]["group_1"] = {**wide, "targets": ["re:.*attn.*(fused_wqa_wkv|wq_b)$"]}
    found = scheme(keys, BF16)
    bits = {
        name: found.format_of(f"model.layers.3.{name}").bits
        for name in ("mlp.experts.0.up_proj", "self_attn.wkv", "self_attn.wq_b", "self_attn.wo_a")
    }
    assert list(bits.values()) == [4.125, 8, 8, 16]


def test_rules_of_single_modules_may_spare_them() -> None:
    gptq = {"quant_method": "gptq", "bits": 4, "dynamic": {r"-:.*\.down_proj": {}}}
    rounded = {"quant_method": "auto-round", "bits": 4, "extra_config": {MODULE: {"bits": 16}}}
    cache = {"export": {"kv_cache_group": ["*k_proj"]}, "layer_quant_config": {"*k_proj": {}}}
    excluded = {**quark("fp4", "fp4"), **cache, "exclude": [MODULE]}
    for keys in (gptq, rounded, excluded):
        assert scheme(keys, BF16).format_of(MODULE).bits == 16
        assert scheme(keys, BF16).format_of(MODULE.replace("down", "up")).bits < 5


MIXED: dict[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        "lm_head": {"quant_algo": "W4A16_NVFP4"},
        "model.language_model.layers.3.mlp.experts": {"quant_algo": "NVFP4"},
        "model.language_model.layers.3.self_attn.q_proj": {"quant_algo": "FP8"},
    },
}


def test_mixed_precision_is_by_the_list_of_layers() -> None:
    found = scheme(MIXED, BF16)
    assert found.format_of(MODULE) == WeightFormat(4.5, FP4)
    assert found.format_of("model.layers.3.self_attn.q_proj") == WeightFormat(8, FP8)
    assert found.format_of("model.layers.3.self_attn.k_proj") == WeightFormat(16, BF16)
    assert found.format_of_head() == WeightFormat(4.5, BF16)


@pytest.mark.parametrize(
    "listed", ["model.layers.3.mlp.secret_proj", "model.layers.3.attention.experts.0.up_proj"]
)
def test_a_listed_layer_that_no_module_has_is_unknown_rather_than_plain(listed: str) -> None:
    layers = {"model.layers.3.mlp.up_proj": {"quant_algo": "FP8"}, listed: {"quant_algo": "FP8"}}
    quantised = {**MIXED, "quantized_layers": layers}
    with pytest.raises(QuantisationUnknown, match="no module of the model is named"):
        read_config({"model_type": "qwen3", "quantization_config": quantised})


def test_a_quantisation_that_names_no_module_is_unknown_rather_than_plain() -> None:
    keys = compressed({"type": "int", "num_bits": 4, "group_size": 128}, None)
    keys["config_groups"]["group_0"]["targets"] = ["re:.*another_name.*"]
    with pytest.raises(QuantisationUnknown, match="names no module"):
        read_config({"model_type": "qwen3", "quantization_config": keys})


def test_weights_of_several_precisions_have_the_peak_of_most_and_a_remark() -> None:
    layers = {
        f"model.layers.{number}.{name}": {"quant_algo": algorithm}
        for number in range(32)
        for name, algorithm in (("mlp.up_proj", "NVFP4"), ("self_attn.v_proj", "FP8"))
    }
    quantised = {**MIXED, "quantized_layers": layers}
    model = read_config({"model_type": "qwen3", "quantization_config": quantised})
    assert model.compute is FP4
    assert any("multiplied in fp4 and fp8" in remark for remark in model.remarks)


def test_experts_of_deepseek_v4_are_stored_in_a_format_of_their_own() -> None:
    keys = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert scheme(keys, BF16, experts="fp4").format_of(MODULE) == WeightFormat(4.25, FP8)
    attention = scheme(keys, BF16, experts="fp4").format_of("model.layers.3.self_attn.wq_b")
    assert attention.bits == 8 + 32 / 128**2
    # ModelOpt quantises them again, and lists them.
    again = {"layers.3.ffn.experts": {"quant_algo": "NVFP4"}}
    nvfp4 = scheme({**keys, "quantized_layers": again}, BF16, experts="fp4")
    assert nvfp4.format_of(MODULE) == WeightFormat(4.5, FP4)
    with pytest.raises(QuantisationUnknown, match="'int3'"):
        scheme(keys, BF16, experts="int3")


@pytest.mark.parametrize(
    ("entry", "module", "spared"),
    [
        ("lm_head", MODULE, False),
        ("model.layers.3", MODULE, True),
        ("model.layers.3", "model.layers.31.mlp.down_proj", False),
        ("model.layers.*.self_attn", "model.layers.7.self_attn.q_proj", True),
        ("model.layers.*.self_attn", MODULE, False),
        ("gate", "model.layers.1.mlp.gate_proj", False),
        ("model.language_model.layers.3", MODULE, True),
        ("language_model.model.layers.3.mlp.*", MODULE, True),
        (r"re:^language_model\.model\.layers\.3\.", MODULE, True),
        (r"re:^visual\.", MODULE, False),
        ("visual.layers.3", MODULE, False),
        ("backbone.layers.3.mixer.in_proj", "model.layers.3.mixer.in_proj", True),
        ("down_proj", MODULE, True),
        (r"re:.*mlp\.(gate|up)_proj", "model.layers.1.mlp.up_proj", True),
        (r"re:.*mlp\.(gate|up)_proj", MODULE, False),
    ],
)
def test_modules_of_the_exception_list_keep_16_bits(entry: str, module: str, spared: bool) -> None:
    parsed = scheme({"quant_method": "fp8", "modules_to_not_convert": [entry]}, BF16)
    assert (parsed.format_of(module).bits == 16) is spared


@pytest.mark.parametrize(
    ("model_type", "spared"),
    [
        ("qwen2_moe", "model.layers.0.mlp.shared_expert.up_proj"),
        ("qwen3_next", "model.layers.0.linear_attn.in_proj_qkvz"),
        ("llama4_text", "language_model.model.layers.0.feed_forward.shared_expert.up_proj"),
        ("granitemoehybrid", "model.layers.0.shared_mlp.up_proj"),
        ("deepseek_v32", "model.layers.0.self_attn.indexer.wq_b"),
    ],
)
def test_matrices_have_the_names_that_exception_lists_use(model_type: str, spared: str) -> None:
    quantised = {"quant_method": "fp8", "modules_to_not_convert": [spared]}
    model = read_config({"model_type": model_type, "quantization_config": quantised})
    wide = {
        block.name
        for group in model.groups
        for block in group.blocks
        if block.format.bits == 16 and not block.name.endswith(".gate")
    }
    assert wide == {spared.split("layers.0.")[1]}


def test_a_model_that_spares_all_but_its_experts_multiplies_them_in_16_bits() -> None:
    kimi = published("kimi-k2-thinking")
    bits = {
        block.name: block.format.bits
        for group in kimi.groups
        for block in group.blocks
        if block.name.startswith("mlp.")
    }
    assert bits["mlp.experts.0.up_proj"] == 4 + 16 / 32
    assert {width for name, width in bits.items() if "experts.0" not in name} == {16}
    assert kimi.compute is BF16
    assert published("deepseek-v3").compute is FP8
