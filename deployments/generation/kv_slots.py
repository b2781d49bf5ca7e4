"""Assignment of KV slots to jobs, and a record of the cached prefixes; the decoder has the tensors.

Used slots come first without gaps, because a decoder computes slots 0 to n-1 in one call. A free
slot keeps its last prompt as a cached prefix. The prompt of a used slot is a cached prefix too. A
prompt with the same prefix (a system prompt, the earlier turns of a conversation) is prefilled from
the end of that prefix. Cached prefixes are copied or swapped rather than dropped: a copy takes a
hundredth of the time of the prefill.

Only prefilled tokens are cached, not generated ones. The kernels for decode steps and verification
round differently than those for prefill. If generated tokens were cached, a prompt that contains
them would therefore get a slightly different answer.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from deployments.generation.prefill import LAST_CHUNK_TOKENS, MIN_CHUNK_TOKENS

# Copying a shorter prefix saves no time.
MIN_PREFIX_TOKENS = 16
# Tokens that a shared prefix must save to take a slot of its own for a recurrent decoder.
MIN_SHARED_TOKENS = 64


class CopySlot(NamedTuple):
    """A move that copies the first `tokens` tokens of slot `source` to slot `target`."""

    source: int
    target: int
    tokens: int


class SwapSlots(NamedTuple):
    """A move that swaps the first `tokens` tokens of two slots."""

    first: int
    second: int
    tokens: int


CacheMove = CopySlot | SwapSlots
Owner = Hashable


@dataclass(slots=True)
class _SlotContents:
    prompt: list[int] = field(default_factory=list)  # prefilled tokens
    last_chunk: int = 0  # index of the first token of the last prefilled chunk
    # Length of a prefix that this prompt shares with another one, to be stored when it is
    # prefilled; 0: none. Recurrent decoders only.
    shared_prefix: int = 0
    is_prefix: bool = False  # whether nothing was computed after `prompt`: it may be continued
    answer_tokens: int = 0  # tokens of an answer after the prompt
    used_at: int = 0  # sequence number of the prompt; the lowest is the least recently used
    scope: str = ""  # `prefix_cache_scope` of the prompt

    @property
    def tokens(self) -> int:
        return len(self.prompt) + self.answer_tokens


class SlotTable:
    """The KV slots of one decoder.

    Some methods return moves. The caller applies them to the KV cache before the next engine call.
    """

    def __init__(self, slots: int, *, is_recurrent: bool = False, min_prefix: int = 0) -> None:
        """Create the table. Shorter prefixes than `min_prefix` tokens are not cached.

        A recurrent decoder continues a prompt at its last chunk only. What several prompts begin
        with, such as a system prompt, is therefore also stored alone, in a free slot.
        """
        self._is_recurrent = is_recurrent
        self._min_prefix = max(MIN_PREFIX_TOKENS, min_prefix)
        self._owners: list[Owner] = []  # owner of each used slot; used slots come first
        self._contents = [_SlotContents() for _ in range(slots)]
        self._prompts = 0

    @property
    def free_slots(self) -> int:
        return len(self._contents) - len(self._owners)

    @property
    def used_slots(self) -> int:
        """The number of used slots, which are the first ones."""
        return len(self._owners)

    def slot_of(self, owner: Owner) -> int:
        return self._owners.index(owner)

    def owner_of(self, slot: int) -> Owner:
        return self._owners[slot]

    def used_tokens(self, slot: int) -> int:
        return self._contents[slot].tokens

    def acquire(self, owner: Owner) -> int:
        """Assign the first free slot and return it. The caller checks that a slot is free.

        Any free slot would do, because `start_prompt` decides which cached prefix is evicted.
        """
        self._owners.append(owner)
        return len(self._owners) - 1

    def start_prompt(
        self, slot: int, prompt: Sequence[int], scope: str = "", *, skip_prefix_cache: bool = False
    ) -> tuple[int, list[CacheMove]]:
        """Replace the contents of `slot` by the longest cached prefix of the prompt.

        Return the length of the prefix and the moves that bring it to `slot`, one swap or at most
        two copies. The moves may also keep the former prompt of `slot` in a free slot. Call this
        right before the prefill, not when the slot is assigned: prompts that are prefilled in
        between may share a longer prefix with `prompt`.
        """
        source, cached, shared = None, 0, 0
        if not skip_prefix_cache:
            source, cached = self._longest_cached_prefix(prompt, scope)
            shared = self._find_shared_prefix(prompt, scope, cached)
        if source is not None and self._contents[source].is_prefix:
            self._contents[source].used_at = self._prompts
        evicted = self._choose_evicted(slot, source, cached)
        moves: list[CacheMove] = []
        if evicted != slot:
            is_taken = evicted == source  # then `source` gets the prompt of `slot` in exchange
            moves.append(self._swap(evicted, slot) if is_taken else self._copy(slot, evicted))
        if source is not None and source not in (slot, evicted):
            moves.append(CopySlot(source, slot, cached))
        self._prompts += 1
        self._contents[slot] = _SlotContents(
            list(prompt[:cached]),
            last_chunk=cached,
            shared_prefix=shared,
            used_at=self._prompts,
            scope=scope,
        )
        return cached, moves

    def append_prompt(self, slot: int, ids: Sequence[int]) -> None:
        """Append prefilled tokens to the prompt of a slot."""
        contents = self._contents[slot]
        contents.last_chunk = len(contents.prompt)
        contents.prompt += ids

    def shared_tokens_left(self, slot: int) -> int:
        """Return how many tokens to prefill until `store_shared_prefix` applies; 0 for never."""
        contents = self._contents[slot]
        return max(0, contents.shared_prefix - len(contents.prompt))

    def store_shared_prefix(self, slot: int) -> list[CacheMove]:
        """Store the prompt so far in a free slot if other prompts begin with it too."""
        contents, free = self._contents[slot], range(self.used_slots, len(self._contents))
        if not free or len(contents.prompt) != contents.shared_prefix:
            return []
        target = min(free, key=lambda index: self._contents[index].used_at)
        move = self._copy(slot, target)
        self._contents[target].is_prefix = True
        return [move]

    def drop_prompt(self, slot: int) -> None:
        """Forget the prompt of a slot after a failed prefill."""
        self._contents[slot] = _SlotContents()

    def append_token(self, slot: int) -> None:
        """Record one token of an answer."""
        self._contents[slot].answer_tokens += 1

    def move_last(self, owners: Sequence[Owner]) -> list[CacheMove]:
        """Move the slots of `owners` behind all other used slots."""
        moves: list[CacheMove] = []
        first_slot = self.used_slots - len(owners)
        misplaced = [slot for slot in map(self.slot_of, owners) if slot < first_slot]
        for slot in range(first_slot, self.used_slots):
            if self._owners[slot] not in owners:
                other = misplaced.pop()
                self._owners[slot], self._owners[other] = self._owners[other], self._owners[slot]
                moves.append(self._swap(slot, other))
        return moves

    def transfer(self, owner: Owner, successor: Owner) -> None:
        """Assign the slot of `owner` to `successor`.

        The cached prompt stays. The answer of `owner` is dropped.
        """
        slot = self.slot_of(owner)
        self._contents[slot].answer_tokens = 0
        self._owners[slot] = successor

    def release(self, owner: Owner) -> list[CacheMove]:
        """Free the slot of `owner`. Return the move of the last used slot into the gap, if any."""
        slot, last = self.slot_of(owner), self.used_slots - 1
        self._contents[slot].answer_tokens = 0
        self._owners[slot] = self._owners[last]
        self._owners.pop()
        return [] if slot == last else [self._swap(slot, last)]

    def fork(self, owners: Sequence[Owner], parents: Sequence[int]) -> list[CacheMove]:
        """Continue `owners[i]` from the contents of `owners[parents[i]]`, for i < len(parents).

        All `owners` have slots. Owners without a parent get the remaining slots, in any order.
        """
        slots = [self.slot_of(owner) for owner in owners]
        in_place: dict[int, int] = {}  # index of an owner -> slot that it continues without a copy
        for index, parent in enumerate(parents):
            if slots[parent] not in in_place.values():
                in_place[index] = slots[parent]
        spare = [slot for slot in slots if slot not in in_place.values()]
        moves: list[CacheMove] = []
        for index, owner in enumerate(owners):
            slot = in_place[index] if index in in_place else spare.pop()
            self._owners[slot] = owner
            if index < len(parents) and index not in in_place:
                source = slots[parents[index]]
                contents = self._contents[source]
                moves.append(CopySlot(source, slot, contents.tokens))
                self._contents[slot] = replace(contents, prompt=list(contents.prompt))
        return moves

    def _longest_cached_prefix(self, prompt: Sequence[int], scope: str) -> tuple[int | None, int]:
        """Return the slot with the longest cached prefix of `prompt`, and the prefix length.

        Consider only prompts of the same scope. Return (None, 0) below `min_prefix`. Among
        equal prefixes prefer the shortest prompt, then a free slot.
        """
        max_tokens = len(prompt) - MIN_CHUNK_TOKENS  # compute the last chunk, for its logits
        lengths = [
            self._cached_prefix_length(contents, prompt, max_tokens)
            if contents.scope == scope
            else 0
            for contents in self._contents
        ]
        best = max(
            range(len(lengths)),
            key=lambda slot: (lengths[slot], -len(self._contents[slot].prompt), slot),
        )
        return (best, lengths[best]) if lengths[best] >= self._min_prefix else (None, 0)

    def _cached_prefix_length(
        self, contents: _SlotContents, prompt: Sequence[int], max_tokens: int
    ) -> int:
        common = min(_common_prefix_length(contents.prompt, prompt), max_tokens)
        if not self._is_recurrent:
            return common
        if contents.is_prefix and len(contents.prompt) <= common:
            return len(contents.prompt)
        return contents.last_chunk if contents.last_chunk <= common else 0

    def _count_reusable(self, contents: _SlotContents) -> int:
        """Return how many tokens of a cached prompt another prompt can have in common at most."""
        is_whole = contents.is_prefix or not self._is_recurrent
        return len(contents.prompt) if is_whole else contents.last_chunk

    def _find_shared_prefix(self, prompt: Sequence[int], scope: str, cached: int) -> int:
        """Return the length of the prefix to store for later prompts, 0 for none.

        Others begin with it too, and more of it is not cached than MIN_SHARED_TOKENS.
        """
        if not self._is_recurrent:
            return 0
        lengths = (
            _common_prefix_length(contents.prompt, prompt)
            for contents in self._contents
            if contents.scope == scope
        )
        shared = max(lengths, default=0)
        is_short = shared - cached < MIN_SHARED_TOKENS
        return 0 if is_short or shared > len(prompt) - LAST_CHUNK_TOKENS else shared

    def _choose_evicted(self, slot: int, source: int | None, cached: int) -> int:
        """Return the slot whose prompt is evicted for a new prompt in `slot`: `slot` or a free one.

        The new prompt contains the first `cached` tokens of slot `source`. Prefer a prompt of which
        fewer than MIN_PREFIX_TOKENS tokens get lost, else take the least recently used prompt.
        Among prompts with small losses prefer that of `source`, so that no prefix is stored twice.
        Then prefer that of `slot`, which needs no copy.
        """

        def used_at(index: int) -> int:
            contents = self._contents[index]
            # A prompt that continues in the slot of a shared prefix replaces its states, so that no
            # other prompt could start from them: the prefix would be lost as a whole.
            is_continued = index == source and not contents.is_prefix
            lost = self._count_reusable(contents) - (cached if is_continued else 0)
            return contents.used_at if lost >= MIN_PREFIX_TOKENS else 0

        candidates: list[int] = [slot, *range(self.used_slots, len(self._contents))]
        return min(candidates, key=lambda index: (used_at(index), index != source))

    def _copy(self, source: int, target: int) -> CopySlot:
        contents = self._contents[source]
        self._contents[target] = replace(contents, prompt=list(contents.prompt))
        return CopySlot(source, target, len(contents.prompt))

    def _swap(self, first: int, second: int) -> SwapSlots:
        contents = self._contents
        tokens = max(contents[first].tokens, contents[second].tokens)
        contents[first], contents[second] = contents[second], contents[first]
        return SwapSlots(first, second, tokens)


def _common_prefix_length(first: Sequence[int], second: Sequence[int]) -> int:
    # Bisection compares slices, which is far faster than a loop over tokens.
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
