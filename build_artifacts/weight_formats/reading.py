"""The format of a checkpoint's quantized weights, as its config states it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from build_artifacts.checkpoints.checkpoint import (
    CONFIG_NAME,
    Json,
    corrupt_file_error,
    read_field,
    read_object,
)
from build_artifacts.errors import UnsupportedModel
from build_artifacts.weight_formats.awq import AWQ_BITS, AwqFormat
from build_artifacts.weight_formats.base import UNQUANTIZED_HINT, WeightFormat
from build_artifacts.weight_formats.bitsandbytes import Bnb4BitFormat, BnbInt8Format
from build_artifacts.weight_formats.compressed import CompressedFormat, Storage
from build_artifacts.weight_formats.fp8 import Fp8Format
from build_artifacts.weight_formats.gptq import GPTQ_BITS, GptqFormat
from build_artifacts.weight_formats.modelopt import MODELOPT_ALGORITHMS, ModeloptFormat
from build_artifacts.weight_formats.scale_grid import ROW, WHOLE, ScaleBlock

T = TypeVar("T")
FloatDtype = Literal["BF16", "F16"]
_QUANTIZATION = "quantization_config"
# Files that stated the quantization before config.json did, with the method of each.
EARLY_CONFIGS: Mapping[str, str] = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
_DEFAULT_BLOCK_SIZE = [128, 128]  # transformers' own, of a config that states none
_DEFAULT_GROUP_SIZE = 128  # of transformers, for GPTQ and AWQ
# Layouts of GPTQ, and what each adds to the zeros that it stores. AutoGPTQ stored one less.
_ZERO_OFFSETS: Mapping[str, int] = {"gptq": 1, "gptq_v2": 0}
# The same for the layouts of AutoRound, whose own one needs no other zero.
_AUTO_ROUND_OFFSETS: Mapping[str, int] = {
    "auto_round:auto_gptq": 1,
    "auto_round:gptqmodel": 0,
    "auto_round": 0,
}
_AUTO_ROUND_AWQ = "auto_round:auto_awq"
_FLOAT_BITS = 16  # of activations that are not quantized
# Formats of compressed-tensors: how each stores weights of a type, and their possible bits.
# Other bits have two layouts: in newer versions only, codes cross the ends of words.
_COMPRESSED: Mapping[tuple[str, str], tuple[Storage, tuple[int, ...]]] = {
    ("float-quantized", "float"): ("fp8", (8,)),
    ("naive-quantized", "float"): ("fp8", (8,)),
    ("int-quantized", "int"): ("int8", (8,)),
    ("naive-quantized", "int"): ("int8", (8,)),
    ("pack-quantized", "int"): ("packed", (2, 4, 8)),
    ("nvfp4-pack-quantized", "float"): ("nvfp4", (4,)),
}


def read_weight_format(weights: Path) -> WeightFormat | None:
    """Return the format of the quantized weights, or None for other weights.

    These are not quantized, or in a format that this package does not read. Raises UnsupportedModel
    for a variant of a format that cannot be built, and for invalid values, and the errors of
    `read_object`.
    """
    path, quantization = _read_quantization(weights)
    if quantization is None:
        return None
    method = quantization.get("quant_method")
    if method is None and {"load_in_4bit", "load_in_8bit"} & quantization.keys():
        method = "bitsandbytes"  # of early configs
    read = _READERS.get(str(method))
    return None if read is None else read(_ConfigObject(path, quantization))


def read_unquantized_config(weights: Path) -> dict[str, Json]:
    """Return the object in config.json without the quantization. Raises as `read_object` does."""
    config = read_object(weights / CONFIG_NAME)
    config.pop(_QUANTIZATION, None)
    if isinstance(text := config.get("text_config"), dict):
        text.pop(_QUANTIZATION, None)
    return config


def read_float_dtype(weights: Path) -> FloatDtype:
    """Return the type of the weights that a conversion writes, in the words of safetensors.

    fp16 if the config states it, else bf16. fp16 keeps three more bits of a value, and a model
    trained in fp16 fits its range. Raises as `read_object` does.
    """
    config = read_object(weights / CONFIG_NAME)
    text = config.get("text_config")
    stated = (config, text if isinstance(text, dict) else {})
    names = {each.get(name) for each in stated for name in ("dtype", "torch_dtype")}
    return "F16" if "float16" in names else "BF16"


def _read_quantization(weights: Path) -> tuple[Path, dict[str, Json] | None]:
    """Return the object that states the quantization, and its file."""
    path = weights / CONFIG_NAME
    quantization = read_field(path, _QUANTIZATION, dict)
    if quantization is None:  # transformers also reads it there
        quantization = (read_field(path, "text_config", dict) or {}).get(_QUANTIZATION)
    if isinstance(quantization, dict):
        return path, quantization
    for name, method in EARLY_CONFIGS.items():
        if stated := read_object(weights / name):
            # The file of Model Optimizer has the object in a field.
            inner = read_field(weights / name, "quantization", dict) or stated
            return weights / name, {"quant_method": method, **inner}
    return path, None


class _ConfigObject(NamedTuple):
    """An object in the config, and the file that has it."""

    path: Path
    values: Mapping[str, Json]

    def read(self, name: str, kind: type[T], default: T) -> T:
        """Return a field. Raises UnsupportedModel for a value of another type."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise corrupt_file_error(self.path, f"`{name}` of the quantization is {value!r}")
        return value

    def find_name(self, *names: str) -> str:
        """Return the first of the names of a field that has a value, else the first."""
        return next((name for name in names if self.values.get(name) is not None), names[0])

    def read_group_size(self) -> int | None:
        """Return the size of groups, or None for one group of all inputs."""
        name = self.find_name("group_size", "q_group_size")
        size = self.read(name, int, _DEFAULT_GROUP_SIZE)
        if size != -1 and size < 1:
            raise corrupt_file_error(self.path, f"`{name}` of the quantization is {size}")
        return None if size == -1 else size

    def read_object(self, name: str) -> _ConfigObject:
        return _ConfigObject(self.path, self.read(name, dict, {}))

    def unsupported(self, name: str, supported: Collection[object]) -> UnsupportedModel:
        value = self.values.get(name)
        shown = "an object" if isinstance(value, dict | list) else json.dumps(value)
        return UnsupportedModel(
            f"the quantization in `{self.path.name}` states `{name}`: {shown}, which cannot be "
            "built",
            hint=f"supported: {', '.join(map(str, supported))}; or {UNQUANTIZED_HINT}",
        )

    def check(self, name: str, value: object, supported: Collection[object]) -> None:
        """Raise UnsupportedModel if the value of the field is none of those."""
        if value not in supported:
            raise self.unsupported(name, supported)


