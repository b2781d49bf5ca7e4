"""Comparison of built encoder-decoder graphs with transformers, and independence of their slots."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from build_artifacts.decoders.graphs.export import export_model
from build_artifacts.decoders.per_token_int8 import quantize_per_token
from tests.integration.compiler.decoders.graphs.conftest import ExportedCase, ExportModel
from tests.support.slot_driver import SlotDriver, greedy, open_graph
from tests.support.tiny_checkpoints import (
    ENCODER_DECODERS,
    END,
    PAD,
    POSITIONS,
    START,
    VOCABULARY,
    saved,
)

NEAR = 1e-4
SOURCES = ([7, 8, 9, 30, 31, 41, 5], [50], [21, 9, 33, 70, 6, 11, 64, 65, 12, 44, 45, 46, 10])
SORT_BINS = 8

each = pytest.mark.parametrize("name", ENCODER_DECODERS)


def reference_logits(exported: ExportedCase, source: list[int], ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        output = exported.model(
            input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([ids])
        )
    return output.logits[0].numpy()


def reference_answer(exported: ExportedCase, source: list[int]) -> list[int]:
    output = exported.model.generate(
        torch.tensor([source]),
        do_sample=False,
        num_beams=1,
        min_new_tokens=SORT_BINS,
        max_new_tokens=SORT_BINS,
        no_repeat_ngram_size=1,
    )
    return output[0, 1:].tolist()


def read_all(exported: ExportedCase) -> SlotDriver:
    driver = SlotDriver(exported.written)
    for slot, source in enumerate(SOURCES):
        driver.read_source(slot, source)
    return driver


@each
def test_decode_logits_match_transformers(exported: ExportModel, name: str) -> None:
    model = exported(name)
    ids = [START, 40, 9, 62, 41, 40, 11]  # longer than one of the sources, shorter than the others
    driver = read_all(model)
    for slot, source in enumerate(SOURCES):
        logits = driver.prefill(slot, ids, all_logits=True)
        np.testing.assert_allclose(logits, reference_logits(model, source, ids), atol=NEAR)


@each
def test_slots_of_different_sources_are_batch_invariant(exported: ExportModel, name: str) -> None:
    model = exported(name)
    start = model.model.generation_config.decoder_start_token_id
    expected = [reference_answer(model, source) for source in SOURCES]
    assert greedy(read_all(model), [[start]] * 3, SORT_BINS) == expected
    assert len({tuple(answer) for answer in expected}) > 1


@each
def test_slots_at_different_positions_decode_together(exported: ExportModel, name: str) -> None:
    model = exported(name)
    ids = ([START, 40, 41, 42, 43, 44], [START], [START, 60, 9])
    driver = read_all(model)
    for slot, read in enumerate(ids):
        driver.prefill(slot, read)
    logits = driver.decode([33, 34, 35])
    for slot, read in enumerate(ids):
        expected = reference_logits(model, SOURCES[slot], [*read, 33 + slot])[-1]
        np.testing.assert_allclose(logits[slot], expected, atol=NEAR)


@each
def test_chunked_prefill_matches_single_prefill(exported: ExportModel, name: str) -> None:
    model = exported(name)
    ids = [START, 40, 9, 62, 41, 40]
    driver = read_all(model)
    for start, end in ((0, 3), (3, 4), (4, 6)):
        logits = driver.prefill(2, ids[start:end])
    np.testing.assert_allclose(logits, reference_logits(model, SOURCES[2], ids)[-1], atol=NEAR)


@each
def test_source_padding_has_no_effect(exported: ExportModel, name: str) -> None:
    written = exported(name).written
    assert written.encoder is not None
    encoder = open_graph(written.encoder)
    short, long = SOURCES[0], SOURCES[2]
    ids = np.full((2, len(long)), PAD)
    ids[0, : len(short)], ids[1] = short, long
    mask = np.ones_like(ids)
    mask[0, len(short) :] = 0
    together = encoder.run(None, {"input_ids": ids, "attention_mask": mask})
    alone = encoder.run(
        None, {"input_ids": ids[:1, : len(short)], "attention_mask": mask[:1, : len(short)]}
    )
    for both, single in zip(together, alone, strict=True):
        np.testing.assert_allclose(both[0, :, : len(short)], single[0], atol=1e-5)


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_copied_slot_continues_equally(exported: ExportModel, name: str) -> None:
    driver = read_all(exported(name))
    driver.prefill(0, [START, 40, 41])
    driver.prefill(1, [START])
    driver.copy(0, 2)
    logits = driver.decode([50, 51, 50])
    np.testing.assert_array_equal(logits[0], logits[2])


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_slot_without_source_does_not_affect_others(exported: ExportModel, name: str) -> None:
    model = exported(name)
    driver = SlotDriver(model.written)
    driver.read_source(1, SOURCES[0])
    driver.prefill(1, [START, 40])
    logits = driver.decode([9, 41, 9])
    expected = reference_logits(model, SOURCES[0], [START, 40, 41])[-1]
    np.testing.assert_allclose(logits[1], expected, atol=NEAR)


@pytest.mark.parametrize("name", ["marian", "m2m_100"])
def test_last_position_decodes(exported: ExportModel, name: str) -> None:
    model = exported(name)
    ids = [START, *(4 + i % 70 for i in range(POSITIONS - 1))]
    driver = SlotDriver(model.written, context=POSITIONS)
    driver.read_source(0, SOURCES[0])
    logits = driver.prefill(0, ids, all_logits=True)
    np.testing.assert_allclose(logits, reference_logits(model, SOURCES[0], ids), atol=NEAR)


def test_exported_encoder_decoder_describes_shape(exported: ExportModel) -> None:
    written = exported("bart").written
    assert (written.layers, written.kv_heads, written.head_dim) == (3, 4, 8)
    assert written.eos_token_ids == (END,)


def test_per_token_int8_encoder_of_t5_with_many_heads_is_close_to_float(tmp_path: Path) -> None:
    """From 16 heads on, the table of the position bias is large enough for quantization."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=16
    )
    saved(lambda: transformers.T5ForConditionalGeneration(config), tmp_path)
    (tmp_path / "graphs").mkdir()
    encoder = export_model(tmp_path, tmp_path / "graphs").encoder
    assert encoder is not None
    quantize_per_token(encoder, tmp_path / encoder.name)
    feeds = {"input_ids": np.array([SOURCES[0]]), "attention_mask": np.ones_like([SOURCES[0]])}
    exact, rounded = (
        open_graph(path).run(None, feeds) for path in (encoder, tmp_path / encoder.name)
    )
    for a, b in zip(exact, rounded, strict=True):
        assert np.corrcoef(a.ravel(), b.ravel())[0, 1] > 0.99


def test_t5_head_size_comes_from_config(exported: ExportModel) -> None:
    written = exported("t5").written
    assert (written.kv_heads, written.head_dim) == (4, 16)
