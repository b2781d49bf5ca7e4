"""Weights in integers with scales and zeros, packed from the definitions of their formats.

Codes become a sequence of bits here, which the code under test never builds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Codes = NDArray[np.int64]


@dataclass(frozen=True)
class IntegerWeight:
    """A weight [rows, columns], whose columns have groups with a scale and a zero per row."""

    bits: int
    codes: Codes  # [rows, columns], from 0 on
    zeros: Codes  # [rows, groups]
    scales: Tensor  # [rows, groups]
    groups: Codes  # [columns]

    def compute(self, dtype: torch.dtype) -> Tensor:
        """Return the values, one column after the other."""
        columns = [
            (torch.from_numpy(self.codes[:, i] - self.zeros[:, group]).float())
            * self.scales[:, group].float()
            for i, group in enumerate(self.groups)
        ]
        return torch.stack(columns, dim=1).to(dtype)


def quantize_groups(
    weight: Tensor,
    bits: int,
    size: int,
    *,
    dtype: torch.dtype = torch.float16,
    is_symmetric: bool = False,
    is_reordered: bool = False,
) -> IntegerWeight:
    """Quantize groups of `size` columns. The columns of a group are scattered if reordered."""
    values = weight.detach().float().numpy()
    columns = values.shape[1]
    groups = np.arange(columns) // size
    if is_reordered:
        groups = np.random.default_rng(1).permutation(groups)
    codes = np.empty(values.shape, np.int64)
    counts = int(groups.max()) + 1
    zeros = np.empty((len(values), counts), np.int64)
    scales = torch.empty(len(values), counts, dtype=dtype)
    top = 2**bits - 1
    for group in range(counts):
        part = values[:, groups == group]
        low, high = part.min(1).clip(max=-1e-3), part.max(1).clip(min=1e-3)
        if is_symmetric:
            high = np.maximum(high, -low)
            low = -high
        scales[:, group] = torch.from_numpy((high - low) / top)
        scale = scales[:, group].double().numpy()
        zero = np.full(len(values), 2 ** (bits - 1)) if is_symmetric else np.rint(-low / scale)
        zeros[:, group] = zero.clip(1, top)
        rounded = np.rint(part / scale[:, None]) + zeros[:, group, None]
        codes[:, groups == group] = rounded.clip(0, top)
    return IntegerWeight(bits, codes, zeros, scales, groups)


def pack_bits(codes: Codes, bits: int) -> Tensor:
    """Return int32 words [rows, words] with the codes [rows, codes] as one sequence of bits each.

    The lowest bit of the first code is the first bit. The last word may be longer than the codes.
    """
    each = codes.astype(np.uint8)[..., None]
    stream = np.unpackbits(each, axis=-1, bitorder="little")[..., :bits].reshape(len(codes), -1)
    filled = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    words = np.packbits(filled, axis=-1, bitorder="little").view("<i4")
    return torch.from_numpy(words.copy())


def pack_gptq(weight: IntegerWeight, zero_offset: int = 1) -> dict[str, Tensor]:
    """Return the tensors by the ends of their names. The words lie along the columns."""
    stored = (weight.zeros - zero_offset) % 2**weight.bits
    return {
        "qweight": pack_bits(weight.codes, weight.bits).T.contiguous(),
        "qzeros": pack_bits(stored.T, weight.bits),
        "scales": weight.scales.T.contiguous(),
        "g_idx": torch.from_numpy(weight.groups).int(),
    }


def pack_awq(weight: IntegerWeight) -> dict[str, Tensor]:
    """Return the tensors by the ends of their names. The words lie along the rows."""

    def interleave(codes: Codes) -> Codes:
        eights = codes.T.reshape(codes.shape[1], -1, 8)
        return eights[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(codes.shape[1], -1)

    return {
        "qweight": pack_bits(interleave(weight.codes), 4),
        "qzeros": pack_bits(interleave(weight.zeros), 4),
        "scales": weight.scales.T.contiguous(),
    }


def pack_compressed(
    weight: IntegerWeight, *, has_zeros: bool, is_reordered: bool = False
) -> dict[str, Tensor]:
    """Return the tensors by the ends of their names. Zeros are packed along the rows."""
    tensors = {
        "weight_packed": pack_bits(weight.codes, weight.bits),
        "weight_scale": weight.scales,
        "weight_shape": torch.tensor(weight.codes.shape),
    }
    if has_zeros:
        tensors["weight_zero_point"] = pack_bits(weight.zeros.T, weight.bits).T.contiguous()
    if is_reordered:
        tensors["weight_g_idx"] = torch.from_numpy(weight.groups).int()
    return tensors
