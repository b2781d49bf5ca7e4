"""One tiny model in the format of each engine, and the expected outputs of the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from deployments.artifacts.types import ModelHead
from deployments.engines.graph_io import MASK_POSITIONS, TOKENS_OUTPUT
from tests.support.artifacts import WIDTH, word_vectors

WORDS = 20
MASK_TOKEN = 4
NAN_WORD = 13
NAMES = ("input_ids", "attention_mask", "token_type_ids")
# Heads whose output for an item is one vector.
ONE_VECTOR = (ModelHead.VECTOR, ModelHead.LABELS, ModelHead.SPARSE)


def vectors() -> NDArray[np.float32]:
    """Return one vector per word, [WORDS, WIDTH]. The vector of NAN_WORD is NaN."""
    table = word_vectors(WORDS)
    table[NAN_WORD] = np.nan
    return table


def expected(
    head: ModelHead, ids: NDArray[np.int32], second_segment_start: int
) -> NDArray[np.float32]:
    """Compute the output for one item.

    A pooled head returns the mean of the word vectors plus the share of tokens in the second
    segment. Other heads add this pooled vector to the vector of each token, or of each mask token.
    """
    words = vectors()[ids]
    pooled = words.mean(axis=0) + np.float32((len(ids) - second_segment_start) / len(ids))
    if head in ONE_VECTOR:
        return pooled
    if head is ModelHead.MASKS:
        return words[ids == MASK_TOKEN] + pooled
    return words + pooled


def list_inputs(head: ModelHead) -> tuple[str, ...]:
    return (*NAMES, MASK_POSITIONS) if head is ModelHead.MASKS else NAMES


def write_onnx(path: Path, head: ModelHead) -> None:
    """Write the model as an ONNX graph. With ModelHead.VECTOR it also outputs token vectors."""
    node = helper.make_node
    nodes = [
        node("Gather", ["vectors", "input_ids"], ["words"]),
        node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        node("Cast", ["token_type_ids"], ["types"], to=TensorProto.FLOAT),
        node("Unsqueeze", ["mask", "last"], ["mask3"]),
        node("Mul", ["words", "mask3"], ["seen"]),
        node("ReduceSum", ["seen", "one"], ["total"], keepdims=1),
        node("ReduceSum", ["mask3", "one"], ["count"], keepdims=1),
        node("ReduceSum", ["types", "one"], ["second"], keepdims=1),
        node("Unsqueeze", ["second", "last"], ["second3"]),
        node("Add", ["total", "second3"], ["sum"]),
        node("Div", ["sum", "count"], ["pooled3"]),
        *_head_nodes(head),
    ]
    outputs = ["output"]
    if head is ModelHead.VECTOR:
        nodes.append(node("Add", ["words", "pooled3"], [TOKENS_OUTPUT]))
        outputs.append(TOKENS_OUTPUT)
    tables = {
        "vectors": vectors(),
        "last": np.array([-1]),
        "one": np.array([1]),
        "flat": np.array([-1, WIDTH]),
    }
    write_model(path, nodes, tables, list_inputs(head), outputs=outputs)


def _head_nodes(head: ModelHead) -> list[onnx.NodeProto]:
    node = helper.make_node
    if head in ONE_VECTOR:
        return [node("Squeeze", ["pooled3", "one"], ["output"])]
    if head is ModelHead.MASKS:
        return [
            node("Add", ["words", "pooled3"], ["each"]),
            node("Reshape", ["each", "flat"], ["rows"]),
            node("Gather", ["rows", MASK_POSITIONS], ["output"]),
        ]
    return [node("Add", ["words", "pooled3"], ["output"])]


def write_model(
    path: Path,
    nodes: list[onnx.NodeProto],
    tables: dict[str, NDArray],
    inputs: tuple[str, ...],
    *,
    opset: int = 20,
    outputs: Sequence[str] = ("output",),
) -> None:
    """Write a graph from int64 inputs to float outputs of unknown shape."""
    given = [
        helper.make_tensor_value_info(
            name, TensorProto.INT64, ["M"] if name == MASK_POSITIONS else ["B", "T"]
        )
        for name in inputs
    ]
    graph = helper.make_graph(
        nodes,
        "tiny",
        given,
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(table, name) for name, table in tables.items()],
    )
    opsets = [helper.make_opsetid("", opset)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)


def write_torch(path: Path, head: ModelHead) -> None:
    """Write the model as a torch program."""
    import torch

    from deployments.engines.pytorch.program import write_program

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("vectors", torch.from_numpy(vectors()))

        def forward(self, input_ids, attention_mask, token_type_ids, mask_positions=None):
            words = self.vectors[input_ids]
            mask = attention_mask.float()[..., None]
            total = (words * mask).sum(1) + token_type_ids.float().sum(1, keepdim=True)
            pooled = total / mask.sum(1)
            if head in ONE_VECTOR:
                return pooled
            each = words + pooled[:, None]
            return each if head is not ModelHead.MASKS else each.reshape(-1, WIDTH)[mask_positions]

    sizes = {"batch": torch.export.Dim("batch"), "tokens": torch.export.Dim("tokens")}
    example = {name: torch.ones(2, 3, dtype=torch.int64) for name in NAMES}
    shapes: dict[str, object] = {name: (sizes["batch"], sizes["tokens"]) for name in NAMES}
    if head is ModelHead.MASKS:
        example[MASK_POSITIONS] = torch.arange(2)
        shapes[MASK_POSITIONS] = (torch.export.Dim("masks"),)
    with torch.no_grad():
        write_program(torch.export.export(Model(), (), example, dynamic_shapes=shapes), path)
