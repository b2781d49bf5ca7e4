"""Size and accuracy of blockwise quantized graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from build_artifacts.decoders.block_weights import Bits
from build_artifacts.decoders.graphs import block_quantize
from build_artifacts.decoders.graphs.block_quantize import quantize_blocks
from build_artifacts.decoders.graphs.export import ExportedModel
from tests.integration.compiler.decoders.graphs.conftest import ExportModel
from tests.support.slot_driver import SlotDriver
from tests.support.tiny_checkpoints import DECODERS, ENCODER_DECODERS, START

SOURCE = [7, 8, 9, 30, 31, 41, 5]
PROMPT = [40, 9, 62, 41, 40, 11]


def quantized(written: ExportedModel, into: Path, bits: Bits) -> ExportedModel:
    quantize_blocks(written.decoder, into / written.decoder.name, bits)
    small = replace(written, decoder=into / written.decoder.name)
    if written.encoder is None:
        return small
    quantize_blocks(written.encoder, into / written.encoder.name, bits)
    return replace(small, encoder=into / written.encoder.name)


def prompt_logits(written: ExportedModel) -> np.ndarray:
    """Return the logits [tokens, vocabulary] of a prompt. Its last token runs as a decode step."""
    driver = SlotDriver(written)
    if written.encoder is None:
        read = driver.prefill(0, PROMPT[:-1], all_logits=True)
    else:
        driver.read_source(0, SOURCE)
        read = driver.prefill(0, [START, *PROMPT[:-1]], all_logits=True)
    return np.concatenate([read, driver.decode(PROMPT[-1:])])


def worst_cosine(logits: np.ndarray, expected: np.ndarray) -> float:
    norms = np.linalg.norm(logits, axis=-1) * np.linalg.norm(expected, axis=-1)
    return float(((logits * expected).sum(axis=-1) / norms).min())


@pytest.mark.parametrize("name", [*DECODERS, *ENCODER_DECODERS])
@pytest.mark.parametrize("tables", [True, False])
def test_int8_blocks_are_close_to_float(
    exported: ExportModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, tables: bool
) -> None:
    if tables:  # the embedding tables are below the minimum size for quantization
        monkeypatch.setattr(block_quantize, "MIN_QUANTIZED_TABLE", 0)
    written = exported(name).written
    small = quantized(written, tmp_path, 8)
    assert worst_cosine(prompt_logits(small), prompt_logits(written)) > 0.99
    kinds = {node.op_type for node in onnx.load(small.decoder).graph.node}
    assert "MatMul" not in kinds
    assert ("GatherBlockQuantized" in kinds) == tables


@pytest.mark.parametrize("name", ["gpt2", "bart", "t5"])
def test_int4_blocks_are_close_to_float(exported: ExportModel, tmp_path: Path, name: str) -> None:
    written = exported(name).written
    cosine = worst_cosine(prompt_logits(quantized(written, tmp_path, 4)), prompt_logits(written))
    assert 0.8 < cosine < 0.9999


def test_quantized_weights_are_smaller(exported: ExportModel, tmp_path: Path) -> None:
    graph = exported("bart").written.decoder
    sizes = {}
    for bits in (8, 4):
        (tmp_path / str(bits)).mkdir()
        quantize_blocks(graph, tmp_path / str(bits) / graph.name, bits)
        sizes[bits] = _product_bytes(tmp_path / str(bits) / graph.name)
    before = _product_bytes(graph)
    # One 4-byte scale per 32 values.
    assert sizes[8] == pytest.approx(before * (1 / 4 + 1 / 32), rel=0.1)
    assert sizes[4] == pytest.approx(before * (1 / 8 + 1 / 32), rel=0.1)


def _product_bytes(graph: Path) -> int:
    model = onnx.load(graph)
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    weights = {
        name
        for node in model.graph.node
        if node.op_type.startswith("MatMul")
        for name in node.input
        if name in tensors
    }
    return sum(len(tensors[name].raw_data) for name in weights)
