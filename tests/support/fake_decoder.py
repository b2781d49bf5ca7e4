"""A fake decoder whose logits depend on tokens and on the kinds of calls that computed them."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from deployments.engines.decoder import DecoderInfo, Logits, TokenColumn
from deployments.errors import EngineFailed
from tests.support.waiting import TIMEOUT_S

VOCABULARY = 64
# Kind of the call that computed a token. Real kernels round differently for each kind of call.
PREFILL, SINGLE_TOKEN, DECODE, EARLY_PREFILL = 1, 2, 3, 4


@dataclass
class FakeDecoder:
    """Decoder whose KV slots store, per token, its id and the kind of call that computed it."""

    slots: int = 4
    context: int = 96
    failing_decode: int = -1  # index of the decode call that fails
    failure: EngineFailed = field(default_factory=lambda: EngineFailed("the device is gone"))
    max_draft_tokens: int = 0
    min_chunk_end: int = 0
    memorable: int = 0  # the last n ids determine the logits; 0: all ids and kinds do
    held: threading.Event | None = None  # every call waits for this event
    parts: list[tuple[int, int]] = field(default_factory=list)  # (slot, tokens) of each prefill
    decodes: list[int] = field(default_factory=list)  # number of slots of each decode call
    verified: list[int] = field(default_factory=list)  # number of tokens of each verify call
    moved: int = 0  # tokens copied or swapped

    def __post_init__(self) -> None:
        self.info = DecoderInfo(
            "cpu-fake",
            self.slots,
            self.context,
            VOCABULARY,
            max_draft_tokens=self.max_draft_tokens,
            min_chunk_end=self.min_chunk_end,
        )
        self.memory = np.full((self.slots, self.context, 2), -1, np.int64)

    def prefill(
        self, slot: int, ids: Sequence[int], start: int, *, all_logits: bool = False
    ) -> Logits:
        self._wait()
        self.parts.append((slot, len(ids)))
        kind = self._kind(ids, start)
        self.memory[slot, start : start + len(ids)] = [(token, kind) for token in ids]
        ends = range(start + 1, start + len(ids) + 1) if all_logits else [start + len(ids)]
        logits = np.stack([self._logits(slot, end) for end in ends])
        return logits if all_logits else logits[0]

    def decode(self, ids: TokenColumn, lengths: TokenColumn) -> Logits:
        self._wait()
        if len(self.decodes) == self.failing_decode:
            self.failing_decode = -1
            raise self.failure
        self.decodes.append(len(ids))
        logits = []
        for slot, (token, length) in enumerate(zip(ids, lengths, strict=True)):
            self.memory[slot, length] = (token, DECODE)
            logits.append(self._logits(slot, length + 1))
        return np.stack(logits)

    def verify(self, slot: int, ids: Sequence[int], start: int) -> Logits:
        self._wait()
        assert len(ids) <= 1 + self.max_draft_tokens, "more tokens than max_draft_tokens"
        assert start + len(ids) <= self.context, "beyond the context"
        self.verified.append(len(ids))
        self.memory[slot, start : start + len(ids)] = [(token, DECODE) for token in ids]
        return np.stack([self._logits(slot, start + n) for n in range(1, len(ids) + 1)])

    def copy(self, source: int, target: int, tokens: int) -> None:
        self.moved += tokens
        self.memory[target, :tokens] = self.memory[source, :tokens]

    def swap(self, first: int, second: int, tokens: int) -> None:
        self.moved += tokens
        self.memory[[first, second], :tokens] = self.memory[[second, first], :tokens]

    def close(self) -> None:
        self.memory = np.zeros((0, 0, 2), np.int64)

    def _kind(self, ids: Sequence[int], start: int) -> int:
        if start + len(ids) < self.min_chunk_end:
            return EARLY_PREFILL
        return PREFILL if len(ids) > 1 else SINGLE_TOKEN

    def _logits(self, slot: int, end: int) -> Logits:
        held = self.memory[slot, :end]
        return _logits(held[-self.memorable :, 0] if self.memorable else held)

    def _wait(self) -> None:
        if self.held is not None:
            self.held.wait(timeout=TIMEOUT_S)


class RecurrentFakeDecoder(FakeDecoder):
    """Decoder with recurrent states: every call changes those of its slots, also of ignored ones.

    A prefill starts at token 0, at the end of its slot or at the start of the slot's last prefill.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.info = replace(self.info, is_recurrent=True)
        # Tokens and kinds of calls that the states include, and those at the last prefill's start.
        self._states: list[list[tuple[int, int]]] = [[] for _ in range(self.slots)]
        self._resumable: list[list[tuple[int, int]]] = [[] for _ in range(self.slots)]

    def prefill(
        self, slot: int, ids: Sequence[int], start: int, *, all_logits: bool = False
    ) -> Logits:
        if start in (0, len(self._resumable[slot])):
            self._states[slot] = self._resumable[slot][:start]
        assert len(self._states[slot]) == start, "there are no states at the start of a prefill"
        self._resumable[slot] = self._states[slot]
        kind = self._kind(ids, start)
        self._states[slot] = [*self._states[slot], *((token, kind) for token in ids)]
        return super().prefill(slot, ids, start, all_logits=all_logits)

    def decode(self, ids: TokenColumn, lengths: TokenColumn) -> Logits:
        for slot, token in enumerate(ids.tolist()):
            self._states[slot] = [*self._states[slot], (token, DECODE)]
        logits = super().decode(ids, lengths)
        for slot, length in enumerate(lengths.tolist()):
            held = list(map(tuple, self.memory[slot, : length + 1].tolist()))
            assert held == self._states[slot], "a state includes other tokens than its slot"
        return logits

    def copy(self, source: int, target: int, tokens: int) -> None:
        super().copy(source, target, tokens)
        for states in (self._states, self._resumable):
            states[target] = states[source]

    def swap(self, first: int, second: int, tokens: int) -> None:
        super().swap(first, second, tokens)
        for states in (self._states, self._resumable):
            states[first], states[second] = states[second], states[first]


class SteppedDecoder(FakeDecoder):
    """Decoder whose decode calls wait for one of `permits` each."""

    def __init__(self, permits: int, *, slots: int, context: int) -> None:
        super().__init__(slots=slots, context=context)
        self.permits = threading.Semaphore(permits)

    def decode(self, ids: TokenColumn, lengths: TokenColumn) -> Logits:
        assert self.permits.acquire(timeout=TIMEOUT_S)
        return super().decode(ids, lengths)


def _logits(held: np.ndarray) -> Logits:
    digest = hashlib.sha256(np.ascontiguousarray(held).tobytes()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8])).normal(size=VOCABULARY).astype("f4")