def _read_fp8(config: _ConfigObject) -> Fp8Format:
    size = config.values.get("weight_block_size", _DEFAULT_BLOCK_SIZE)
    return Fp8Format(_parse_block(config.path, size))


def _read_gptq(config: _ConfigObject) -> GptqFormat:
    bits = config.read("bits", int, 0)
    config.check("bits", bits, GPTQ_BITS)
    name = config.find_name("checkpoint_format", "format")
    layout = config.read(name, str, "gptq").lower()
    config.check(name, layout, tuple(_ZERO_OFFSETS))
    config.check("is_marlin_format", config.read("is_marlin_format", bool, False), (False,))
    return GptqFormat(bits, config.read_group_size(), _ZERO_OFFSETS[layout])


def _read_awq(config: _ConfigObject) -> AwqFormat:
    name = config.find_name("bits", "w_bit")
    config.check(name, config.read(name, int, AWQ_BITS), (AWQ_BITS,))
    name = config.find_name("version", "checkpoint_format", "format")
    config.check(name, config.read(name, str, "gemm").lower(), ("gemm",))
    if config.values.get("backend") == "llm-awq":
        raise config.unsupported("backend", ("autoawq",))
    return AwqFormat(config.read_group_size())


def _read_auto_round(config: _ConfigObject) -> WeightFormat:
    """Read the config of AutoRound, which stores weights in the layouts of GPTQ and AWQ."""
    for rotation in ("rotation_config", "spinquant_config"):
        if config.values.get(rotation):
            raise config.unsupported(rotation, ("null",))
    config.check("data_type", config.read("data_type", str, "int"), ("int",))
    if config.read("act_bits", int, _FLOAT_BITS) < _FLOAT_BITS:
        raise config.unsupported("act_bits", (_FLOAT_BITS,))
    layout, bits = config.read("packing_format", str, ""), config.read("bits", int, 0)
    config.check("packing_format", layout, (_AUTO_ROUND_AWQ, *_AUTO_ROUND_OFFSETS))
    is_awq = layout == _AUTO_ROUND_AWQ
    config.check("bits", bits, (AWQ_BITS,) if is_awq else GPTQ_BITS)
    size = config.read_group_size()
    return AwqFormat(size) if is_awq else GptqFormat(bits, size, _AUTO_ROUND_OFFSETS[layout])


