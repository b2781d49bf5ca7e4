"""Which row of a decoder's memory belongs to whom, and what it still remembers: bookkeeping only.

Rows in use stand at the front without gaps, because a decoder computes rows 0 to n-1 at once. A
row that nobody uses keeps the prompt it last read, so that a prompt with the same beginning (a
system prompt, the turns of a conversation so far) starts behind it. Memory is moved rather than
given up: a copy costs a hundredth of computing it.

Only what was read as a prompt is remembered. Tokens of an answer are read one at a time, or as
drafts, by kernels that round differently; a later prompt over them would be answered a little
differently from one computed afresh, and what was asked before must not show.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from deployments.config import SchedulingSettings

# A single token is computed by other kernels, whose rounding is another: no part of a prompt may be
# that short, or the answer would depend on how the prompt was cut, or on what was read before.
MIN_CHUNK_TOKENS = 2


def prefill_budget(tokens_per_s: float, rules: SchedulingSettings, *, is_decode_idle: bool) -> int:
    """Tokens of prompts to read now: what the time allows, and a part at least."""
    if is_decode_idle:
        return rules.max_prefill_chunk_tokens
    return max(rules.min_prefill_chunk_tokens, int(tokens_per_s * rules.max_prefill_stall_ms / 1e3))


def fits_min_chunk(unread: int, budget: int, rules: SchedulingSettings) -> bool:
    """Whether what others left of the budget finishes a prompt, or is enough for a part of it."""
    return budget >= min(unread, rules.min_prefill_chunk_tokens)


def chunk_size(unread: int, most: int) -> int:
    """About `most` of the tokens, so that neither the part nor the rest is a single one."""
    most = max(most, MIN_CHUNK_TOKENS)
    if unread - most == 1:
        return most - 1 if most > MIN_CHUNK_TOKENS else unread
    return min(unread, most)


class PrefillRate:
    """How fast prompts are read, learnt from the latest parts; tokens per second."""

    def __init__(self, tokens_per_s: float) -> None:
        self.tokens_per_s = tokens_per_s

    def learn(self, tokens: int, took_s: float, fewest: int) -> None:
        """Take a part into account; a short one says little of speed."""
        if tokens >= fewest and took_s > 0:
            # Slower counts at once, faster by and by: who waits is promised a time.
            measured = tokens / took_s
            weight = 1.0 if measured < self.tokens_per_s else 0.25
            self.tokens_per_s += weight * (measured - self.tokens_per_s)


# Shorter beginnings are not worth a copy.
MIN_PREFIX_TOKENS = 16


class CopySlot(NamedTuple):
    """Make the first tokens of `target` those of `source`."""

    source: int
    target: int
    tokens: int


class Exchange(NamedTuple):
    """Swap the first tokens of two rows."""

    first: int
    second: int
    tokens: int


CacheMove = CopySlot | Exchange
Owner = Hashable  # whatever tells requests apart


@dataclass(slots=True)
class _SlotContents:
    """What lies in a row."""

    prompt: list[int] = field(default_factory=list)  # the tokens at its beginning, read together
    answered: int = 0  # tokens of an answer behind them
    used_at: int = 0  # counts prompts; for the least recently used

    @property
    def filled(self) -> int:
        return len(self.prompt) + self.answered


class RowTable:
    """The rows of one decoder. What it decides, the caller carries out before anything else."""

    def __init__(self, rows: int) -> None:
        self._owners: list[Owner] = []  # requests, by their rows; the rows behind are free
        self._memory = [_SlotContents() for _ in range(rows)]
        self._prompts = 0

    @property
    def free(self) -> int:
        """How many rows nobody uses."""
        return len(self._memory) - len(self._owners)

    @property
    def used_slots(self) -> int:
        """How many rows are in use; they are the first ones."""
        return len(self._owners)

    def row_of(self, owner: Owner) -> int:
        """The row of a request."""
        return self._owners.index(owner)

    def filled(self, row: int) -> int:
        """Tokens in a row's memory."""
        return self._memory[row].filled

    def take(self, owner: Owner) -> int:
        """Give a request the first row that is free; there must be one."""
        self._owners.append(owner)
        return len(self._owners) - 1

    def begin(
        self, row: int, prompt: Sequence[int], *, skip_prefix_cache: bool = False
    ) -> tuple[int, list[CacheMove]]:
        """How many tokens of the prompt need no computing, and the moves that bring them.

        To be called when the row's prompt is computed next, so that beginnings which were computed
        meanwhile are found. With `skip_prefix_cache` all of it is computed.
        """
        source, shared = (None, 0) if skip_prefix_cache else self._longest_cached_prefix(prompt)
        moves: list[CacheMove] = []
        if source is not None and source >= self.used_slots:
            moves.append(self._exchange(source, row))
        elif source != row:
            moves += self._save_prefix(row)
            if source is not None:
                moves.append(CopySlot(source, row, shared))
        self._prompts += 1
        self._memory[row] = _SlotContents(list(prompt[:shared]), used_at=self._prompts)
        return shared, moves

    def read(self, row: int, ids: Sequence[int]) -> None:
        """Note that the row's next prompt tokens are in its memory."""
        self._memory[row].prompt += ids

    def wrote(self, row: int) -> None:
        """Note that one token of an answer is in its memory."""
        self._memory[row].answered += 1

    def hand_over(self, owner: Owner, successor: Owner) -> None:
        """Give the row of a request to another one."""
        row = self.row_of(owner)
        self._memory[row].answered = 0
        self._owners[row] = successor

    def give_up(self, owner: Owner) -> list[CacheMove]:
        """Free the row of a request; the last row in use takes its place."""
        row, last = self.row_of(owner), self.used_slots - 1
        self._memory[row].answered = 0
        self._owners[row] = self._owners[last]
        self._owners.pop()
        return [] if row == last else [self._exchange(row, last)]

    def branch(self, owners: Sequence[Owner], parents: Sequence[int]) -> list[CacheMove]:
        """Let `owners[i]` go on from where `owners[parents[i]]` stands, for each i of `parents`.

        All of `owners` have rows; those beyond `parents` keep some row of theirs.
        """
        rows = [self.row_of(owner) for owner in owners]
        placed: dict[int, int] = {}  # owner's index -> row
        for index, parent in enumerate(parents):
            if rows[parent] not in placed.values():
                placed[index] = rows[parent]
        spare = [row for row in rows if row not in placed.values()]
        moves: list[CacheMove] = []
        for index, owner in enumerate(owners):
            row = placed[index] if index in placed else spare.pop()
            self._owners[row] = owner
            if index < len(parents) and index not in placed:
                parent_row = rows[parents[index]]
                memory = self._memory[parent_row]
                moves.append(CopySlot(parent_row, row, memory.filled))
                self._memory[row] = _SlotContents(
                    list(memory.prompt), memory.answered, memory.used_at
                )
        return moves

    def _longest_cached_prefix(self, prompt: Sequence[int]) -> tuple[int | None, int]:
        """The row that remembers most of a prompt's beginning, free ones first, and how much."""
        most = len(prompt) - MIN_CHUNK_TOKENS  # those are computed again in any case
        alike = [min(_shared(memory.prompt, prompt), most) for memory in self._memory]
        best = max(range(len(alike)), key=lambda row: (alike[row], row))
        return (best, alike[best]) if alike[best] >= MIN_PREFIX_TOKENS else (None, 0)

    def _save_prefix(self, row: int) -> list[CacheMove]:
        """Keep what a row remembers in the free row that was used least recently."""
        memory = self._memory[row]
        if len(memory.prompt) < MIN_PREFIX_TOKENS or not self.free:
            return []
        target = min(
            range(self.used_slots, len(self._memory)), key=lambda i: self._memory[i].used_at
        )
        self._memory[target] = memory
        return [CopySlot(row, target, len(memory.prompt))]

    def _exchange(self, first: int, second: int) -> Exchange:
        memory = self._memory
        tokens = max(memory[first].filled, memory[second].filled)
        memory[first], memory[second] = memory[second], memory[first]
        return Exchange(first, second, tokens)


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences have in common from the start on."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
