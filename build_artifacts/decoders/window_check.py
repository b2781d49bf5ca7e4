"""Comparison of the sliding windows in a graph with those of the config.

The texts of the accuracy gate are shorter than most windows. An error appears only in longer texts.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from build_artifacts.checkpoints.architectures import load_config
from build_artifacts.errors import UnsupportedModel
from deployments.engines.layer_types import read_windows

if TYPE_CHECKING:
    import onnx

_ATTENTION = ("GroupQueryAttention", "MultiHeadAttention")  # MultiHeadAttention has no window


def check_windows(graph: Path, weights: Path, architecture: str) -> None:
    """Compare the window of each attention node of `graph` with the config in `weights`.

    Raises UnsupportedModel if a window differs, or if the number of attention nodes differs from
    the number of layers.
    """
    import onnx

    model = onnx.load(graph, load_external_data=False)
    actual = [_read_window(node) for node in model.graph.node if node.op_type in _ATTENTION]
    expected = read_windows(load_config(weights))
    if actual != expected:
        raise UnsupportedModel(
            f"sliding windows in the exported graph of `{architecture}` differ from transformers: "
            f"{_describe(actual)} instead of {_describe(expected)}",
            hint="onnxruntime-genai's model builder implements the window of this model "
            "differently; build another model",
        )


def _read_window(node: onnx.NodeProto) -> int | None:
    """Return `local_window_size` in tokens, None if it is missing or negative."""
    sizes = [int(value.i) for value in node.attribute if value.name == "local_window_size"]
    return sizes[0] if sizes and sizes[0] >= 0 else None


def _describe(windows: list[int | None]) -> str:
    """Describe windows by size, such as "32 tokens in 4 of 8 layers"."""
    sizes = sorted({window for window in windows if window is not None})
    parts = [f"{size} tokens in {windows.count(size)}" for size in sizes]
    return f"{', '.join(parts) or 'none'} of {len(windows)} layers"
