"""Conversion of an ONNX graph back to a transformers checkpoint in fp32.

Exporters name a node after its torch module, such as `/bert/pooler/dense/MatMul`. They keep the
names of parameters that need no transposition. Quantizers append a suffix to node names. This
module derives the parameter names and reads three kinds of weights: blocks of 4 or 8 bits
(`MatMulNBits`), tables that `DequantizeLinear` reads, and floats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from build_artifacts.checkpoints.architectures import config_errors, load_config, read_model_class
from build_artifacts.checkpoints.checkpoint import CONFIG_NAME, Checkpoint, copy_without_weights
from build_artifacts.checkpoints.file_formats import ORIGINAL_HINT
from build_artifacts.errors import UnsupportedModel, convert_library_error, first_line

WeightArray = NDArray[Any]
Arrays = Mapping[str, WeightArray]
Names = Mapping[str, str]
Node = Any  # an onnx.NodeProto; the library is not typed


def dequantize_onnx(checkpoint: Checkpoint, into: Path) -> None:
    """Write the checkpoint to `into`, with its weights as safetensors.

    Raises UnsupportedModel if the weights cannot be read, do not fit, or some are missing.
    """
    import torch
    import transformers

    file = checkpoint.packed
    assert file is not None, "bug: dequantize without an ONNX file"
    weights = read_weights(file)
    config = load_config(checkpoint.weights)
    architecture = read_model_class(checkpoint.weights) or "none"
    model_class: Any = getattr(transformers, architecture, None)
    is_class = isinstance(model_class, type)
    if not is_class or not issubclass(model_class, transformers.PreTrainedModel):
        raise UnsupportedModel(
            f"transformers has no class `{architecture}`, which config.json names",
            hint=ORIGINAL_HINT,
        )
    with config_errors(CONFIG_NAME):
        model = model_class(config)
    try:
        found = model.load_state_dict(
            {name: torch.from_numpy(value.copy()) for name, value in weights.items()}, strict=False
        )
    except RuntimeError as exc:
        raise UnsupportedModel(
            f"the weights in `{file.name}` do not fit `{architecture}`: {first_line(exc)}",
            hint=ORIGINAL_HINT,
        ) from exc
    absent = set(found.missing_keys)
    # A model without a task head returns embeddings. Its export has no pooler.
    unused = {name for name in absent if model.base_model is model and name.startswith("pooler.")}
    if missing := absent - unused:
        raise UnsupportedModel(
            f"`{file.name}` has no readable weights for `{min(missing)}`",
            hint="fused and int8 MatMuls are not read: pass a 4-bit or float export, or build from "
            "the original safetensors checkpoint",
        )
    copy_without_weights(checkpoint.directory, into, weights=checkpoint.weights)
    state = model.float().state_dict()
    model.save_pretrained(into, state_dict={n: v for n, v in state.items() if n not in unused})


def read_weights(file: Path) -> dict[str, WeightArray]:
    """Read the weights of the three kinds as fp32, by the names of their torch parameters.

    Other float constants of the graph keep their own names. Raises UnsupportedModel if the graph is
    corrupt or has external data.
    """
    import onnx
    from onnx import numpy_helper

    try:
        graph = onnx.load(file, load_external_data=False).graph
        tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    except Exception as exc:  # protobuf errors, and tensors with external data
        raise convert_library_error(
            exc,
            f"`{file.name}` cannot be read",
            hint="pass a graph in one file, without external data",
        ) from exc
    weights = {
        name: value.astype(np.float32)
        for name, value in tensors.items()
        if value.dtype in (np.float16, np.float32)
    }
    # The graph gathers rows of a quantized table before it dequantizes the rows. The input of
    # DequantizeLinear is then the output of Gather, not the table.
    sources = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Gather"}
    for node in graph.node:
        read = _READERS.get(node.op_type)
        if read is not None and len(node.input) > 1 and node.input[1] in tensors:
            with _node_errors(node):
                weights.update(read(node, tensors, sources))
    return weights


@contextmanager
def _node_errors(node: Node) -> Iterator[None]:
    """Convert errors for missing inputs and attributes and for other shapes to UnsupportedModel."""
    try:
        yield
    except (LookupError, ValueError, TypeError) as exc:
        raise UnsupportedModel(
            f"the node `{node.name or node.output[0]}` ({node.op_type}) cannot be read: "
            f"{first_line(exc)}",
            hint=ORIGINAL_HINT,
        ) from exc


def _read_blocks(node: Node, tensors: Arrays, _sources: Names) -> dict[str, WeightArray]:
    """Read the weight [N, K] of a MatMulNBits (ONNX Runtime's contrib operators)."""
    attributes = _read_integers(node)
    rows, columns, bits = attributes["N"], attributes["K"], attributes.get("bits", 4)
    if len(node.input) > 4 and node.input[4]:
        raise ValueError("its columns have scales in another order (`g_idx`)")
    if bits not in (4, 8):
        raise ValueError(f"its weights have {bits} bits, and only 4 and 8 are read")
    scales = tensors[node.input[2]].reshape(rows, -1).astype(np.float32)
    blocks = scales.shape[1]
    values = _unpack(tensors[node.input[1]].reshape(rows, blocks, -1), bits)
    zeros = np.full((rows, blocks), 1 << (bits - 1), np.float32)
    if len(node.input) > 3 and node.input[3]:
        given = tensors[node.input[3]]
        unpacked = _unpack(given.reshape(rows, -1), bits) if given.dtype == np.uint8 else given
        zeros = unpacked.reshape(rows, -1)[:, :blocks].astype(np.float32)
    weight = (values - zeros[..., None]) * scales[..., None]
    return {_parameter_name(node): weight.reshape(rows, -1)[:, :columns]}


def _unpack(packed: WeightArray, bits: int) -> WeightArray:
    """Unpack bytes to floats. A byte of two 4-bit values has the first value in its lower half."""
    if bits == 8:
        return packed.astype(np.float32)
    halves = np.stack([packed & 15, packed >> 4], axis=-1)
    return halves.reshape(*packed.shape[:-1], -1).astype(np.float32)


def _read_table(node: Node, tensors: Arrays, sources: Names) -> dict[str, WeightArray]:
    """Read the table of a DequantizeLinear with scales for all, per axis index, or per block."""
    name = sources.get(node.input[0], node.input[0])
    if name not in tensors:
        return {}
    values, scale = tensors[name], tensors[node.input[1]].astype(np.float32)
    has_zeros = len(node.input) > 2 and node.input[2]
    zero = tensors[node.input[2]] if has_zeros else np.zeros_like(scale)
    zero = zero.astype(np.float32)
    if scale.ndim:
        attributes = _read_integers(node)
        axis = attributes.get("axis", 1) % values.ndim
        if block := attributes.get("block_size", 0):  # the last block may be smaller
            every = np.arange(values.shape[axis]) // block
            scale, zero = scale.take(every, axis), zero.take(every, axis)
        else:
            shape = [-1 if i == axis else 1 for i in range(values.ndim)]
            scale, zero = scale.reshape(shape), zero.reshape(shape)
    table = (values.astype(np.float32) - zero) * scale
    return {name.removesuffix("_quantized"): table}


def _read_product(node: Node, tensors: Arrays, _sources: Names) -> dict[str, WeightArray]:
    """Read a float weight. Transpose it for a MatMul, and for a Gemm without transB."""
    weight = tensors[node.input[1]].astype(np.float32)
    as_torch = node.op_type == "Gemm" and _read_integers(node).get("transB", 0)
    return {_parameter_name(node): weight if as_torch else weight.T}


def _read_integers(node: Node) -> dict[str, int]:
    return {attribute.name: attribute.i for attribute in node.attribute}


def _parameter_name(node: Node) -> str:
    """Return `bert.pooler.dense.weight` for a node `/bert/pooler/dense/MatMul_Q4`."""
    module: str = node.name.strip("/").rpartition("/")[0]
    return module.replace("/", ".") + ".weight"


_READERS: Mapping[str, Callable[[Node, Arrays, Names], dict[str, WeightArray]]] = {
    "MatMulNBits": _read_blocks,
    "DequantizeLinear": _read_table,
    "MatMul": _read_product,
    "Gemm": _read_product,
}
