"""Which quantizations a config may state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from build_artifacts.checkpoints.architectures import check_unquantized, load_config
from build_artifacts.errors import UnsupportedModel
from build_artifacts.weight_formats.gptq import GptqFormat
from build_artifacts.weight_formats.reading import read_float_dtype, read_weight_format
from tests.support.quantized_checkpoints import convert, edit_config
from tests.support.tiny_encoders import tiny_checkpoint, write_json

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AUTO_ROUND = GPTQ | {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
MODELOPT = {"quant_method": "modelopt"}


def state_compressed(layout: str, **weights: Any) -> dict[str, Any]:
    scheme = {"num_bits": 4, "type": "int", "strategy": "channel", **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}},
    }


PACKED = state_compressed("pack-quantized")
FP8 = {"num_bits": 8, "type": "float"}


@pytest.mark.parametrize(
    ("quantization", "title"),
    [
        (GPTQ, "GPTQ with 4 bits"),
        (GPTQ | {"format": "gptq_v2"}, "GPTQ with 4 bits"),
        (AWQ, "AWQ with 4 bits"),
        (AUTO_ROUND, "GPTQ with 4 bits"),
        (AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}, "AWQ with 4 bits"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "fbgemm_fp8"}, "fp8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "4 bits of bitsandbytes"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8 of bitsandbytes"),
        ({"load_in_8bit": True, "load_in_4bit": False}, "int8 of bitsandbytes"),
        (MODELOPT | {"quant_algo": "NVFP4"}, "NVFP4 of Model Optimizer"),
        (PACKED, "int4"),
        (state_compressed("float-quantized", **FP8), "fp8"),
        (PACKED | {"config_groups": {}}, "float types"),
    ],
)
def test_supported_quantization(quantization: dict[str, Any], title: str, tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"quantization_config": quantization})
    found = read_weight_format(tmp_path)
    assert found is not None
    assert found.title == title


def test_null_states_no_field(tmp_path: Path) -> None:
    quantization = GPTQ | {"checkpoint_format": None, "format": "gptq_v2"}
    sizes = {"group_size": None, "q_group_size": 64}
    write_json(tmp_path / "config.json", {"quantization_config": quantization | sizes})
    assert read_weight_format(tmp_path) == GptqFormat(bits=4, group_size=64, zero_offset=0)


def test_quantization_of_the_text_model_counts(tmp_path: Path) -> None:
    text = {"quantization_config": GPTQ, "dtype": "float16"}
    write_json(tmp_path / "config.json", {"text_config": text})
    assert read_weight_format(tmp_path) is not None
    assert read_float_dtype(tmp_path) == "F16"


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (GPTQ | {"bits": 5}, "`bits`: 5"),
        (GPTQ | {"bits": "4"}, "`bits` of the quantization is '4'"),
        (GPTQ | {"group_size": 0}, "`group_size` of the quantization is 0"),
        (GPTQ | {"checkpoint_format": "marlin"}, '`checkpoint_format`: "marlin"'),
        (GPTQ | {"format": "bitblas"}, '`format`: "bitblas"'),
        (GPTQ | {"is_marlin_format": True}, "`is_marlin_format`: true"),
        (AWQ | {"bits": 8}, "`bits`: 8"),
        (AWQ | {"version": "gemv"}, '`version`: "gemv"'),
        (AWQ | {"version": "exllama"}, '`version`: "exllama"'),
        (AWQ | {"version": "ipex"}, '`version`: "ipex"'),
        (AWQ | {"version": None, "format": "gemv"}, '`format`: "gemv"'),
        (AWQ | {"bits": None, "w_bit": 8}, "`w_bit`: 8"),
        (AWQ | {"group_size": None, "q_group_size": 0}, "`q_group_size` of the quantization is 0"),
        (AWQ | {"backend": "llm-awq"}, '`backend`: "llm-awq"'),
        (AUTO_ROUND | {"packing_format": None}, "`packing_format`: null"),
        (AUTO_ROUND | {"data_type": "mx_fp"}, '`data_type`: "mx_fp"'),
        (AUTO_ROUND | {"act_bits": 8}, "`act_bits`: 8"),
        (AUTO_ROUND | {"rotation_config": {"hadamard_type": "x"}}, "`rotation_config`"),
        ({"quant_method": "bitsandbytes"}, "`load_in_4bit`: null"),
        (MODELOPT | {"quant_algo": "W4A8_AWQ"}, '`quant_algo`: "W4A8_AWQ"'),
        (
            MODELOPT
            | {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "MXFP8"}}},
            '`quant_algo`: "MXFP8"',
        ),
        (state_compressed("marlin-24"), '`format`: "marlin-24"'),
        (PACKED | {"format": None}, "`format`: null"),
        (PACKED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, '"sparse-24-bitmask"'),
        (PACKED | {"transform_config": {"config_groups": {"u": {}}}}, "`transform_config`"),
        (state_compressed("pack-quantized", num_bits=3), "`num_bits`: 3"),
        (state_compressed("int-quantized", num_bits=4), "`num_bits`: 4"),
        (state_compressed("pack-quantized", type="float"), '`type`: "float"'),
        (state_compressed("float-quantized", **FP8, symmetric=False), "`symmetric`: false"),
        (state_compressed("pack-quantized", strategy="token"), '`strategy`: "token"'),
    ],
)
def test_other_variants_are_refused_by_the_field(
    quantization: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_json(tmp_path / "config.json", {"quantization_config": quantization})
    with pytest.raises(UnsupportedModel) as refused:
        read_weight_format(tmp_path)
    assert message in refused.value.message


@pytest.mark.parametrize("method", ["hqq", "quark", "torchao"])
def test_other_methods_are_refused_by_their_names(method: str, tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "bert")
    edit_config(source, quantization_config={"quant_method": method, "bits": 4})
    assert convert(source, tmp_path / "work", "fill-mask").directory == source
    with pytest.raises(UnsupportedModel, match=f"the checkpoint is quantized with `{method}`"):
        check_unquantized(load_config(source))
