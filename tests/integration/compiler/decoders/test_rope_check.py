"""Check of RoPE tables in exported graphs against transformers, up to the last position."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    PhiConfig,
    PretrainedConfig,
    SmolLM3Config,
)
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

from build_artifacts.checkpoints.metadata import CheckpointMetadata
from build_artifacts.decoders.export import export_decoder
from build_artifacts.decoders.rope_check import check_head_size, check_rope
from build_artifacts.errors import UnsupportedModel
from build_artifacts.recipes import DECODER_FP32
from deployments.artifacts.types import TaskName
from tests.support.checkpoint_metadata import read_checkpoint_metadata
from tests.support.tiny_decoders import tiny_nemotron

POSITIONS, HEAD = 131_072, 32
SIZES = {
    "vocab_size": 96, "hidden_size": 2 * HEAD, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": POSITIONS,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
    "original_max_position_embeddings": POSITIONS // 4,
}  # fmt: skip

ExpectedTables = tuple[np.ndarray, np.ndarray]


def build_metadata(tokens: int = POSITIONS) -> CheckpointMetadata:
    tasks = (TaskName.TEXT_GENERATION,)
    return CheckpointMetadata(
        tasks=tasks, architecture="TinyForCausalLM", max_tokens=tokens, output_width=96
    )


def tables_of(module: Any, layer_type: str | None = None) -> ExpectedTables:
    """Return cosines and sines [positions, rotated channels / 2] of a transformers module.

    The module repeats each table in a second half, which graphs leave out.
    """
    how = {} if layer_type is None else {"layer_type": layer_type}
    with torch.inference_mode():
        tables = module(torch.zeros(1), torch.arange(POSITIONS)[None], **how)
    cosines, sines = (table[0, :, : table.shape[-1] // 2].numpy() for table in tables)
    return cosines, sines


def write_checkpoint(directory: Path, config: PretrainedConfig) -> Path:
    config.save_pretrained(directory)
    return directory


def write_graph(
    path: Path,
    layers: list[str | None],
    tables: Mapping[str, ExpectedTables],
    dtype: type = np.float32,
) -> Path:
    """Write a graph of one attention node per entry of `layers`.

    An entry is the name of the layer's RoPE tables, or None for a layer without tables.
    """
    stored = {
        f"{part}_{name}": table.astype(dtype)
        for name, both in tables.items()
        for part, table in zip(("cos", "sin"), both, strict=True)
    }
    nodes = [
        helper.make_node(
            "GroupQueryAttention",
            [*"qkv", "", "", "lengths", "total", *([f"cos_{name}", f"sin_{name}"] if name else [])],
            [f"out{layer}"],
            domain="com.microsoft",
        )
        for layer, name in enumerate(layers)
    ]
    given = [numpy_helper.from_array(table, name) for name, table in stored.items()]
    model = helper.make_model(helper.make_graph(nodes, "tiny", [], [], given))
    onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data")
    return path


def llama(rope: Mapping[str, Any]) -> LlamaConfig:
    return LlamaConfig(**SIZES, rope_parameters=dict(rope))


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("rope", [DEFAULT, YARN], ids=["default", "yarn"])
def test_rope_tables_of_transformers_are_accepted(
    tmp_path: Path, rope: Mapping[str, Any], dtype: type
) -> None:
    config = llama(rope)
    weights = write_checkpoint(tmp_path, config)
    tables = {"all": tables_of(LlamaRotaryEmbedding(config))}
    graph = write_graph(tmp_path / "model.onnx", ["all", "all"], tables, dtype)
    check_rope(graph, weights, build_metadata())


@pytest.mark.parametrize("rope_type", ["yarn", "linear", "longrope"])
def test_ignored_rope_type_is_rejected_by_name(tmp_path: Path, rope_type: str) -> None:
    tables = {"all": tables_of(LlamaRotaryEmbedding(llama(DEFAULT)))}
    graph = write_graph(tmp_path / "model.onnx", ["all", "all"], tables)
    factors = {f"{length}_factor": [2.0] * (HEAD // 2) for length in ("short", "long")}
    weights = write_checkpoint(tmp_path, llama(YARN | factors | {"rope_type": rope_type}))
    with pytest.raises(UnsupportedModel, match=rf"`TinyForCausalLM` .* type is `{rope_type}`"):
        check_rope(graph, weights, build_metadata(POSITIONS // 4))


def test_error_at_last_position_is_rejected(tmp_path: Path) -> None:
    config = llama(DEFAULT)
    cosines, sines = tables_of(LlamaRotaryEmbedding(config))
    cosines[100_000:] += 0.2
    graph = write_graph(tmp_path / "model.onnx", ["all"], {"all": (cosines, sines)})
    weights = write_checkpoint(tmp_path, config)
    with pytest.raises(UnsupportedModel, match="rope type is `default`"):
        check_rope(graph, weights, build_metadata())
    check_rope(graph, weights, build_metadata(tokens=100_000))


def test_short_rope_tables_are_rejected(tmp_path: Path) -> None:
    config = llama(DEFAULT)
    cosines, sines = tables_of(LlamaRotaryEmbedding(config))
    short = {"all": (cosines[:4096], sines[:4096])}
    graph = write_graph(tmp_path / "model.onnx", ["all"], short)
    weights = write_checkpoint(tmp_path, config)
    check_rope(graph, weights, build_metadata(tokens=4096))
    with pytest.raises(UnsupportedModel):
        check_rope(graph, weights, build_metadata(tokens=4097))


def test_partial_rotation_is_accepted(tmp_path: Path) -> None:
    config = PhiConfig(**SIZES | {"num_key_value_heads": 2}, partial_rotary_factor=0.5)
    tables = {"all": tables_of(PhiRotaryEmbedding(config))}
    assert tables["all"][0].shape == (POSITIONS, HEAD // 4)
    graph = write_graph(tmp_path / "model.onnx", ["all", "all"], tables)
    check_rope(graph, write_checkpoint(tmp_path, config), build_metadata())


def test_rope_tables_follow_layer_types(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**SIZES, head_dim=HEAD, layer_types=kinds)
    module = Gemma3RotaryEmbedding(config)
    tables = {kind: tables_of(module, kind) for kind in kinds}
    weights = write_checkpoint(tmp_path, config)
    right = write_graph(tmp_path / "right.onnx", [*kinds], tables)
    check_rope(right, weights, build_metadata())
    wrong = write_graph(tmp_path / "wrong.onnx", [kinds[1], kinds[1]], tables)
    with pytest.raises(UnsupportedModel):
        check_rope(wrong, weights, build_metadata())


def test_layer_without_rope_is_ignored(tmp_path: Path) -> None:
    config = SmolLM3Config(**SIZES, no_rope_layers=[0, 1], rope_parameters=dict(DEFAULT))
    tables = {"all": tables_of(LlamaRotaryEmbedding(llama(DEFAULT)))}
    graph = write_graph(tmp_path / "model.onnx", [None, "all"], tables)
    check_rope(graph, write_checkpoint(tmp_path, config), build_metadata())


def test_computed_rope_tables_require_longrope(tmp_path: Path) -> None:
    graph = write_graph(tmp_path / "model.onnx", ["computed"], {})
    pairs = [1.0] * (HEAD // 2)
    split = {"rope_type": "longrope", "short_factor": pairs, "long_factor": pairs}
    check_rope(graph, write_checkpoint(tmp_path, llama(YARN | split)), build_metadata(1024))
    with pytest.raises(UnsupportedModel, match="rope type is `default`"):
        check_rope(graph, write_checkpoint(tmp_path, llama(DEFAULT)), build_metadata(1024))


def test_head_size_that_the_attention_cannot_rotate_is_rejected(tmp_path: Path) -> None:
    tables = {"all": tables_of(LlamaRotaryEmbedding(llama(DEFAULT)))}
    rotating = write_graph(tmp_path / "rotating.onnx", ["all"], tables)
    check_head_size(rotating, 32)
    with pytest.raises(UnsupportedModel, match="the head size 120 is not a multiple of 16"):
        check_head_size(rotating, 120)
    check_head_size(write_graph(tmp_path / "plain.onnx", [None], {}), 120)


@pytest.mark.slow
def test_model_builder_graph_with_ignored_rope_type_is_rejected(tmp_path: Path) -> None:
    export_nemotron(tmp_path / "plain", "default")
    with pytest.raises(UnsupportedModel, match=r"`NemotronForCausalLM` .* type is `linear`"):
        export_nemotron(tmp_path / "linear", "linear")


def export_nemotron(directory: Path, rope_type: str) -> None:
    source, graph = tiny_nemotron(directory / "source", rope_type), directory / "graph"
    graph.mkdir()
    export_decoder(source, read_checkpoint_metadata(source), DECODER_FP32, graph)
