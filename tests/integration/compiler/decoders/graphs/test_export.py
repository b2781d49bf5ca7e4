"""Export of generation graphs from every checkpoint layout, and rejected checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import safetensors.torch
import torch
import transformers
from safetensors.numpy import load_file, save_file

from build_artifacts.checkpoints.encoder_decoders import read_encoder_decoder_config
from build_artifacts.decoders.graphs.export import export_model
from build_artifacts.errors import UnsupportedModel
from tests.integration.compiler.decoders.graphs.conftest import ExportModel
from tests.support.slot_driver import SlotDriver
from tests.support.tiny_checkpoints import START

WEIGHTS = "model.safetensors"
PROMPT = [7, 8, 9, 30]


@pytest.fixture
def copy_checkpoint(exported: ExportModel, tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that copies a checkpoint, so that the test can change it."""
    (tmp_path / "graphs").mkdir()

    def copy(name: str) -> Path:
        return Path(shutil.copytree(exported(name).checkpoint, tmp_path / "checkpoint"))

    return copy


def configure(checkpoint: Path, file: str = "config.json", **values: Any) -> None:
    path = checkpoint / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def first_logits(written: Any) -> np.ndarray:
    driver = SlotDriver(written)
    if written.encoder is not None:
        driver.read_source(0, PROMPT)
        return driver.prefill(0, [START, 40])
    return driver.prefill(0, PROMPT)


@pytest.mark.parametrize(
    ("name", "base"),
    [("gpt2", "transformer."), ("bloom", "transformer."), ("opt", "model."), ("bart", "model.")],
)
def test_checkpoint_without_base_prefix_exports(
    exported: ExportModel,
    copy_checkpoint: Callable[[str], Path],
    tmp_path: Path,
    name: str,
    base: str,
) -> None:
    checkpoint = copy_checkpoint(name)
    tensors = load_file(checkpoint / WEIGHTS)
    save_file({key.removeprefix(base): t for key, t in tensors.items()}, checkpoint / WEIGHTS)
    written = export_model(checkpoint, tmp_path / "graphs")
    np.testing.assert_array_equal(first_logits(written), first_logits(exported(name).written))


def test_sharded_checkpoint_exports(
    exported: ExportModel, copy_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    checkpoint = copy_checkpoint("t5")
    tensors = load_file(checkpoint / WEIGHTS)
    (checkpoint / WEIGHTS).unlink()
    shards = {key: f"model-{i % 2}.safetensors" for i, key in enumerate(sorted(tensors))}
    for shard in set(shards.values()):
        save_file({k: t for k, t in tensors.items() if shards[k] == shard}, checkpoint / shard)
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    written = export_model(checkpoint, tmp_path / "graphs")
    np.testing.assert_array_equal(first_logits(written), first_logits(exported("t5").written))


@pytest.mark.parametrize(("dtype", "near"), [(torch.float16, 0.02), (torch.bfloat16, 0.2)])
def test_half_precision_checkpoint_exports(
    exported: ExportModel,
    copy_checkpoint: Callable[[str], Path],
    tmp_path: Path,
    dtype: torch.dtype,
    near: float,
) -> None:
    checkpoint = copy_checkpoint("gpt2")
    tensors = safetensors.torch.load_file(checkpoint / WEIGHTS)
    safetensors.torch.save_file({k: t.to(dtype) for k, t in tensors.items()}, checkpoint / WEIGHTS)
    written = export_model(checkpoint, tmp_path / "graphs")
    np.testing.assert_allclose(
        first_logits(written), first_logits(exported("gpt2").written), atol=near
    )


def test_export_writes_only_graphs_and_weights(exported: ExportModel) -> None:
    directory = exported("bart").written.decoder.parent
    graphs = ("model.onnx", "encoder.onnx")
    expected = {*graphs, *(f"{name}.data" for name in graphs)}
    assert {path.name for path in directory.iterdir()} == expected
    for name in graphs:
        onnx.checker.check_model(directory / name)


def test_start_and_end_tokens_come_from_generation_config(
    copy_checkpoint: Callable[[str], Path],
) -> None:
    checkpoint = copy_checkpoint("bart")
    configure(
        checkpoint,
        "generation_config.json",
        eos_token_id=[3, 5],
        forced_bos_token_id=9,
        forced_eos_token_id=3,
        bad_words_ids=[[1], [6, 7]],
        suppress_tokens=[11],
    )
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    generation_config = read_encoder_decoder_config(checkpoint, config, 20)
    assert generation_config.eos_token_ids == (3, 5)
    assert generation_config.suppressed_token_ids == (11, 1)
    assert generation_config.encoder_decoder is not None
    assert (
        generation_config.encoder_decoder.decoder_start_token_id,
        generation_config.encoder_decoder.max_source_tokens,
    ) == (START, 20)
    assert (
        generation_config.encoder_decoder.forced_bos_token_id,
        generation_config.encoder_decoder.forced_eos_token_id,
    ) == (9, 3)


def test_unknown_model_type_is_rejected_by_name(
    copy_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    checkpoint = copy_checkpoint("gpt2")
    configure(checkpoint, model_type="rwkv")
    with pytest.raises(UnsupportedModel, match="`rwkv`"):
        export_model(checkpoint, tmp_path / "graphs")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gpt2", {"activation_function": "mish"}, "`mish`"),
        ("gpt2", {"n_head": 8}, "4 values each"),
        ("gpt2", {"add_cross_attention": True}, "`add_cross_attention` of the arch"),
        ("bart", {"decoder_layers": 4}, "decoder.layers.3"),
        ("t5", {"dense_act_fn": "laplace"}, "`laplace`"),
    ],
)
def test_unsupported_config_is_rejected(
    copy_checkpoint: Callable[[str], Path],
    tmp_path: Path,
    name: str,
    changes: dict[str, Any],
    message: str,
) -> None:
    checkpoint = copy_checkpoint(name)
    configure(checkpoint, **changes)
    with pytest.raises(UnsupportedModel, match=message):
        export_model(checkpoint, tmp_path / "graphs")


def test_inconsistent_config_is_rejected(
    copy_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    checkpoint = copy_checkpoint("t5")
    configure(checkpoint, feed_forward_proj="un-gated-gelu")
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        export_model(checkpoint, tmp_path / "graphs")
