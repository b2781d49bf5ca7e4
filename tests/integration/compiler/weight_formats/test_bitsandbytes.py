"""Checkpoints of bitsandbytes: their values, compared with a calculation and with the library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from build_artifacts.errors import UnsupportedModel
from build_artifacts.weight_formats import base
from tests.support.quantized_checkpoints import (
    MODULE,
    NAME,
    check_equal,
    convert_tensors,
    draw_weight,
)

FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True}
EIGHT = {"quant_method": "bitsandbytes", "load_in_8bit": True}


def store_state(kind: str, **state: Any) -> dict[str, Tensor]:
    content = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return {f"{NAME}.quant_state.bitsandbytes__{kind}": content}


def draw_codes(count: int, top: int) -> Tensor:
    return torch.randint(0, top, (count,), generator=torch.Generator().manual_seed(3))


def store_nf4(shape: tuple[int, int]) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors of a weight without nested scales, and its values."""
    count = shape[0] * shape[1]
    codes, table = draw_codes(count, 16), draw_weight(16).sort().values
    scales = draw_weight(-(-count // 64)).abs()
    pairs = torch.cat([codes, codes.new_zeros(count % 2)]).reshape(-1, 2)
    tensors = {
        NAME: (16 * pairs[:, :1] + pairs[:, 1:]).to(torch.uint8),
        f"{NAME}.absmax": scales,
        f"{NAME}.quant_map": table,
    } | store_state("nf4", quant_type="nf4", blocksize=64, dtype="bfloat16", shape=shape)
    values = [table[code] * scales[place // 64] for place, code in enumerate(codes.tolist())]
    return tensors, torch.stack(values).reshape(shape).to(torch.bfloat16)


@pytest.mark.parametrize("part_values", [1 << 24, 700], ids=["whole", "parts"])
@pytest.mark.parametrize("shape", [(24, 64), (9, 50), (3, 33)])
def test_values_of_four_bits_are_those_of_a_table_times_scales(
    shape: tuple[int, int], part_values: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first code of a byte is in its upper bits. Blocks continue from row to row."""
    monkeypatch.setattr(base, "_MAX_PART_VALUES", part_values)
    tensors, expected = store_nf4(shape)
    plain = {"model.norm.weight": draw_weight(8).half()}
    check_equal(convert_tensors(tmp_path, plain | tensors, FOUR), plain | {NAME: expected})


def test_scales_may_be_codes_themselves(tmp_path: Path) -> None:
    shape = (300, 64)  # 300 blocks, with two blocks of scales
    tensors, _ = store_nf4(shape)
    codes, table, outer = draw_codes(300, 256), draw_weight(256), draw_weight(2)
    scales = table[codes] * outer[torch.arange(300) // 256] + 0.25
    values = tensors[f"{NAME}.quant_map"][draw_codes(300 * 64, 16)] * scales.repeat_interleave(64)
    nested = {
        f"{NAME}.absmax": codes.to(torch.uint8),
        f"{NAME}.nested_absmax": outer,
        f"{NAME}.nested_quant_map": table,
    } | store_state("nf4", blocksize=64, shape=shape, nested_blocksize=256, nested_offset=0.25)
    expected = {NAME: values.reshape(shape).to(torch.bfloat16)}
    check_equal(convert_tensors(tmp_path, tensors | nested, FOUR), expected)


def test_codes_may_be_stored_as_another_type(tmp_path: Path) -> None:
    tensors, expected = store_nf4((24, 64))
    tensors[NAME] = tensors[NAME].reshape(-1).view(torch.bfloat16)[:, None]
    check_equal(convert_tensors(tmp_path, tensors, FOUR), {NAME: expected})


@pytest.mark.parametrize("is_nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_of_four_bits_are_those_of_bitsandbytes(
    dtype: torch.dtype, kind: str, is_nested: bool, tmp_path: Path
) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    packed, state = functional.quantize_4bit(
        draw_weight(72, 320).to(dtype), quant_type=kind, compress_statistics=is_nested
    )
    tensors = {f"{NAME}.{end}": each for end, each in state.as_dict(packed=True).items()}
    name = str(dtype).removeprefix("torch.")
    found = convert_tensors(tmp_path, tensors | {NAME: packed}, FOUR, torch_dtype=name)
    check_equal(found, {NAME: functional.dequantize_4bit(packed, state)})


def test_int8_has_the_largest_value_of_each_row_at_127(tmp_path: Path) -> None:
    codes = (draw_weight(20, 30) * 40).clamp(-127, 127).to(torch.int8)
    maxima = draw_weight(20).abs()
    tensors = {NAME: codes, f"{MODULE}.SCB": maxima}
    tensors[f"{MODULE}.weight_format"] = torch.tensor(0, dtype=torch.uint8)
    found = convert_tensors(tmp_path, tensors, EIGHT)
    values = codes.float() * (maxima / 127)[:, None]
    check_equal(found, {NAME: values.to(torch.bfloat16)})


def test_int8_is_that_of_bitsandbytes(tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    codes, maxima, _ = functional.int8_vectorwise_quant(draw_weight(20, 32).half())
    tensors = {NAME: codes, f"{MODULE}.SCB": maxima}
    found = convert_tensors(tmp_path, tensors, EIGHT, torch_dtype="float16")
    expected = functional.int8_vectorwise_dequant(codes, maxima)
    torch.testing.assert_close(found[NAME].float(), expected, atol=0, rtol=2**-11)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({".absmax": None}, f"no tensor `{NAME}.absmax`"),
        ({".quant_map": None}, f"no tensor `{NAME}.quant_map`"),
        (
            dict.fromkeys((".absmax", ".quant_map", ".quant_state.bitsandbytes__nf4")),
            f"no tensor `{NAME}.quant_state.bitsandbytes__nf4`",
        ),
        ({"": torch.zeros(5, 1).byte()}, f"tensor `{NAME}` has the shape [5, 1]"),
        ({".absmax": torch.ones(3)}, f"tensor `{NAME}.absmax` has the shape [3]"),
        ({".absmax": torch.ones(24).byte()}, f"no tensor `{NAME}.nested_absmax`"),
        ({".quant_state.bitsandbytes__nf4": torch.ones(9).byte()}, "has no JSON object"),
        (store_state("nf4", blocksize=63, shape=(24, 64)), "states impossible sizes"),
        (store_state("nf4", blocksize=64, shape=None), "has no JSON object"),
        (store_state("nf4", blocksize=64, shape=(torch.inf,)), "has no JSON object"),
        (store_state("nf4", blocksize=torch.inf, shape=(24, 64)), "has no JSON object"),
        (
            store_state("nf4", blocksize=64, shape=(24, 64), nested_offset=10**400),
            "has no JSON object",
        ),
        (
            {".quant_state.bitsandbytes__nf4": torch.full((99_999,), ord("[")).byte()},
            "has no JSON object",
        ),
        (store_state("nf4", blocksize=64, shape=()), "its weight of the shape [] needs [1, 1]"),
        (store_state("nf4", blocksize=64, shape=(10**400,)), f"`{NAME}` has the shape [768, 1]"),
        (store_state("nf4", blocksize=8 * 10**400, shape=(24, 64)), "states impossible sizes"),
        (
            store_state("nf4", blocksize=64, nested_blocksize=10**400, shape=(24, 64)),
            "states impossible sizes",
        ),
        ({"": torch.zeros(1, 768).byte()}, f"tensor `{NAME}` has the shape [1, 768]"),
        ({"": torch.zeros(384, 1, 2).byte()}, f"tensor `{NAME}` has the shape [384, 1, 2]"),
    ],
)
def test_damaged_checkpoint_is_refused_by_the_name_of_the_tensor(
    changes: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    tensors, _ = store_nf4((24, 64))
    changed = {f"{NAME}{end.removeprefix(NAME)}": each for end, each in changes.items()}
    stored = {name: each for name, each in {**tensors, **changed}.items() if each is not None}
    with pytest.raises(UnsupportedModel) as refused:
        convert_tensors(tmp_path, stored, FOUR)
    assert message in refused.value.message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{MODULE}.SCB": None}, f"no tensor `{MODULE}.SCB`"),
        ({f"{MODULE}.SCB": torch.ones(30)}, f"tensor `{MODULE}.SCB` has the shape [30]"),
        ({f"{MODULE}.weight_format": torch.tensor(2)}, "states a layout for one kind of GPU"),
    ],
)
def test_damaged_int8_is_refused(
    changes: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    tensors = {NAME: torch.ones(20, 30).to(torch.int8), f"{MODULE}.SCB": torch.ones(20), **changes}
    stored = {name: each for name, each in tensors.items() if each is not None}
    with pytest.raises(UnsupportedModel) as refused:
        convert_tensors(tmp_path, stored, EIGHT)
    assert message in refused.value.message
