"""Scales that keys and values are rounded to int8 with, one for each channel of each head.

Keys are kept rotated by their position, in pairs of channels. What texts show of one half of a
pair, longer ones may show of the other: the scale of both is that of the pair's length.
"""

from __future__ import annotations

import numpy as np

from build_artifacts.decoders.float_graph import Floats

LARGEST = 127
_MARGIN = 1.1  # for texts that nobody has seen yet
_LEAST = 1e-6  # the scale of channels that are always zero


def scales_of(kept: Floats, pairs: int = 0, *, interleaved: bool = False) -> Floats:
    """The scale of each channel, of which values [tokens, heads, size] were seen: [heads, size].

    The first 2 x `pairs` channels are rotated in pairs: halves of them, or neighbours.
    """
    sizes = np.abs(kept)
    rotated = kept[..., : 2 * pairs]
    by_pair = (*rotated.shape[:-1], pairs, 2) if interleaved else (*rotated.shape[:-1], 2, pairs)
    axis = -1 if interleaved else -2
    lengths = np.linalg.norm(rotated.reshape(by_pair), axis=axis, keepdims=True)
    sizes[..., : 2 * pairs] = np.broadcast_to(lengths, by_pair).reshape(rotated.shape)
    scales: Floats = np.maximum(sizes.max(axis=0) * _MARGIN / LARGEST, _LEAST)
    return scales.astype(np.float32)