def _read_bitsandbytes(config: _ConfigObject) -> WeightFormat:
    is_4_bit = config.read("load_in_4bit", bool, False)
    if not is_4_bit and not config.read("load_in_8bit", bool, False):
        raise config.unsupported("load_in_4bit", (True,))
    return Bnb4BitFormat() if is_4_bit else BnbInt8Format()


def _read_modelopt(config: _ConfigObject) -> ModeloptFormat:
    algorithm = config.read("quant_algo", str, "")
    layers = config.read("quantized_layers", dict, {})
    if algorithm == "MIXED_PRECISION":
        for layer in layers.values():
            each = _ConfigObject(config.path, layer if isinstance(layer, dict) else {})
            each.check("quant_algo", each.read("quant_algo", str, ""), MODELOPT_ALGORITHMS)
    else:
        config.check("quant_algo", algorithm, MODELOPT_ALGORITHMS)
    return ModeloptFormat(algorithm)


def _read_compressed(config: _ConfigObject) -> CompressedFormat:
    sparsity = config.read_object("sparsity_config")
    sparsity.check("format", sparsity.read("format", str, "dense"), ("dense",))
    if config.values.get("transform_config"):  # such as rotated weights
        raise config.unsupported("transform_config", ("null",))
    blocks: dict[tuple[Storage, int], tuple[ScaleBlock, ...]] = {}
    for group in config.read("config_groups", dict, {}).values():
        values = group if isinstance(group, dict) else {}
        layout = {"format": config.values.get("format")} | {
            name: value for name, value in values.items() if value is not None
        }
        kind, block = _parse_group(_ConfigObject(config.path, layout))
        blocks[kind] = tuple(dict.fromkeys((*blocks.get(kind, ()), block)))
    return CompressedFormat(blocks)


def _parse_group(group: _ConfigObject) -> tuple[tuple[Storage, int], ScaleBlock]:
    """Return storage, bits and block of the weights of a group."""
    scheme = group.read_object("weights")
    layout, kind = group.read("format", str, ""), scheme.read("type", str, "int")
    if (layout, kind) not in _COMPRESSED:
        group.check("format", layout, sorted({name for name, _ in _COMPRESSED}))
        raise scheme.unsupported("type", [each for name, each in _COMPRESSED if name == layout])
    storage, possible = _COMPRESSED[layout, kind]
    bits = scheme.read("num_bits", int, 8)
    scheme.check("num_bits", bits, possible)
    if kind == "float":
        scheme.check("symmetric", scheme.read("symmetric", bool, True), (True,))
    strategy = scheme.read("strategy", str, "tensor")
    match strategy:
        case "tensor":
            block = WHOLE
        case "channel":
            block = ROW
        case "group" | "tensor_group":
            block = ScaleBlock(1, scheme.read_group_size())
        case "block":
            block = _parse_block(scheme.path, scheme.values.get("block_structure"))
        case _:
            raise scheme.unsupported("strategy", ("tensor", "channel", "group", "block"))
    return (storage, bits), block


def _parse_block(path: Path, size: Json) -> ScaleBlock:
    """Return the block of two sizes, or of null the block of the whole weight."""
    if size is None:
        return WHOLE
    is_pair = isinstance(size, list) and len(size) == 2
    if not (is_pair and all(isinstance(each, int) and each > 0 for each in size)):
        raise corrupt_file_error(path, f"the block size of `{_QUANTIZATION}` is not two integers")
    return ScaleBlock(*size)


_READERS: Mapping[str, Callable[[_ConfigObject], WeightFormat]] = {
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fp8,
    "gptq": _read_gptq,
    "awq": _read_awq,
    "auto-round": _read_auto_round,
    "bitsandbytes": _read_bitsandbytes,
    "compressed-tensors": _read_compressed,
    "modelopt": _read_modelopt,
}
