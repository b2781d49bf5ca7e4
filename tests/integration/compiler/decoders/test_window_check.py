"""Check of sliding windows in exported graphs against the config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
)

from build_artifacts.decoders.window_check import check_windows
from build_artifacts.errors import UnsupportedModel

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LOCAL, GLOBAL = "sliding_attention", "full_attention"


def write_graph(path: Path, windows: list[int | None]) -> Path:
    """Write a graph of one attention node per entry; None leaves the attribute out."""
    nodes = [
        helper.make_node(
            "GroupQueryAttention",
            ["q", "k", "v"],
            [f"out{layer}"],
            domain="com.microsoft",
            **({} if window is None else {"local_window_size": window}),
        )
        for layer, window in enumerate(windows)
    ]
    onnx.save(helper.make_model(helper.make_graph(nodes, "tiny", [], [])), path)
    return path


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (LlamaConfig(**SIZES), [-1, -1]),
        (LlamaConfig(**SIZES, sliding_window=32), [-1, None]),
        (MistralConfig(**SIZES, sliding_window=None), [-1, -1]),
        (MistralConfig(**SIZES, sliding_window=32), [32, 32]),
        # transformers reads this config as Ministral, whose windows follow the layer types.
        (MistralConfig(**SIZES, sliding_window=32, layer_types=[LOCAL, GLOBAL]), [32, -1]),
        (Phi3Config(**SIZES, sliding_window=32), [32, 32]),
        (Qwen2Config(**SIZES, sliding_window=32), [-1, -1]),
        (
            Qwen2Config(**SIZES, sliding_window=32, use_sliding_window=True, max_window_layers=1),
            [-1, 32],
        ),
        (Gemma3TextConfig(**SIZES, sliding_window=32, layer_types=[LOCAL, GLOBAL]), [32, -1]),
    ],
)
def test_windows_of_graph_must_equal_those_of_config(
    tmp_path: Path, config: PretrainedConfig, windows: list[int | None]
) -> None:
    config.save_pretrained(tmp_path)
    check_windows(write_graph(tmp_path / "right.onnx", windows), tmp_path, "Tiny")
    wrong = [16 if window in (-1, None) else -1 for window in windows]
    for layers in (wrong, windows[:1]):
        graph = write_graph(tmp_path / "wrong.onnx", layers)
        with pytest.raises(UnsupportedModel, match=r"sliding windows .* of `Tiny`") as caught:
            check_windows(graph, tmp_path, "Tiny")
        assert "onnxruntime-genai" in caught.value.hint
