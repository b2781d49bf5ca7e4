"""Codes of few bits that are packed into larger integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

WORD_BITS = 32


def unpack_words(words: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Return the codes in int32 words [rows, words] as int32 [rows, codes].

    The first code of a word is in its lowest bits. With `order`, the codes of a word are those at
    these places instead. `bits` divides 32, or is 3: then three words have 32 codes.
    """
    import torch

    if bits == 3:
        return _unpack_3_bits(words)
    places = torch.arange(WORD_BITS // bits) if order is None else torch.tensor(order)
    shifts = (places * bits).to(torch.int32)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _unpack_3_bits(words: Tensor) -> Tensor:
    """Return 32 codes of each three words, which are one sequence of bits."""
    import torch

    triples = words.unflatten(-1, (-1, 3)).long() & 0xFFFFFFFF
    starts = torch.arange(32) * 3
    first, shifts = starts // WORD_BITS, starts % WORD_BITS
    # Two codes begin in one word and end in the next. Behind the last word nothing is read.
    pairs = triples[..., first] | (triples[..., (first + 1).clamp(max=2)] << WORD_BITS)
    return ((pairs >> shifts) & 7).int().flatten(-2)


def unpack_nibbles(packed: Tensor, *, is_high_first: bool) -> Tensor:
    """Return the two codes of each byte as bytes, along the last axis."""
    import torch

    low, high = packed & 15, packed >> 4
    return torch.stack((high, low) if is_high_first else (low, high), dim=-1).flatten(-2)
