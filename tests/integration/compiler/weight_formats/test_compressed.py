"""Checkpoints of compressed-tensors and Model Optimizer, with values computed by other ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from build_artifacts.errors import UnsupportedModel
from build_artifacts.weight_formats import base
from tests.support.fp8_checkpoints import dequantize_matrix, quantize_matrix
from tests.support.integer_weights import IntegerWeight, pack_compressed, quantize_groups
from tests.support.quantized_checkpoints import (
    MODULE,
    NAME,
    check_equal,
    convert_tensors,
    draw_weight,
)

BF16 = torch.bfloat16


def state_groups(layout: str, *schemes: dict[str, Any]) -> dict[str, Any]:
    groups = {f"group_{place}": {"weights": each} for place, each in enumerate(schemes)}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}


def state_integers(bits: int, size: int | None = None, **more: Any) -> dict[str, Any]:
    strategy = {"strategy": "channel"} if size is None else {"strategy": "group"}
    return {"num_bits": bits, "type": "int", "group_size": size, **strategy, **more}


def name_tensors(stored: dict[str, Tensor], module: str = MODULE) -> dict[str, Tensor]:
    return {f"{module}.{end}": each for end, each in stored.items()}


@pytest.mark.parametrize("part_values", [1 << 24, 700], ids=["whole", "parts"])
@pytest.mark.parametrize("is_reordered", [False, True], ids=["in order", "reordered"])
@pytest.mark.parametrize("is_symmetric", [False, True], ids=["zeros", "symmetric"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_packed_integers_in_groups(
    bits: int,
    is_symmetric: bool,
    is_reordered: bool,
    part_values: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(base, "_MAX_PART_VALUES", part_values)
    options = {"is_symmetric": is_symmetric, "is_reordered": is_reordered}
    weight = quantize_groups(draw_weight(63, 96), bits, 32, dtype=BF16, **options)
    stored = pack_compressed(weight, has_zeros=not is_symmetric, is_reordered=is_reordered)
    plain = {"logit_scale": torch.tensor(2.5), "model.norm.weight": draw_weight(30)}
    unused = {f"{MODULE}.input_scale": torch.ones(1), "model.layers.0.k_scale": torch.ones(1)}
    scheme = state_integers(bits, 32, symmetric=is_symmetric)
    found = convert_tensors(
        tmp_path, plain | unused | name_tensors(stored), state_groups("pack-quantized", scheme)
    )
    check_equal(found, plain | {NAME: weight.compute(BF16)})


def test_packed_rows_may_end_within_a_word(tmp_path: Path) -> None:
    weight = quantize_groups(draw_weight(20, 90), 4, 90, dtype=BF16)
    stored = pack_compressed(weight, has_zeros=True)
    assert stored["weight_packed"].shape == (20, 12)
    config = state_groups("pack-quantized", state_integers(4, symmetric=False))
    check_equal(
        convert_tensors(tmp_path, name_tensors(stored), config), {NAME: weight.compute(BF16)}
    )


def test_zeros_may_be_plain_integers(tmp_path: Path) -> None:
    weight = quantize_groups(draw_weight(20, 96), 4, 32, dtype=BF16)
    stored = pack_compressed(weight, has_zeros=False)
    stored["weight_zero_point"] = torch.from_numpy(weight.zeros - 8).to(torch.int8)
    config = state_groups("pack-quantized", state_integers(4, 32, symmetric=False))
    check_equal(
        convert_tensors(tmp_path, name_tensors(stored), config), {NAME: weight.compute(BF16)}
    )


def test_no_order_is_stated_by_groups_of_minus_one(tmp_path: Path) -> None:
    weight = quantize_groups(draw_weight(20, 96), 4, 32, dtype=BF16)
    stored = pack_compressed(weight, has_zeros=True, is_reordered=True)
    stored["weight_g_idx"].fill_(-1)
    config = state_groups("pack-quantized", state_integers(4, 32, symmetric=False))
    check_equal(
        convert_tensors(tmp_path, name_tensors(stored), config), {NAME: weight.compute(BF16)}
    )


def store_int8(weight: IntegerWeight, *, has_zeros: bool) -> dict[str, Tensor]:
    stored = {"weight": weight.codes - 128, "weight_zero_point": weight.zeros - 128}
    tensors = {name: torch.from_numpy(each).to(torch.int8) for name, each in stored.items()}
    if not has_zeros:
        del tensors["weight_zero_point"]
    return tensors | {"weight_scale": weight.scales}


@pytest.mark.parametrize("size", [96, 32])
@pytest.mark.parametrize("is_symmetric", [False, True], ids=["zeros", "symmetric"])
def test_plain_int8(is_symmetric: bool, size: int, tmp_path: Path) -> None:
    weight = quantize_groups(draw_weight(20, 96), 8, size, dtype=BF16, is_symmetric=is_symmetric)
    tensors = name_tensors(store_int8(weight, has_zeros=not is_symmetric))
    scheme = state_integers(8, None if size == 96 else size, symmetric=is_symmetric)
    found = convert_tensors(tmp_path, tensors, state_groups("int-quantized", scheme))
    check_equal(found, {NAME: weight.compute(BF16)})


def test_one_scale_of_int8_may_apply_to_a_whole_weight(tmp_path: Path) -> None:
    codes = (draw_weight(20, 96) * 40).clamp(-128, 127).to(torch.int8)
    tensors = name_tensors({"weight": codes, "weight_scale": torch.tensor([0.01], dtype=BF16)})
    scheme = {"num_bits": 8, "type": "int", "strategy": "tensor"}
    found = convert_tensors(tmp_path, tensors, state_groups("int-quantized", scheme))
    check_equal(found, {NAME: (codes.float() * torch.tensor(0.01).to(BF16).float()).to(BF16)})


def test_groups_of_weights_may_have_other_schemes(tmp_path: Path) -> None:
    """Formats, bits and blocks of a weight follow from its tensors."""
    four = quantize_groups(draw_weight(20, 96), 4, 32, dtype=BF16)
    eight = quantize_groups(draw_weight(20, 96), 8, 96, dtype=BF16, is_symmetric=True)
    values, scales = quantize_matrix(draw_weight(20, 96), (1, 96), BF16)
    fp8 = {"weight": values, "weight_scale": scales}
    tensors = (
        name_tensors(pack_compressed(four, has_zeros=True))
        | name_tensors(pack_compressed(eight, has_zeros=False), "a.b")
        | name_tensors(fp8, "c")
    )
    config = state_groups(
        "mixed-precision",
        state_integers(4, 32, symmetric=False),
        state_integers(8),
        {"num_bits": 8, "type": "float", "strategy": "channel"},
    )
    layouts = ("pack-quantized", "pack-quantized", "float-quantized")
    for group, layout in zip(config["config_groups"].values(), layouts, strict=True):
        group["format"] = layout
    expected = {
        NAME: four.compute(BF16),
        "a.b.weight": eight.compute(BF16),
        "c.weight": dequantize_matrix(values, scales, (1, 96)),
    }
    check_equal(convert_tensors(tmp_path, tensors, config), expected)


def read_e2m1(code: int) -> float:
    """Return the value of a sign, two bits of exponent with the bias 1, and one of mantissa."""
    sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
    size = 0.5 * mantissa if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
    return -size if sign else size


def draw_nvfp4() -> tuple[Tensor, Tensor, Tensor]:
    """Return packed codes, the first of each pair in the lower bits, their values, and scales."""
    codes = torch.randint(0, 16, (24, 64), generator=torch.Generator().manual_seed(2))
    packed = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)
    values = torch.tensor([[read_e2m1(int(code)) for code in row] for row in codes])
    return packed, values, (draw_weight(24, 4).abs() * 40 + 1).to(torch.float8_e4m3fn)


def test_nvfp4_of_compressed_tensors_divides_by_its_scale(tmp_path: Path) -> None:
    packed, values, scales = draw_nvfp4()
    stored = {
        "weight_packed": packed,
        "weight_scale": scales,
        "weight_global_scale": torch.tensor([700.0]),
        "input_global_scale": torch.tensor([2.0]),
    }
    scheme = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    found = convert_tensors(
        tmp_path, name_tensors(stored), state_groups("nvfp4-pack-quantized", scheme)
    )
    expected = values * (scales.float() / 700).repeat_interleave(16, 1)
    check_equal(found, {NAME: expected.to(BF16)})


def test_model_optimizer_multiplies_by_its_scale(tmp_path: Path) -> None:
    packed, values, scales = draw_nvfp4()
    eights, scale = quantize_matrix(draw_weight(20, 96), None)
    rows, row_scales = quantize_matrix(draw_weight(20, 96), (1, 96))
    tensors = (
        name_tensors({"weight": packed, "weight_scale": scales, "input_scale": torch.ones(())})
        | {f"{NAME}_scale_2": torch.tensor(0.003)}
        | name_tensors({"weight": eights, "weight_scale": scale.reshape(())}, "k_proj")
        | name_tensors({"weight": rows, "weight_scale": row_scales.reshape(-1)}, "v_proj")
        | {"k_proj.k_scale": torch.ones(()), "v_proj.v_scale": torch.ones(())}
    )
    layers = {name: {"quant_algo": "FP8"} for name in ("k_proj", "v_proj")}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    found = convert_tensors(tmp_path, tensors, config | {"quantized_layers": layers})
    factors = (scales.float() * torch.tensor(0.003)).repeat_interleave(16, 1)
    expected = {
        NAME: (values * factors).to(BF16),
        "k_proj.weight": dequantize_matrix(eights, scale, None),
        "v_proj.weight": dequantize_matrix(rows, row_scales, (1, 96)),
    }
    check_equal(found, expected)


INT4 = state_groups("pack-quantized", state_integers(4, 32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_scale": None}, f"no tensor `{NAME}_scale`"),
        ({"weight_shape": None}, f"no tensor `{NAME}_shape`"),
        ({"weight_packed": None}, f"no tensor `{NAME}`"),
        (
            dict.fromkeys(("weight_packed", "weight_scale", "weight_shape"))
            | {"weight": torch.ones(20, 96).to(torch.int8)},
            "states no quantization of this type",
        ),
        ({"weight_scale": torch.ones(20, 4)}, f"`{NAME}_scale` has the shape [20, 4]"),
        ({"weight_shape": torch.tensor([20, 200])}, "not that of a weight of the shape [20, 200]"),
        ({"weight_g_idx": torch.full((96,), 3)}, "states groups from 3 to 3"),
        ({"weight_g_idx": torch.zeros(96)}, "`_g_idx` has the type F32"),
        ({"weight_zero_point": torch.ones(4, 3).int()}, "`_zero_point` has the shape [4, 3]"),
        ({"weight_zero_point": torch.ones(20, 3)}, "`_zero_point` has the type F32"),
        ({"weight_packed": torch.ones(20, 48).byte()}, "states no quantization of this type"),
    ],
)
def test_damaged_checkpoint_is_refused_by_the_name_of_the_tensor(
    changes: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    weight = quantize_groups(draw_weight(20, 96), 4, 32, is_symmetric=True)
    stored = {**pack_compressed(weight, has_zeros=False), **changes}
    tensors = name_tensors({end: each for end, each in stored.items() if each is not None})
    with pytest.raises(UnsupportedModel) as refused:
        convert_tensors(tmp_path, tensors, INT4)
    assert message.replace("`_", f"`{NAME}_") in refused.value.message


def test_inputs_with_factors_are_refused(tmp_path: Path) -> None:
    packed, _, scales = draw_nvfp4()
    tensors = name_tensors({"weight": packed, "weight_scale": scales})
    tensors |= {f"{NAME}_scale_2": torch.tensor(0.1), f"{MODULE}.pre_quant_scale": torch.ones(64)}
    with pytest.raises(UnsupportedModel, match=f"`{MODULE}.pre_quant_scale`"):
        convert_tensors(tmp_path, tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4"})
