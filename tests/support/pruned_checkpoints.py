"""Tiny random encoders with the zeros that pruning methods leave.

Each encoder has 2 layers with 4 heads of width 8 and 64 feed-forward channels. Biases are
random, not zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from build_artifacts.checkpoints.models import TorchModel

LAYERS, ATTENTION_HEADS, WIDTH, ROWS = 2, 4, 8, 64
HIDDEN = ATTENTION_HEADS * WIDTH
VOCABULARY = 320
POSITIONS = 64

Prune = Callable[["Layer"], None]


@dataclass(frozen=True, slots=True)
class Layer:
    """Linear layers of one encoder layer, by their names in the checkpoint."""

    query: Any
    key: Any
    value: Any
    attention_output: Any
    ffn_up: Any
    ffn_down: Any


_BERT = ("encoder.layer", *(f"attention.self.{name}" for name in ("query", "key", "value")),
         "attention.output.dense", "intermediate.dense", "output.dense")  # fmt: skip
_NAMES = {
    "distilbert": ("transformer.layer", *(f"attention.{name}_lin" for name in ("q", "k", "v")),
                   "attention.out_lin", "ffn.lin1", "ffn.lin2"),
    "mpnet": ("encoder.layer", *(f"attention.attn.{name}" for name in ("q", "k", "v", "o")),
              "intermediate.dense", "output.dense"),
    "deberta-v2": ("encoder.layer", "attention.self.query_proj", "attention.self.key_proj",
                   "attention.self.value_proj", "attention.output.dense", "intermediate.dense",
                   "output.dense"),
}  # fmt: skip


def encoder(model_type: str, kind: str = "AutoModel", **settings: Any) -> TorchModel:
    """Create a random model whose outputs differ clearly by text. `kind` is an auto class."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(model_type, **_sizes(model_type), **settings)
    torch.manual_seed(0)
    model = getattr(transformers, kind).from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def size(model: TorchModel) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def _sizes(model_type: str) -> dict[str, Any]:
    shared: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS}
    if model_type == "distilbert":
        return {
            **shared,
            "dim": HIDDEN,
            "hidden_dim": ROWS,
            "n_layers": LAYERS,
            "n_heads": ATTENTION_HEADS,
        }
    sizes: dict[str, Any] = {
        **shared,
        "hidden_size": HIDDEN,
        "intermediate_size": ROWS,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": ATTENTION_HEADS,
        "pad_token_id": 1,
    }
    if model_type == "deberta-v2":
        sizes |= {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
    return sizes


def layer(model: TorchModel, index: int) -> Layer:
    """Return layer `index` of a known architecture."""
    stack, *paths = _NAMES.get(model.config.model_type, _BERT)
    modules = dict(model.base_model.get_submodule(stack)[index].named_modules())
    return Layer(*(modules[path] for path in paths))


def zero_rows(linear: Any, outputs: Iterable[int]) -> None:
    """Zero the weights of these outputs of `linear`. Biases remain."""
    linear.weight.data[list(outputs)] = 0


def zero_columns(linear: Any, columns: Iterable[int]) -> None:
    """Zero the weights of these inputs of `linear`."""
    linear.weight.data[:, list(columns)] = 0


def channels(*heads: int) -> list[int]:
    """Return the rows of a projection that belong to `heads`."""
    return [head * WIDTH + i for head in heads for i in range(WIDTH)]


def ignored_heads(at: Layer) -> None:
    zero_columns(at.attention_output, channels(1, 3))


def blind_heads(at: Layer) -> None:
    zero_rows(at.value, channels(0, 2))


def half_blind_half_ignored_head(at: Layer) -> None:
    zero_rows(at.value, channels(1)[:3])
    zero_columns(at.attention_output, channels(1)[3:])


def blind_rows(at: Layer) -> None:
    zero_rows(at.ffn_up, range(8, 40))


def ignored_rows(at: Layer) -> None:
    zero_columns(at.ffn_down, [*range(4), 63])


def everything(at: Layer) -> None:
    for linear in (at.query, at.key, at.value, at.attention_output, at.ffn_up, at.ffn_down):
        zero_rows(linear, range(linear.out_features))


def pruned_encoder(model_type: str, kind: str = "AutoModel", **settings: Any) -> TorchModel:
    """Create an `encoder` with zeroed heads and channels. PRUNED lists the removable parts."""
    model = encoder(model_type, kind, **settings)
    ignored_heads(layer(model, 0))
    blind_rows(layer(model, 0))
    zero_rows(layer(model, 1).value, channels(0))
    ignored_rows(layer(model, 1))
    return model


# For each layer of `pruned_encoder`: the removable heads and feed-forward channels.
PRUNED = (((1, 3), tuple(range(8, 40))), ((0,), (0, 1, 2, 3, 63)))


def answers(model: TorchModel) -> NDArray[np.float32]:
    """Run three texts of 13, 5 and 1 tokens in one padded batch, then the longest text alone.

    Return all outputs except values at padding.
    """
    import torch

    ids, mask = padded_batch()
    with torch.inference_mode():
        together = model(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask))[0]
        alone = model(input_ids=torch.from_numpy(ids[:1]))[0]
    if together.dim() == 3:
        together = together[torch.from_numpy(mask).bool()]
    outputs = torch.cat([together.flatten(), alone.flatten()])
    return np.asarray(outputs.float().numpy())


def padded_batch() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return token ids and mask, [3, 13], of texts with 13, 5 and 1 tokens."""
    ids = np.random.default_rng(0).integers(5, 100, size=(3, 13))
    mask = (np.arange(13) < np.array([[13], [5], [1]])).astype(np.int64)
    return np.where(mask == 1, ids, 1), mask


def exported(model: TorchModel, graph: Path, **settings: Any) -> Path:
    """Write `model` to `graph` with the exporter that builds use. Return `graph`."""
    import onnx_ir
    import torch
    from transformers.exporters import OnnxConfig, OnnxExporter

    batch = torch.export.Dim("batch", min=1, max=64)
    tokens = torch.export.Dim("tokens", min=2, max=POSITIONS - 2)
    ones = torch.ones(2, 9, dtype=torch.int64)
    inputs = {"input_ids": ones * 2, "attention_mask": ones}
    shapes = {name: {0: batch, 1: tokens} for name in inputs}
    config = OnnxConfig(dynamic=True, dynamic_shapes=shapes, **settings)
    onnx_ir.save(OnnxExporter().export(model, inputs, config=config).program, str(graph))
    return graph


def graph_answers(graph: Path) -> NDArray[np.float32]:
    """Return the values of `answers` for a graph with one output [B, T, H]."""
    import onnxruntime

    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    ids, mask = padded_batch()
    outputs = session.run(None, {"input_ids": ids, "attention_mask": mask})[0][mask == 1]
    alone = session.run(None, {"input_ids": ids[:1], "attention_mask": mask[:1]})[0]
    return np.concatenate([outputs.ravel(), np.asarray(alone).ravel()])
