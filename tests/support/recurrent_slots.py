"""A prompt in the slots of a decoder with recurrent layers, for engines of any kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from deployments.engines.decoder import DecoderEngine, Logits

RANDOM = np.random.default_rng(0)
PROMPT, OTHER = (RANDOM.integers(8, 250, tokens).tolist() for tokens in (60, 30))
FIRST, LAST_CHUNK = 24, 44  # starts of chunks of the prompt
ANSWER_TOKENS = 4


def read_prompt(engine: DecoderEngine, slot: int) -> Logits:
    """Prefill the prompt in three chunks."""
    for start, end in ((0, FIRST), (FIRST, LAST_CHUNK)):
        engine.prefill(slot, PROMPT[start:end], start)
    return engine.prefill(slot, PROMPT[LAST_CHUNK:], LAST_CHUNK).copy()


def step(engine: DecoderEngine, slot: int, token: int, position: int) -> Logits:
    """Decode a token of a slot. Slots before it decode the first token of a text."""
    ids, lengths = np.zeros((2, slot + 1), np.int64)
    ids[slot], lengths[slot] = token, position
    return engine.decode(ids, lengths)[slot].copy()


def answer(engine: DecoderEngine, slot: int) -> list[Logits]:
    return [step(engine, slot, 9 + n, len(PROMPT) + n) for n in range(ANSWER_TOKENS)]


def check_slots_move(engine: DecoderEngine, compare: Callable[[Any, Any], None]) -> None:
    """Copy and swap slots of an engine with three slots. Check that each goes on as before."""
    read_prompt(engine, 0)
    expected = answer(engine, 0)
    last = engine.prefill(0, PROMPT[LAST_CHUNK:], LAST_CHUNK).copy()
    engine.prefill(1, OTHER, 0)
    engine.copy(0, 2, len(PROMPT))
    engine.swap(0, 1, len(PROMPT))
    for slot in (1, 2):  # a step of a slot changes the slots before it
        compare(answer(engine, slot), expected)
        compare(engine.prefill(slot, PROMPT[LAST_CHUNK:], LAST_CHUNK), last)
