"""Scales that keys and values are rounded to int8 with, one for each channel of each head.

Keys are kept rotated by their position, in pairs of channels. What texts show of one half of a
pair, longer ones may show of the other: the scale of both is that of the pair's length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from build_artifacts.decoders.float_graph import Floats

LARGEST = 127
_MARGIN = 1.1  # for texts that nobody has seen yet
_LEAST = 1e-6  # the scale of channels that are always zero


class ChannelScales:
    """The scales of one memory's channels, by the values that were seen."""

    def __init__(self, pairs: int = 0, *, interleaved: bool = False) -> None:
        """The first 2 x `pairs` channels are rotated in pairs: halves of them, or neighbours."""
        self._pairs, self._interleaved = pairs, interleaved
        self._largest: Floats = np.zeros((), np.float32)

    def see(self, kept: Floats) -> None:
        """Take the values of one text into account, [heads, tokens, size]."""
        sizes = np.abs(kept)
        rotated = kept[..., : 2 * self._pairs]
        parted = (self._pairs, 2) if self._interleaved else (2, self._pairs)
        by_pair = (*rotated.shape[:-1], *parted)
        axis = -1 if self._interleaved else -2
        lengths = np.linalg.norm(rotated.reshape(by_pair), axis=axis, keepdims=True)
        sizes[..., : 2 * self._pairs] = np.broadcast_to(lengths, by_pair).reshape(rotated.shape)
        self._largest = np.maximum(self._largest, sizes.max(axis=1))

    @property
    def table(self) -> Floats:
        """[heads, size]."""
        scales: Floats = np.maximum(self._largest * _MARGIN / LARGEST, _LEAST)
        return scales.astype(np.float32)


def seen_in(
    texts: Iterable[Mapping[str, Floats]], scales: Mapping[str, ChannelScales]
) -> Mapping[str, Floats]:
    """The tables of all memories, by name, once each text was seen in them."""
    for text in texts:
        for name, scale in scales.items():
            scale.see(text[name])
    return {name: scale.table for name, scale in scales.items()}
