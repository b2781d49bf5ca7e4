"""Step 3: a checkpoint becomes an ONNX graph that answers one row per text.

The graph of an embedding model pools inside: [B, T] ids in, [B, W] float32 out, not normalised
(the server normalises). A classifier answers its logits. Batch and length are dynamic.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from build_artifacts.errors import UnsupportedModel
from build_artifacts.facts import ModelFacts
from build_artifacts.models import TorchModel, first_line, load_model
from build_artifacts.recipe import ExportRecipe
from build_artifacts.rows import reads_token_types, row_model

MAX_BATCH = 4096
# One protobuf message, which is one file without external data, holds less than this.
MAX_GRAPH_BYTES = (2 << 30) - (8 << 20)


def export(weights: Path, facts: ModelFacts, recipe: ExportRecipe, graph: Path) -> Path:
    """Write the graph of the model in `weights` to `graph`. Raises UnsupportedModel."""
    import onnx_ir
    from transformers.exporters import OnnxConfig, OnnxExporter

    model = load_model(weights, is_embedding=facts.is_embedding, dtype=recipe.dtype)
    _check_size(model)
    inputs, shapes = _sample(model, facts.max_tokens)
    config = OnnxConfig(
        dynamic=True,
        dynamic_shapes=shapes,
        opset_version=recipe.opset,
        ort_fusions=recipe.fusions,
    )
    try:
        model = row_model(model, facts.pooling)
        program = OnnxExporter().export(model, inputs, config=config).program
    except Exception as exc:  # exporters raise whatever the tracer met in the model's code
        raise UnsupportedModel(
            f"`{facts.architecture}` cannot be exported ({recipe.dtype}): {first_line(exc)}",
            hint="the log has the whole story; another architecture may work",
        ) from exc
    onnx_ir.save(program, str(graph))
    return graph


def _sample(model: TorchModel, max_tokens: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Example inputs of 2 x 9 tokens, and which of their dimensions vary how far."""
    import torch

    batch = torch.export.Dim("batch", min=1, max=MAX_BATCH)
    tokens = torch.export.Dim("tokens", min=2, max=max_tokens)
    ones = torch.ones(2, min(9, max_tokens), dtype=torch.int64)
    inputs = {"input_ids": ones * 2, "attention_mask": ones}
    if reads_token_types(model):
        inputs["token_type_ids"] = torch.zeros_like(ones)
    return inputs, {name: {0: batch, 1: tokens} for name in inputs}


def _check_size(model: TorchModel) -> None:
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    if size > MAX_GRAPH_BYTES:
        raise UnsupportedModel(
            f"the weights take {size / 2**30:.1f} GiB, a graph file holds less than 2 GiB",
            hint="build a smaller model",
        )
