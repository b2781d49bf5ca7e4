"""Checkpoints in fp8: their values in bf16, compared with another calculation."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from build_artifacts.checkpoints.checkpoint import SAFETENSORS_INDEX_NAME
from build_artifacts.checkpoints.models import count_parameters
from build_artifacts.errors import UnsupportedModel
from build_artifacts.weight_formats import base
from build_artifacts.weight_formats.reading import read_weight_format
from tests.support.checkpoint_metadata import read_checkpoint_metadata
from tests.support.decoder_families import write_decoder
from tests.support.fp8_checkpoints import (
    Blocks,
    dequantize_matrix,
    quantize_checkpoint,
    quantize_matrix,
)
from tests.support.quantized_checkpoints import (
    NAME,
    check_equal,
    convert,
    convert_tensors,
    draw_weight,
    edit_config,
    load_tensors,
    write_tensors,
)
from tests.support.tiny_encoders import tiny_checkpoint, write_json

EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"


def state_fp8(block_size: list[int] | None) -> dict[str, Any]:
    return {"quant_method": "fp8", "weight_block_size": block_size}


def state_compressed(**weights: Any) -> dict[str, Any]:
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, **weights}
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
    }


@pytest.mark.parametrize("part_values", [1 << 24, 700], ids=["whole", "parts"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "size"),
    [((200, 300), (128, 128)), ((256, 128), (128, 128)), ((60, 70), (128, 128)), ((9, 50), (4, 7))],
)
def test_blocks_may_be_smaller_at_the_edges(
    shape: tuple[int, int],
    size: tuple[int, int],
    dtype: torch.dtype,
    part_values: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(base, "_MAX_PART_VALUES", part_values)
    values, scales = quantize_matrix(draw_weight(*shape), size, dtype)
    plain = {
        "model.embed_tokens.weight": draw_weight(50, 40).to(torch.bfloat16),
        "router.e_score_correction_bias": draw_weight(8),
        "logit_scale": torch.tensor(2.5),
        "position_ids": torch.arange(9)[None],
        "odd": torch.tensor([True, False, True]),
    }
    tensors = plain | {NAME: values, f"{NAME}_scale_inv": scales}
    found = convert_tensors(tmp_path, tensors, state_fp8(list(size)))
    check_equal(found, plain | {NAME: dequantize_matrix(values, scales, size)})


def test_block_size_of_a_config_without_one_is_that_of_transformers(tmp_path: Path) -> None:
    values, scales = quantize_matrix(draw_weight(200, 130), (128, 128))
    tensors = {NAME: values, f"{NAME}_scale_inv": scales}
    found = convert_tensors(tmp_path, tensors, {"quant_method": "fp8"})
    check_equal(found, {NAME: dequantize_matrix(values, scales, (128, 128))})


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_may_apply_to_a_whole_weight(shape: tuple[int, ...], tmp_path: Path) -> None:
    values, scales = quantize_matrix(draw_weight(20, 30), None, torch.bfloat16)
    activations = NAME.replace(".weight", ".activation_scale")
    tensors = {NAME: values, activations: torch.tensor(0.1)}
    tensors[f"{NAME}_scale_inv"] = scales.reshape(shape)
    found = convert_tensors(tmp_path, tensors, state_fp8(None))
    check_equal(found, {NAME: dequantize_matrix(values, scales, None)})


@pytest.mark.parametrize("shape", [(0, 30), (20, 0), (3, 0, 20), (3, 20, 0), (0, 20, 20)])
@pytest.mark.parametrize("size", [None, [16, 16]])
def test_weight_may_be_empty(
    size: list[int] | None, shape: tuple[int, ...], tmp_path: Path
) -> None:
    *experts, rows, columns = shape
    blocks = (1, 1) if size is None else (-(-rows // 16), -(-columns // 16))
    scales = {f"{NAME}_scale_inv": torch.ones(*experts, *blocks)}
    weight = torch.zeros(shape, dtype=torch.bfloat16)
    tensors = {NAME: weight.to(torch.float8_e4m3fn)} | scales
    check_equal(convert_tensors(tmp_path, tensors, state_fp8(size)), {NAME: weight})


@pytest.mark.parametrize("scales", [(), (1,), (3,)])
@pytest.mark.parametrize("rows", [0, 20])
def test_experts_may_have_one_scale_each_or_one_for_all(
    rows: int, scales: tuple[int, ...], tmp_path: Path
) -> None:
    factors = torch.arange(1.0, 1 + math.prod(scales)).reshape(scales)
    values = draw_weight(3, rows, 20).to(torch.float8_e4m3fn)
    tensors = {EXPERTS: values, f"{EXPERTS}_scale_inv": factors}
    found = convert_tensors(tmp_path, tensors, state_fp8(None))
    expected = values.float() * factors.reshape(-1, 1, 1)
    check_equal(found, {EXPERTS: expected.to(torch.bfloat16)})


@pytest.mark.parametrize(
    ("config", "size"),
    [
        # AutoFP8's, and FBGEMM's. Both state no size of blocks.
        ({"quant_method": "fp8", "activation_scheme": "static"}, None),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, (1, 30)),
    ],
)
def test_scales_may_have_another_name(config: dict[str, Any], size: Blocks, tmp_path: Path) -> None:
    values, scales = quantize_matrix(draw_weight(20, 30), size)
    tensors = {NAME: values, f"{NAME}_scale": scales if size else scales.reshape(())}
    ends = (".input_scale", ".input_scale_ub", ".k_scale")
    unused = {NAME.replace(".weight", end): torch.tensor(0.1) for end in ends}
    found = convert_tensors(tmp_path, tensors | unused, config)
    check_equal(found, {NAME: dequantize_matrix(values, scales, size)})


def test_scales_may_be_powers_of_two(tmp_path: Path) -> None:
    """Their type has an exponent of eight bits with the bias 127, and nothing else."""
    values, _ = quantize_matrix(draw_weight(8, 8), (4, 8))
    exponents = torch.tensor([[120], [125]], dtype=torch.uint8)
    tensors = {NAME: values, f"{NAME}_scale_inv": exponents.view(torch.float8_e8m0fnu)}
    found = convert_tensors(tmp_path, tensors, state_fp8([4, 8]))
    scales = torch.tensor([[2.0**-7], [2.0**-2]])
    check_equal(found, {NAME: dequantize_matrix(values, scales, (4, 8))})


@pytest.mark.parametrize(
    ("rows", "size", "halves"),
    [
        (40, (16, 16), False),
        (40, None, False),
        # Of gate and up projection in one matrix, each has scales of its own.
        (24, (16, 16), True),
        (24, (128, 128), True),
        (24, None, True),
    ],
)
def test_experts_in_one_tensor_have_scales_each(
    rows: int, size: Blocks, halves: bool, tmp_path: Path
) -> None:
    weights = draw_weight(3, 2 * rows if halves else rows, 20)
    values, scales, expected = [], [], []
    for weight in weights:
        parts = [quantize_matrix(part, size) for part in weight.chunk(2 if halves else 1)]
        values.append(torch.cat([part for part, _ in parts]))
        scales.append(torch.cat([part for _, part in parts]))
        expected.append(torch.cat([dequantize_matrix(*part, size) for part in parts]))
    tensors = {
        EXPERTS: torch.stack(values),
        f"{EXPERTS}_scale_inv": torch.stack(scales),
        f"{EXPERTS}_activation_scale": torch.ones(3),
    }
    found = convert_tensors(tmp_path, tensors, state_fp8(None if size is None else list(size)))
    check_equal(found, {EXPERTS: torch.stack(expected)})


def quantize_experts(name: str) -> dict[str, torch.Tensor]:
    pairs = [quantize_matrix(each, (16, 16)) for each in draw_weight(3, 20, 20)]
    values, scales = (torch.stack(each) for each in zip(*pairs, strict=True))
    return {name: values, f"{name}_scale_inv": scales}


def test_scales_with_two_readings_are_refused(tmp_path: Path) -> None:
    """Two blocks of 16 rows may be those of 20 rows, or one each for 10 rows of gate and up."""
    with pytest.raises(UnsupportedModel, match="may belong to blocks of the whole weight"):
        convert_tensors(tmp_path, quantize_experts(EXPERTS), state_fp8([16, 16]))


def test_down_projections_have_one_reading(tmp_path: Path) -> None:
    name = EXPERTS.replace("gate_up_proj", "down_proj")
    tensors = quantize_experts(name)
    found = convert_tensors(tmp_path, tensors, state_fp8([16, 16]))
    pairs = zip(*tensors.values(), strict=True)
    check_equal(found, {name: torch.stack([dequantize_matrix(*pair, (16, 16)) for pair in pairs])})


@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        ({"strategy": "tensor"}, None),
        ({"strategy": "channel"}, (1, 30)),
        ({"strategy": "block", "block_structure": [16, 16]}, (16, 16)),
    ],
    ids=["tensor", "channel", "block"],
)
def test_compressed_tensors(strategy: dict[str, Any], size: Blocks, tmp_path: Path) -> None:
    values, scales = quantize_matrix(draw_weight(20, 30), size, torch.bfloat16)
    plain = {"logit_scale": torch.tensor(2.5), "model.norm.weight": draw_weight(30)}
    tensors = plain | {
        NAME: values,
        f"{NAME}_scale": scales,
        NAME.replace(".weight", ".input_scale"): torch.tensor(0.1),
        "model.layers.0.self_attn.k_scale": torch.tensor(0.1),
    }
    found = convert_tensors(tmp_path, tensors, state_compressed(**strategy))
    check_equal(found, plain | {NAME: dequantize_matrix(values, scales, size)})


def test_scales_may_be_in_another_file(tmp_path: Path) -> None:
    values, scales = quantize_matrix(draw_weight(20, 30), (16, 16))
    source = write_tensors(tmp_path / "source", {NAME: values}, state_fp8([16, 16]))
    (source / "model.safetensors").rename(source / "a.safetensors")
    save_file({f"{NAME}_scale_inv": scales}, source / "b.safetensors")
    index = {NAME: "a.safetensors", f"{NAME}_scale_inv": "b.safetensors"}
    write_json(source / SAFETENSORS_INDEX_NAME, {"weight_map": index})
    weights = convert(source, tmp_path / "work", "fill-mask").weights
    check_equal(load_tensors(weights), {NAME: dequantize_matrix(values, scales, (16, 16))})
    (file,) = weights.glob("*.safetensors")
    written = json.loads((weights / SAFETENSORS_INDEX_NAME).read_bytes())
    assert written == {"metadata": {"total_size": 1200}, "weight_map": {NAME: file.name}}
    assert count_parameters(weights) == 600


def test_config_states_no_quantization_afterwards(tmp_path: Path) -> None:
    values, scales = quantize_matrix(draw_weight(20, 30), None)
    source = write_tensors(
        tmp_path / "source", {NAME: values, f"{NAME}_scale_inv": scales}, state_fp8(None)
    )
    text = {"vocab_size": 9, "quantization_config": state_fp8(None)}
    edit_config(source, quantization_config=None, text_config=text)
    (source / "tokenizer.json").write_text("{}", encoding="utf-8")
    log = io.StringIO()
    converted = convert(source, tmp_path / "work", "fill-mask", log)
    assert "weights in fp8 to bf16" in log.getvalue()
    config = json.loads((converted.weights / "config.json").read_bytes())
    assert config == {"model_type": "bert", "text_config": {"vocab_size": 9}}
    assert (converted.weights / "tokenizer.json").is_file()


def damage(tensors: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    scale = f"{NAME}_scale_inv"
    nan = tensors[NAME].clone()
    nan[3, 3] = torch.nan
    changes: dict[str, dict[str, Tensor]] = {
        "extra": {"other.weight_scale_inv": tensors[scale].clone()},
        "float": {NAME: tensors[NAME].float()},
        "shape": {scale: tensors[scale][:1].clone()},
        "axes": {NAME: tensors[NAME].reshape(2, 1, 10, 30)},
        "scale type": {scale: tensors[scale].to(torch.int32)},
        "type": {NAME: tensors[NAME].float().to(torch.float8_e5m2)},
        "packed": {"other.weight": torch.zeros(4, 4, dtype=torch.int8)},
        "scale nan": {scale: tensors[scale] * torch.nan},
        "nan": {NAME: nan},
    }
    if kind == "missing":
        return {NAME: tensors[NAME]}
    return tensors | changes[kind]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", f"no tensor `{NAME}_scale_inv`, which its quantized weight `{NAME}` needs"),
        ("extra", "no tensor `other.weight`, which its quantized weight `other.weight` needs"),
        ("float", f"tensor `{NAME}` has the type F32"),
        ("shape", f"tensor `{NAME}_scale_inv` has the shape [1, 2]"),
        ("axes", f"tensor `{NAME}` has the shape [2, 1, 10, 30]"),
        ("scale type", f"tensor `{NAME}_scale_inv` has the type I32"),
        ("type", f"tensor `{NAME}` has the type F8_E5M2"),
        ("packed", "tensor `other.weight` has the type I8"),
        ("scale nan", f"scales `{NAME}_scale_inv` have values that are not finite"),
        ("nan", f"weight `{NAME}` has values that are not finite"),
    ],
)
def test_damaged_checkpoint_is_refused_by_the_name_of_the_tensor(
    kind: str, message: str, tmp_path: Path
) -> None:
    values, scales = quantize_matrix(draw_weight(20, 30), (16, 16))
    tensors = damage({NAME: values, f"{NAME}_scale_inv": scales}, kind)
    with pytest.raises(UnsupportedModel) as refused:
        convert_tensors(tmp_path, tensors, state_fp8([16, 16]))
    assert message in refused.value.message
    assert not list((tmp_path / "work").glob("**/*.safetensors"))


@pytest.mark.parametrize("block_size", [[128], [0, 128], "128x128", [1.5, 2]])
def test_invalid_block_size_is_refused(block_size: Any, tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"quantization_config": state_fp8(block_size)})
    with pytest.raises(UnsupportedModel, match="the block size of `quantization_config`"):
        read_weight_format(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "architecture", "modules"),
    [
        ("rwkv", "RwkvForCausalLM", None),
        # sentence-transformers saved the second, so the build does not reduce it to its text model.
        (
            "llava",
            "LlavaForConditionalGeneration",
            [{"type": "sentence_transformers.models.Transformer", "path": ""}],
        ),
    ],
)
def test_unsupported_decoder_is_refused_before_its_weights_are_written(
    model_type: str, architecture: str, modules: list[dict[str, str]] | None, tmp_path: Path
) -> None:
    source = tmp_path / "checkpoint"
    write_decoder("LlamaForCausalLM", source, {})
    quantize_checkpoint(source, (32, 32))
    (source / "model.safetensors").write_bytes(b"")  # not read
    edit_config(source, model_type=model_type, architectures=[architecture])
    if modules is not None:
        write_json(source / "modules.json", modules)
    with pytest.raises(UnsupportedModel, match=f"`{architecture}` cannot be built"):
        convert(source, tmp_path / "work")


def test_encoder_with_a_pooling_is_converted(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "bert", model_type="qwen3")
    expected = quantize_checkpoint(source, (16, 16))
    weights = convert(source, tmp_path / "work", "feature-extraction").weights
    check_equal(load_tensors(weights), expected)
    assert read_checkpoint_metadata(weights).tasks[0] == "feature-extraction"
