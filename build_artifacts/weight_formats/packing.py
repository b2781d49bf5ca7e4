"""Codes of few bits that are packed into larger integers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

WORD_BITS = 32


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Return the codes in int32 words [rows, words] as integers [rows, codes].

    The first code of a word is in its lowest bits. `bits` divides 32, or is 3: then three words
    have 32 codes.
    """
    import torch

    match bits:
        case 3:
            return _unpack_3_bits(words)
        case 4:  # half the time of shifted words
            return unpack_nibbles(words.contiguous().view(torch.uint8), is_high_first=False)
        case 8:
            return words.contiguous().view(torch.uint8)
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
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


def look_up(table: Tensor, codes: Tensor) -> Tensor:
    """Return the value in the table of each code. Quicker than the index operator."""
    return table.index_select(0, codes.int().reshape(-1)).reshape(codes.shape)
