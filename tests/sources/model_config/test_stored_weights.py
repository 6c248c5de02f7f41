"""What safetensors files tell of a model whose architecture is unknown."""

import json
import struct
from math import prod
from pathlib import Path
from typing import Any

import pytest

from agent.records.model import StoredWeights
from agent.sources.model_config import ArchitectureUnknown, read_model, read_weights

CONFIG: dict[str, Any] = {
    "model_type": "strange",
    "num_hidden_layers": 2,
    "vocab_size": 1000,
    "hidden_size": 64,
    "torch_dtype": "bfloat16",
}
WIDTHS = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1}

# By name, the type and the shape.
Tensors = dict[str, tuple[str, list[int]]]
EMBEDDING = {"model.embed_tokens.weight": ("BF16", [1000, 64])}
HEAD = {"lm_head.weight": ("BF16", [1000, 64])}
LAYERS = {f"model.layers.{n}.mlp.up_proj.weight": ("BF16", [256, 64]) for n in (0, 1)}
LAYER = 256 * 64
WORDS = 1000 * 64


def write(path: Path, tensors: Tensors) -> int:
    """A file of these tensors, without their values; their bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + WIDTHS[dtype] * prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    return end


def write_index(folder: Path, names: Tensors, **metadata: Any) -> None:
    index = {"metadata": metadata, "weight_map": dict.fromkeys(names, "model-1.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def weights_of(folder: Path, **changes: Any) -> StoredWeights | None:
    file = folder / "config.json"
    file.write_text(json.dumps({**CONFIG, **changes}))
    with pytest.raises(ArchitectureUnknown) as unknown:
        read_model(file)
    return read_weights(folder, unknown.value)


def known(found: StoredWeights | None) -> tuple[int, int | None, int | None]:
    assert found is not None
    assert found.architecture == "strange"
    return found.stored_bytes, found.parameters, found.step_bytes


# The headers of the files


def test_a_step_reads_all_tensors_but_the_table_of_words(tmp_path: Path) -> None:
    size = write(tmp_path / "model.safetensors", EMBEDDING | HEAD | LAYERS)
    assert known(weights_of(tmp_path)) == (size, 2 * WORDS + 2 * LAYER, size - 2 * WORDS)


def test_a_table_of_words_that_is_the_output_matrix_is_read(tmp_path: Path) -> None:
    size = write(tmp_path / "model.safetensors", EMBEDDING | LAYERS)
    assert known(weights_of(tmp_path)) == (size, WORDS + 2 * LAYER, size)


@pytest.mark.parametrize(
    "name",
    [
        "vision_tower.layers.0.mlp.up_proj.weight",
        "model.visual.blocks.0.mlp.up_proj.weight",
        "mtp.layers.0.mlp.up_proj.weight",
        # Layers for multi-token prediction are numbered on.
        "model.layers.2.mlp.up_proj.weight",
    ],
)
def test_what_is_beside_the_text_part_counts_only_in_the_size(tmp_path: Path, name: str) -> None:
    text = write(tmp_path / "text", EMBEDDING | LAYERS)
    tensors: Tensors = EMBEDDING | LAYERS | {name: ("BF16", [256, 64])}
    size = write(tmp_path / "model.safetensors", tensors)
    assert known(weights_of(tmp_path)) == (size, WORDS + 2 * LAYER, text)


def test_embeddings_of_layers_are_not_read(tmp_path: Path) -> None:
    more: Tensors = {"model.embed_tokens_per_layer.weight": ("BF16", [1000, 64])}
    size = write(tmp_path / "model.safetensors", EMBEDDING | LAYERS | more)
    assert known(weights_of(tmp_path)) == (size, 2 * WORDS + 2 * LAYER, size - 2 * WORDS)


def test_with_experts_the_bytes_of_a_step_are_unknown(tmp_path: Path) -> None:
    experts: Tensors = {"model.layers.0.mlp.experts.3.up_proj.weight": ("BF16", [256, 64])}
    size = write(tmp_path / "model.safetensors", EMBEDDING | LAYERS | experts)
    found = weights_of(tmp_path)
    assert known(found) == (size, WORDS + 3 * LAYER, None)
    assert found is not None
    assert found.why_unknown is not None
    assert "experts" in found.why_unknown


def test_scales_are_no_parameters_and_packed_weights_cannot_be_counted(tmp_path: Path) -> None:
    quantised: Tensors = {
        "model.layers.0.mlp.up_proj.weight": ("F8_E4M3", [256, 64]),
        "model.layers.0.mlp.up_proj.weight_scale_inv": ("F32", [2, 1]),
    }
    size = write(tmp_path / "model.safetensors", EMBEDDING | quantised)
    assert known(weights_of(tmp_path)) == (size, WORDS + LAYER, size)
    packed: Tensors = {"model.layers.0.mlp.up_proj.weight_packed": ("U8", [256, 32])}
    size = write(tmp_path / "model.safetensors", EMBEDDING | packed)
    assert known(weights_of(tmp_path)) == (size, None, size)


def test_the_headers_of_all_files_of_an_index_count(tmp_path: Path) -> None:
    sizes = [
        write(tmp_path / f"{name}.safetensors", tensors)
        for name, tensors in (("one", EMBEDDING), ("two", LAYERS))
    ]
    names = {
        name: f"{file}.safetensors"
        for file, name in zip(("one", "two", "two"), EMBEDDING | LAYERS, strict=True)
    }
    index = {"metadata": {"total_size": 1}, "weight_map": names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert known(weights_of(tmp_path)) == (sum(sizes), WORDS + 2 * LAYER, sum(sizes))


# The index alone


def test_an_index_tells_the_size_and_with_the_type_the_parameters(tmp_path: Path) -> None:
    write_index(tmp_path, EMBEDDING | HEAD | LAYERS, total_size=1_000_000)
    assert known(weights_of(tmp_path)) == (1_000_000, 500_000, 1_000_000 - 2 * WORDS)


def test_an_index_may_count_the_parameters(tmp_path: Path) -> None:
    metadata = {"total_size": 1_000_000, "total_parameters": 900_000}
    write_index(tmp_path, EMBEDDING | LAYERS, **metadata)
    assert known(weights_of(tmp_path)) == (1_000_000, 900_000, 1_000_000)
    assert known(weights_of(tmp_path, quantization_config={"quant_method": "new"})) == (
        1_000_000,
        900_000,
        1_000_000,
    )


@pytest.mark.parametrize(
    ("more", "changes", "parameters", "why"),
    [
        ({"visual.patch_embed.weight": ("BF16", [1])}, {}, None, "more than its text part"),
        ({"model.layers.0.mlp.experts.gate_up": ("BF16", [1])}, {}, 500_000, "experts"),
        (HEAD, {"torch_dtype": None}, None, "size of its embedding"),
    ],
)
def test_what_names_alone_do_not_tell_is_unknown(
    tmp_path: Path, more: Tensors, changes: dict[str, Any], parameters: int | None, why: str
) -> None:
    write_index(tmp_path, EMBEDDING | LAYERS | more, total_size=1_000_000)
    found = weights_of(tmp_path, **changes)
    assert known(found) == (1_000_000, parameters, None)
    assert found is not None
    assert why in (found.why_unknown or "")


# Files that cannot be used


def test_without_files_nothing_is_known(tmp_path: Path) -> None:
    assert weights_of(tmp_path) is None


@pytest.mark.parametrize(
    "content", ["", "{}", "[1]", '{"metadata": {"total_size": -1}, "weight_map": {"a": "../a"}}']
)
def test_a_broken_index_tells_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert weights_of(tmp_path) is None


def test_a_broken_file_tells_nothing(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x10")
    assert weights_of(tmp_path) is None
