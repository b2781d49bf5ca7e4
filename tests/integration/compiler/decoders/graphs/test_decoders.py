"""Comparison of built decoder graphs with transformers, and independence of their slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.integration.compiler.decoders.graphs.conftest import ExportedCase, ExportModel
from tests.support.slot_driver import SlotDriver, greedy
from tests.support.tiny_checkpoints import DECODERS, END, PAD, VOCABULARY

NEAR = 1e-4
PROMPTS = ([7, 8, 9, 30, 31], [50], [21, 9, 33, 70, 2, 11, 64, 65, 12])
SORT_BINS = 8

each = pytest.mark.parametrize("name", DECODERS)


def reference_logits(exported: ExportedCase, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return exported.model(torch.tensor([ids])).logits[0].numpy()


def reference_answer(exported: ExportedCase, ids: list[int]) -> list[int]:
    output = exported.model.generate(
        torch.tensor([ids]),
        do_sample=False,
        min_new_tokens=SORT_BINS,
        max_new_tokens=SORT_BINS,
        no_repeat_ngram_size=1,
        pad_token_id=PAD,
    )
    return output[0, len(ids) :].tolist()


@each
def test_prefill_logits_match_transformers(exported: ExportModel, name: str) -> None:
    model = exported(name)
    for slot, ids in enumerate(PROMPTS):
        logits = SlotDriver(model.written).prefill(slot, ids, all_logits=True)
        np.testing.assert_allclose(logits, reference_logits(model, ids), atol=NEAR)


@each
def test_slots_of_different_lengths_are_batch_invariant(exported: ExportModel, name: str) -> None:
    model = exported(name)
    expected = [reference_answer(model, ids) for ids in PROMPTS]
    assert greedy(SlotDriver(model.written), PROMPTS, SORT_BINS) == expected
    assert len({token for answer in expected for token in answer}) > SORT_BINS


@each
@pytest.mark.parametrize("parts", [(4, 5), (1, 7, 1), (8, 1)])
def test_chunked_prefill_matches_single_prefill(
    exported: ExportModel, name: str, parts: tuple[int, ...]
) -> None:
    model = exported(name)
    driver, ids, start = SlotDriver(model.written), PROMPTS[2], 0
    for count in parts:
        logits = driver.prefill(1, ids[start : start + count])
        start += count
    np.testing.assert_allclose(logits, reference_logits(model, ids)[-1], atol=NEAR)


def test_prompt_fills_whole_slot(exported: ExportModel) -> None:
    model = exported("gpt2")
    ids = list(range(10, 34))
    logits = SlotDriver(model.written, context=len(ids)).prefill(0, ids)
    np.testing.assert_allclose(logits, reference_logits(model, ids)[-1], atol=NEAR)


def test_copied_slot_continues_equally(exported: ExportModel) -> None:
    driver = SlotDriver(exported("gpt2").written)
    driver.prefill(0, PROMPTS[0])
    driver.prefill(1, PROMPTS[2])
    driver.copy(0, 2)
    logits = driver.decode([40, 41, 40])
    np.testing.assert_array_equal(logits[0], logits[2])


def test_exported_decoder_describes_shape(exported: ExportModel) -> None:
    written = exported("gpt2").written
    assert written.encoder is None
    assert (written.layers, written.kv_heads, written.head_dim) == (2, 4, 8)
    assert written.vocabulary == VOCABULARY
    assert written.eos_token_ids == (END,)
