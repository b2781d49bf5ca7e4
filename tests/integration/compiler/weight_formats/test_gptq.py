"""GPTQ checkpoints: their values, compared with those of codes that were packed bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from build_artifacts.checkpoints.checkpoint import SAFETENSORS_INDEX_NAME
from build_artifacts.errors import UnsupportedModel
from build_artifacts.weight_formats import base
from tests.support.integer_weights import IntegerWeight, pack_gptq, quantize_groups
from tests.support.quantized_checkpoints import (
    MODULE,
    NAME,
    check_equal,
    convert,
    convert_tensors,
    draw_weight,
    load_tensors,
    write_tensors,
)
from tests.support.tiny_encoders import write_json


def state_gptq(bits: int = 4, size: int = 32, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": False, **more}


def name_tensors(weight: IntegerWeight, zero_offset: int = 1) -> dict[str, Tensor]:
    return {f"{MODULE}.{end}": each for end, each in pack_gptq(weight, zero_offset).items()}


@pytest.mark.parametrize("part_values", [1 << 24, 700], ids=["whole", "parts"])
@pytest.mark.parametrize("is_reordered", [False, True], ids=["in order", "reordered"])
@pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_values_are_codes_less_zeros_times_scales(
    bits: int,
    layout: str,
    is_reordered: bool,
    part_values: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(base, "_MAX_PART_VALUES", part_values)
    weight = quantize_groups(draw_weight(64, 96), bits, 32, is_reordered=is_reordered)
    assert int(weight.zeros.min()) != int(weight.zeros.max())
    plain = {f"{MODULE}.bias": draw_weight(64).half(), "lm_head.weight": draw_weight(9, 64).half()}
    tensors = plain | name_tensors(weight, 1 if layout == "gptq" else 0)
    config = state_gptq(bits, checkpoint_format=layout, desc_act=is_reordered)
    found = convert_tensors(tmp_path, tensors, config, torch_dtype="float16")
    check_equal(found, plain | {NAME: weight.compute(torch.float16)})


@pytest.mark.parametrize(
    ("layout", "zero_offset"),
    [("auto_round:auto_gptq", 1), ("auto_round:gptqmodel", 0), ("auto_round", 0)],
)
def test_auto_round_has_both_layouts(layout: str, zero_offset: int, tmp_path: Path) -> None:
    weight = quantize_groups(draw_weight(64, 96), 4, 32)
    tensors = name_tensors(weight, zero_offset)
    del tensors[f"{MODULE}.g_idx"]
    config = state_gptq() | {"quant_method": "auto-round", "packing_format": layout}
    check_equal(convert_tensors(tmp_path, tensors, config), {NAME: weight.compute(torch.bfloat16)})


@pytest.mark.parametrize("zero", [0, 15])
def test_zeros_are_stored_modulo_the_number_of_codes(zero: int, tmp_path: Path) -> None:
    """One less than the zero 0 is the code 15."""
    weight = quantize_groups(draw_weight(64, 96), 4, 32)
    weight.zeros[3:7] = zero
    found = convert_tensors(tmp_path, name_tensors(weight), state_gptq())
    check_equal(found, {NAME: weight.compute(torch.bfloat16)})


@pytest.mark.parametrize("order", ["absent", "zeros"])
@pytest.mark.parametrize("size", [32, -1])
def test_groups_without_order_are_consecutive(order: str, size: int, tmp_path: Path) -> None:
    weight = quantize_groups(draw_weight(64, 96), 4, 96 if size == -1 else size)
    tensors = name_tensors(weight)
    tensors[f"{MODULE}.g_idx"].zero_()
    if order == "absent":
        del tensors[f"{MODULE}.g_idx"]
    found = convert_tensors(tmp_path, tensors, state_gptq(size=size))
    check_equal(found, {NAME: weight.compute(torch.bfloat16)})


@pytest.mark.parametrize("order", [None, 0, -1])
@pytest.mark.parametrize(("size", "groups"), [(64, 2), (16, 6)])
def test_groups_without_order_have_the_size_in_the_config(
    size: int, groups: int, order: int | None, tmp_path: Path
) -> None:
    tensors = name_tensors(quantize_groups(draw_weight(64, 96), 4, 32))
    indices = tensors.pop(f"{MODULE}.g_idx")
    if order is not None:
        tensors[f"{MODULE}.g_idx"] = torch.full_like(indices, order)
    with pytest.raises(UnsupportedModel) as refused:
        convert_tensors(tmp_path, tensors, state_gptq(size=size))
    assert f"`{MODULE}.scales` has the shape [3, 64]" in refused.value.message
    assert f"needs [{groups}, 64]" in refused.value.message


def test_modules_may_have_other_bits_and_groups_than_the_config(tmp_path: Path) -> None:
    """`dynamic` names modules with patterns, but their tensors tell as much."""
    four = quantize_groups(draw_weight(64, 96), 4, 32)
    eight = quantize_groups(draw_weight(32, 64), 8, 16)
    head = {f"lm_head.{end}": each for end, each in pack_gptq(eight).items()}
    dynamic = {"lm_head": {"bits": 8, "group_size": 16}, "-:.*down_proj": {}}
    plain = {"model.layers.0.mlp.down_proj.weight": draw_weight(8, 64).half()}
    config = state_gptq(dynamic=dynamic, lm_head=True)
    found = convert_tensors(tmp_path, name_tensors(four) | head | plain, config)
    values = {NAME: four, "lm_head.weight": eight}
    check_equal(
        found, plain | {name: each.compute(torch.bfloat16) for name, each in values.items()}
    )


def test_tensors_of_a_weight_may_be_in_several_files(tmp_path: Path) -> None:
    weight = quantize_groups(draw_weight(64, 96), 4, 32)
    tensors = name_tensors(weight)
    source = write_tensors(tmp_path / "source", tensors, state_gptq())
    (source / "model.safetensors").unlink()
    index = {name: f"{place}.safetensors" for place, name in enumerate(tensors)}
    for name, file in index.items():
        save_file({name: tensors[name]}, source / file)
    write_json(source / SAFETENSORS_INDEX_NAME, {"weight_map": index})
    weights = convert(source, tmp_path / "work", "fill-mask").weights
    check_equal(load_tensors(weights), {NAME: weight.compute(torch.bfloat16)})
    assert len(list(weights.glob("*.safetensors"))) == 1


def test_an_early_checkpoint_states_the_quantization_in_another_file(tmp_path: Path) -> None:
    weight = quantize_groups(draw_weight(64, 96), 4, 32)
    source = write_tensors(tmp_path / "source", name_tensors(weight), {})
    write_json(source / "config.json", {"model_type": "bert"})
    write_json(source / "quantize_config.json", {"bits": 4, "group_size": 32})
    weights = convert(source, tmp_path / "work", "fill-mask").weights
    check_equal(load_tensors(weights), {NAME: weight.compute(torch.bfloat16)})
    assert not (weights / "quantize_config.json").exists()


def damage(tensors: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    changes: dict[str, dict[str, Tensor]] = {
        "words": {"qweight": tensors[f"{MODULE}.qweight"][:, :-1].clone()},
        "word type": {"qweight": tensors[f"{MODULE}.qweight"].long()},
        "zeros": {"qzeros": tensors[f"{MODULE}.qzeros"][:-1].clone()},
        "bits": {"qzeros": tensors[f"{MODULE}.qzeros"].repeat(1, 4)},
        "groups": {"g_idx": tensors[f"{MODULE}.g_idx"][:-1].clone()},
        "group": {"g_idx": tensors[f"{MODULE}.g_idx"] + 1},
        "nan": {"scales": tensors[f"{MODULE}.scales"] * torch.nan},
        "twice": {"weight": draw_weight(64, 96)},
        "axes": {"scales": tensors[f"{MODULE}.scales"].flatten()},
    }
    if kind in ("qweight", "qzeros", "scales"):
        return {name: each for name, each in tensors.items() if not name.endswith(kind)}
    return tensors | {f"{MODULE}.{end}": each for end, each in changes[kind].items()}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("qweight", f"no tensor `{MODULE}.qweight`, which its quantized weight `{NAME}` needs"),
        ("qzeros", f"no tensor `{MODULE}.qzeros`"),
        ("scales", f"no tensor `{MODULE}.scales`"),
        ("words", f"tensor `{MODULE}.qweight` has the shape [12, 63]"),
        ("word type", f"tensor `{MODULE}.qweight` has the type I64"),
        ("zeros", f"tensor `{MODULE}.qzeros` has the shape [2, 8]"),
        ("bits", "that of 16 bits for 64 outputs"),
        ("groups", f"tensor `{MODULE}.g_idx` has the shape [95]"),
        ("group", f"tensor `{MODULE}.g_idx` states groups from 1 to 3; its weight has 3 groups"),
        ("nan", f"scales `{MODULE}.scales` have values that are not finite"),
        ("twice", f"the weight `{NAME}` twice"),
        ("axes", f"tensor `{MODULE}.scales` has the shape [192]"),
    ],
)
def test_damaged_checkpoint_is_refused_by_the_name_of_the_tensor(
    kind: str, message: str, tmp_path: Path
) -> None:
    tensors = damage(name_tensors(quantize_groups(draw_weight(64, 96), 4, 32)), kind)
    with pytest.raises(UnsupportedModel) as refused:
        convert_tensors(tmp_path, tensors, state_gptq())
    assert message in refused.value.message
    assert not list((tmp_path / "work").glob("**/*.safetensors"))


def test_values_beyond_fp16_are_refused(tmp_path: Path) -> None:
    weight = quantize_groups(draw_weight(64, 96), 4, 32)
    weight.scales[2, 1] = 60_000
    with pytest.raises(UnsupportedModel, match="has values that are not finite"):
        convert_tensors(tmp_path, name_tensors(weight), state_gptq(), torch_dtype="float16")
