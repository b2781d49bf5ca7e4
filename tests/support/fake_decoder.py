"""A decoder whose every answer depends on all that its memory holds, and on how it came there."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from deployments.engines.decoder import DecoderInfo, Logits, TokenColumn
from deployments.errors import EngineFailed

VOCABULARY = 64
# How a token came into the memory. The real kernels round differently for each.
TOGETHER, ALONE, ANSWERED = 1, 2, 3


@dataclass
class FakeDecoder:
    """Rows of (token, how) pairs. Noise is where nobody wrote."""

    slots: int = 4
    context: int = 96
    failing_at: int = -1  # the number of the decode call that fails
    failure: EngineFailed = field(default_factory=lambda: EngineFailed("the device is gone"))
    max_draft_tokens: int = 0
    memorable: int = 0  # tokens at the end that the next one depends on; 0: all, and how they came
    held: threading.Event | None = None  # no call ends before it is set
    parts: list[tuple[int, int]] = field(default_factory=list)  # of prompts: row, tokens
    decodes: list[int] = field(default_factory=list)  # rows of each decode
    verified: list[int] = field(default_factory=list)  # tokens of each call
    moved: int = 0  # tokens copied or swapped

    def __post_init__(self) -> None:
        self.info = DecoderInfo(
            "cpu-fake", self.slots, self.context, VOCABULARY, max_draft_tokens=self.max_draft_tokens
        )
        self.memory = np.full((self.slots, self.context, 2), -1, np.int64)

    def prefill(
        self, row: int, ids: Sequence[int], start: int, *, all_logits: bool = False
    ) -> Logits:
        self._wait()
        self.parts.append((row, len(ids)))
        how = TOGETHER if len(ids) > 1 else ALONE
        self.memory[row, start : start + len(ids)] = [(token, how) for token in ids]
        ends = range(start + 1, start + len(ids) + 1) if all_logits else [start + len(ids)]
        logits = np.stack([self._logits(row, end) for end in ends])
        return logits if all_logits else logits[0]

    def decode(self, ids: TokenColumn, lengths: TokenColumn) -> Logits:
        self._wait()
        if len(self.decodes) == self.failing_at:
            self.failing_at = -1
            raise self.failure
        self.decodes.append(len(ids))
        rows = []
        for row, (token, length) in enumerate(zip(ids, lengths, strict=True)):
            self.memory[row, length] = (token, ANSWERED)
            rows.append(self._logits(row, length + 1))
        return np.stack(rows)

    def verify(self, row: int, ids: Sequence[int], start: int) -> Logits:
        self._wait()
        assert len(ids) <= 1 + self.max_draft_tokens, "more than it can verify"
        assert start + len(ids) <= self.context, "beyond the row"
        self.verified.append(len(ids))
        self.memory[row, start : start + len(ids)] = [(token, ANSWERED) for token in ids]
        return np.stack([self._logits(row, start + n) for n in range(1, len(ids) + 1)])

    def copy(self, source: int, target: int, tokens: int) -> None:
        self.moved += tokens
        self.memory[target, :tokens] = self.memory[source, :tokens]

    def swap(self, first: int, second: int, tokens: int) -> None:
        self.moved += tokens
        self.memory[[first, second], :tokens] = self.memory[[second, first], :tokens]

    def close(self) -> None:
        self.memory = np.zeros((0, 0, 2), np.int64)

    def _logits(self, row: int, end: int) -> Logits:
        held = self.memory[row, :end]
        return _logits(held[-self.memorable :, 0] if self.memorable else held)

    def _wait(self) -> None:
        if self.held is not None:
            self.held.wait(timeout=10)


def _logits(held: np.ndarray) -> Logits:
    digest = hashlib.sha256(np.ascontiguousarray(held).tobytes()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8])).normal(size=VOCABULARY).astype("f4")
