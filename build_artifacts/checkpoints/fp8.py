"""Configs of checkpoints whose weights are in fp8 (E4M3), with scales.

The formats are transformers' own and `float-quantized` of compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from build_artifacts.checkpoints.checkpoint import (
    CONFIG_NAME,
    Json,
    corrupt_file,
    read_field,
    read_object,
)

FP8_DTYPE = "F8_E4M3"  # name of the type in safetensors files
_QUANTIZATION = "quantization_config"
_DEFAULT_BLOCK_SIZE = [128, 128]  # transformers' own, of a config that states none
_FLOAT_QUANTIZED = "float-quantized"


class ScaleBlock(NamedTuple):
    """Rows and columns of a weight that share a scale. None stands for all of them."""

    rows: int | None
    columns: int | None


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """Names of the scales in a checkpoint, and what each of them scales.

    A weight is its fp8 values times its scales.
    """

    block: ScaleBlock
    scale_suffix: str  # of the name of a weight's scales, after the name of the weight
    unused: tuple[str, ...]  # ends of the names of scales of activations and KV caches

    def find_weight(self, name: str, names: Collection[str]) -> str | None:
        """Return the weight that the tensor `name` scales, or None if it is no scale.

        A tensor such as `logit_scale` belongs to no weight among the `names` of all tensors.
        """
        weight = name.removesuffix(self.scale_suffix)
        is_scale = weight != name and (weight.endswith(".weight") or weight in names)
        return weight if is_scale else None


def read_fp8_format(weights: Path) -> Fp8Format | None:
    """Read the format of weights in fp8 from config.json. Return None for other weights.

    Raises UnsupportedModel for an invalid block size, and the errors of `read_object`.
    """
    path = weights / CONFIG_NAME
    quantization = read_field(path, _QUANTIZATION, dict)
    if quantization is None:  # transformers also reads it there
        quantization = (read_field(path, "text_config", dict) or {}).get(_QUANTIZATION)
    if not isinstance(quantization, dict):
        return None
    match quantization.get("quant_method"):
        case "fp8":
            block = _parse_block(path, quantization.get("weight_block_size", _DEFAULT_BLOCK_SIZE))
            return Fp8Format(block, "_scale_inv", (".activation_scale", "_activation_scale"))
        case "compressed-tensors":
            common = _parse_compressed(path, quantization)
            unused = tuple(f".{each}_scale" for each in ("input", "output", "q", "k", "v"))
            return None if common is None else Fp8Format(common, "_scale", unused)
    return None


def read_unquantized_config(weights: Path) -> dict[str, Json]:
    """Return the object in config.json without the quantization. Raises as `read_object` does."""
    config = read_object(weights / CONFIG_NAME)
    config.pop(_QUANTIZATION, None)
    if isinstance(text := config.get("text_config"), dict):
        text.pop(_QUANTIZATION, None)
    return config


def _parse_compressed(path: Path, quantization: Mapping[str, Json]) -> ScaleBlock | None:
    """Return the one block of all groups, or None if any group has another format."""
    groups = quantization.get("config_groups")
    sparsity = quantization.get("sparsity_config") or {}
    if (
        quantization.get("format") != _FLOAT_QUANTIZED
        or sparsity.get("format", "dense") != "dense"
        or not isinstance(groups, dict)
    ):
        return None
    blocks = {_parse_group(path, group) for group in groups.values()}
    return blocks.pop() if len(blocks) == 1 else None


def _parse_group(path: Path, group: Mapping[str, Json]) -> ScaleBlock | None:
    scheme = group.get("weights") or {}
    is_fp8 = scheme.get("type") == "float" and scheme.get("num_bits") == 8
    is_symmetric = scheme.get("symmetric", True)
    if not (is_fp8 and is_symmetric and group.get("format") in (None, _FLOAT_QUANTIZED)):
        return None
    match scheme.get("strategy"):
        case "tensor":
            return ScaleBlock(None, None)
        case "channel":
            return ScaleBlock(1, None)
        case "block":
            return _parse_block(path, scheme.get("block_structure"))
    return None


def _parse_block(path: Path, size: Json) -> ScaleBlock:
    """Return the block of two sizes, or of null the block of the whole weight."""
    if size is None:
        return ScaleBlock(None, None)
    is_pair = isinstance(size, list) and len(size) == 2
    if not (is_pair and all(isinstance(each, int) and each > 0 for each in size)):
        raise corrupt_file(path, f"the block size of `{_QUANTIZATION}` is not two integers")
    return ScaleBlock(*size)
