"""AWQ checkpoints: their values, compared with those of codes that were packed bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from build_artifacts.errors import UnsupportedModel
from build_artifacts.weight_formats import base
from tests.support.integer_weights import pack_awq, quantize_groups
from tests.support.quantized_checkpoints import (
    MODULE,
    NAME,
    check_equal,
    convert_tensors,
    draw_weight,
)


def state_awq(size: int = 32, **more: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm", **more}


# Parts of 700 values are 7 outputs, which end within the words of 8.
@pytest.mark.parametrize("part_values", [1 << 24, 700], ids=["whole", "parts"])
@pytest.mark.parametrize("size", [32, -1])
def test_values_are_codes_less_zeros_times_scales(
    size: int, part_values: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "_MAX_PART_VALUES", part_values)
    weight = quantize_groups(draw_weight(64, 96), 4, 96 if size == -1 else size)
    plain = {"model.layers.0.mlp.down_proj.weight": draw_weight(8, 64).half()}
    packed = {f"{MODULE}.{end}": each for end, each in pack_awq(weight).items()}
    config = state_awq(size, modules_to_not_convert=["down_proj"])
    found = convert_tensors(tmp_path, plain | packed, config, torch_dtype="float16")
    check_equal(found, plain | {NAME: weight.compute(torch.float16)})


def test_early_names_of_fields_are_read(tmp_path: Path) -> None:
    weight = quantize_groups(draw_weight(64, 96), 4, 32)
    packed = {f"{MODULE}.{end}": each for end, each in pack_awq(weight).items()}
    config = {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM"}
    check_equal(convert_tensors(tmp_path, packed, config), {NAME: weight.compute(torch.bfloat16)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qzeros": None}, f"no tensor `{MODULE}.qzeros`"),
        ({"scales": torch.ones(2, 64)}, f"tensor `{MODULE}.scales` has the shape [2, 64]"),
        ({"qzeros": torch.ones(3, 7).int()}, f"tensor `{MODULE}.qzeros` has the shape [3, 7]"),
        ({"qweight": torch.ones(96, 8)}, f"tensor `{MODULE}.qweight` has the type F32"),
    ],
)
def test_damaged_checkpoint_is_refused_by_the_name_of_the_tensor(
    changes: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    stored = {**pack_awq(quantize_groups(draw_weight(64, 96), 4, 32)), **changes}
    tensors = {f"{MODULE}.{end}": each for end, each in stored.items() if each is not None}
    with pytest.raises(UnsupportedModel) as refused:
        convert_tensors(tmp_path, tensors, state_awq())
    assert message in refused.value.message


def test_scales_of_activations_are_refused(tmp_path: Path) -> None:
    weight = quantize_groups(draw_weight(64, 96), 4, 32)
    packed = {f"{MODULE}.{end}": each for end, each in pack_awq(weight).items()}
    tensors = packed | {"model.layers.0.mlp.act.scales": torch.ones(64)}
    with pytest.raises(UnsupportedModel, match=r"divides activations by `.*\.mlp\.act\.scales`"):
        convert_tensors(tmp_path, tensors, state_awq())
