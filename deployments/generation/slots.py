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
FEWEST_TOGETHER = 2


def reading_budget(tokens_per_s: float, rules: SchedulingSettings, *, nobody_waits: bool) -> int:
    """Tokens of prompts to read now: what the time allows, and a part at least."""
    if nobody_waits:
        return rules.part_tokens
    return max(rules.fewest_part_tokens, int(tokens_per_s * rules.stall_ms / 1e3))


def is_worth_a_part(unread: int, budget: int, rules: SchedulingSettings) -> bool:
    """Whether what others left of the budget finishes a prompt, or is enough for a part of it."""
    return budget >= min(unread, rules.fewest_part_tokens)


def part_of(unread: int, most: int) -> int:
    """About `most` of the tokens, so that neither the part nor the rest is a single one."""
    most = max(most, FEWEST_TOGETHER)
    if unread - most == 1:
        return most - 1 if most > FEWEST_TOGETHER else unread
    return min(unread, most)


class ReadingSpeed:
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
FEWEST_SHARED = 16


class Copy(NamedTuple):
    """Make the first tokens of `target` those of `source`."""

    source: int
    target: int
    tokens: int


class Exchange(NamedTuple):
    """Swap the first tokens of two rows."""

    first: int
    second: int
    tokens: int


Move = Copy | Exchange
Owner = Hashable  # whatever tells requests apart


@dataclass(slots=True)
class _Memory:
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
        self._memory = [_Memory() for _ in range(rows)]
        self._prompts = 0

    @property
    def free(self) -> int:
        """How many rows nobody uses."""
        return len(self._memory) - len(self._owners)

    @property
    def in_use(self) -> int:
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
        self, row: int, prompt: Sequence[int], *, afresh: bool = False
    ) -> tuple[int, list[Move]]:
        """How many tokens of the prompt need no computing, and the moves that bring them.

        To be called when the row's prompt is computed next, so that beginnings which were computed
        meanwhile are found. With `afresh` all of it is computed.
        """
        source, shared = (None, 0) if afresh else self._most_alike(prompt)
        moves: list[Move] = []
        if source is not None and source >= self.in_use:
            moves.append(self._exchange(source, row))
        elif source != row:
            moves += self._put_aside(row)
            if source is not None:
                moves.append(Copy(source, row, shared))
        self._prompts += 1
        self._memory[row] = _Memory(list(prompt[:shared]), used_at=self._prompts)
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

    def give_up(self, owner: Owner) -> list[Move]:
        """Free the row of a request; the last row in use takes its place."""
        row, last = self.row_of(owner), self.in_use - 1
        self._memory[row].answered = 0
        self._owners[row] = self._owners[last]
        self._owners.pop()
        return [] if row == last else [self._exchange(row, last)]

    def branch(self, owners: Sequence[Owner], parents: Sequence[int]) -> list[Move]:
        """Let `owners[i]` go on from where `owners[parents[i]]` stands, for each i of `parents`.

        All of `owners` have rows; those beyond `parents` keep some row of theirs.
        """
        rows = [self.row_of(owner) for owner in owners]
        placed: dict[int, int] = {}  # owner's index -> row
        for index, parent in enumerate(parents):
            if rows[parent] not in placed.values():
                placed[index] = rows[parent]
        spare = [row for row in rows if row not in placed.values()]
        moves: list[Move] = []
        for index, owner in enumerate(owners):
            row = placed[index] if index in placed else spare.pop()
            self._owners[row] = owner
            if index < len(parents) and index not in placed:
                parent_row = rows[parents[index]]
                memory = self._memory[parent_row]
                moves.append(Copy(parent_row, row, memory.filled))
                self._memory[row] = _Memory(list(memory.prompt), memory.answered, memory.used_at)
        return moves

    def _most_alike(self, prompt: Sequence[int]) -> tuple[int | None, int]:
        """The row that remembers most of a prompt's beginning, free ones first, and how much."""
        most = len(prompt) - FEWEST_TOGETHER  # those are computed again in any case
        alike = [min(_shared(memory.prompt, prompt), most) for memory in self._memory]
        best = max(range(len(alike)), key=lambda row: (alike[row], row))
        return (best, alike[best]) if alike[best] >= FEWEST_SHARED else (None, 0)

    def _put_aside(self, row: int) -> list[Move]:
        """Keep what a row remembers in the free row that was used least recently."""
        memory = self._memory[row]
        if len(memory.prompt) < FEWEST_SHARED or not self.free:
            return []
        target = min(range(self.in_use, len(self._memory)), key=lambda i: self._memory[i].used_at)
        self._memory[target] = memory
        return [Copy(row, target, len(memory.prompt))]

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
