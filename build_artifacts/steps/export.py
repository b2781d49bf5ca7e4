"""Export of an encoder model to an ONNX graph.

`input_names` returns the names of the inputs. The first output is the output of `wrap_for_export`,
in float32. VECTOR models have a second output `tokens`, the unpooled vectors. An engine computes
this output only on request. Batch, length and number of masks are dynamic.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from build_artifacts.checkpoints.architectures import min_trace_tokens
from build_artifacts.checkpoints.export_wrapper import input_names, wrap_for_export
from build_artifacts.checkpoints.metadata import CheckpointMetadata
from build_artifacts.checkpoints.models import TorchModel
from build_artifacts.errors import convert_library_error
from build_artifacts.graph_files import save_graph
from build_artifacts.recipes import ExportRecipe
from deployments.artifacts.types import ModelHead
from deployments.engines.graph_io import MASK_POSITIONS, TOKENS_OUTPUT

Graph = Any  # an onnx_ir.Graph; the library is not typed


def batch_rope_tables(graph: Graph) -> None:
    """Expand the RoPE tables of all opset-23 RotaryEmbedding nodes to the batch, in place.

    The exporter's fusion provides tables [1, T, D/2]. The operator's definition and ONNX Runtime
    reject them for batches larger than one.
    """
    import onnx_ir

    rotated = [node for node in graph if node.op_type == "RotaryEmbedding" and node.domain == ""]
    if not rotated:
        return
    ids = next(value for value in graph.inputs if value.name == "input_ids")
    items = onnx_ir.node("Shape", [ids], {"start": 0, "end": 1})
    ones = onnx_ir.node("Constant", [], {"value_ints": [1, 1]})
    shape = onnx_ir.node("Concat", [items.outputs[0], ones.outputs[0]], {"axis": 0})
    graph.insert_before(graph[0], [items, ones, shape])
    for node in rotated:
        for place in (1, 2):
            repeated = onnx_ir.node("Expand", [node.inputs[place], shape.outputs[0]])
            graph.insert_before(node, repeated)
            node.replace_input_with(place, repeated.outputs[0])


MAX_BATCH = 4096
# Name of the first output; the exporter gives this name to a single output.
MAIN_OUTPUT = "output"


def export(
    model: TorchModel, metadata: CheckpointMetadata, recipe: ExportRecipe, graph: Path
) -> Path:
    """Write the graph of `model` to `graph`; `model` stays unchanged.

    The model must have the dtype of the recipe. Raises UnsupportedModel if the export fails.
    """
    from transformers.exporters import OnnxConfig, OnnxExporter

    names = input_names(model, metadata)
    inputs, shapes = build_example_inputs(
        names, min_trace_tokens(model.config), metadata.max_tokens
    )
    config = OnnxConfig(
        dynamic=True,
        dynamic_shapes=shapes,
        opset_version=recipe.opset,
        ort_fusions=recipe.fusions,
    )
    try:
        rows = wrap_for_export(model, metadata, with_tokens=True)
        with fast_tracing():
            program = OnnxExporter().export(rows, inputs, config=config).program
    except Exception as exc:  # tracing runs model code, which may raise any exception
        raise convert_library_error(
            exc,
            f"`{metadata.architecture}` cannot be exported ({recipe.dtype})",
            hint="the build log has the details; use a supported architecture",
        ) from exc
    batch_rope_tables(program.graph)
    if metadata.head is ModelHead.VECTOR:
        answer, tokens = program.graph.outputs
        answer.name, tokens.name = MAIN_OUTPUT, TOKENS_OUTPUT
    save_graph(program, graph)
    return graph


@contextmanager
def fast_tracing() -> Iterator[None]:
    """Skip collections of garbage and the stack traces of graph nodes within the block.

    Tracing allocates millions of objects, and most of them stay until tracing ends. Collections
    would take 15 % of the time, and a stack trace for each node about 10 %.
    """
    from torch.fx import config

    with_traces = config.do_not_emit_stack_traces
    config.do_not_emit_stack_traces = True
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        config.do_not_emit_stack_traces = with_traces


def build_example_inputs(
    names: tuple[str, ...], min_tokens: int, max_tokens: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return example inputs of 2 x 9 tokens at most, and their dynamic dimensions, by name."""
    import torch

    batch = torch.export.Dim("batch", min=1, max=MAX_BATCH)
    tokens = torch.export.Dim("tokens", min=min_tokens, max=max_tokens)
    ones = torch.ones(2, min(9, max_tokens), dtype=torch.int64)
    values = {
        "input_ids": ones * 2,
        "attention_mask": ones,
        "token_type_ids": torch.zeros_like(ones),
        MASK_POSITIONS: torch.tensor([0, 1, 3]),
    }
    masks = torch.export.Dim("masks", min=1, max=MAX_BATCH * max_tokens)
    shapes = {name: {0: batch, 1: tokens} for name in values} | {MASK_POSITIONS: {0: masks}}
    return {name: values[name] for name in names}, {name: shapes[name] for name in names}
