"""Weights of AWQ in the layout `gemm`: codes of 4 bits, packed along the outputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from build_artifacts.errors import UnsupportedModel
from build_artifacts.weight_formats.base import (
    SCALE_DTYPES,
    UNQUANTIZED_HINT,
    FileTensor,
    FloatWeight,
    QuantizedWeight,
    WeightFormat,
    check_shape,
)
from build_artifacts.weight_formats.packing import WORD_BITS
from build_artifacts.weight_formats.scale_grid import (
    ScaleBlock,
    ScaleGrid,
    build_block_grid,
    build_scaled_weight,
    count_blocks,
)

if TYPE_CHECKING:
    from torch import Tensor

AWQ_BITS = 4
_SCALES = ".scales"
_WORD_CODES = WORD_BITS // AWQ_BITS
# Places of eight outputs in a word: it has the outputs 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class AwqFormat(WeightFormat):
    """Weights [inputs, outputs] in int32 words. Scales and zeros are [groups, outputs]."""

    group_size: int | None  # None: all inputs
    endings: ClassVar = dict.fromkeys((".qweight", ".qzeros", _SCALES), ".weight")

    @property
    def title(self) -> str:
        return f"AWQ with {AWQ_BITS} bits"

    def decode(self, weight: QuantizedWeight) -> FloatWeight:
        if weight.tensors.keys() == {_SCALES}:  # as in Falcon, of an activation between two weights
            raise UnsupportedModel(
                f"the checkpoint divides activations by `{weight.tensors[_SCALES].name}`, which "
                "cannot be built",
                hint=UNQUANTIZED_HINT,
            )
        words = weight.require_matrix(".qweight", ("I32",))
        zeros = weight.require_matrix(".qzeros", ("I32",))
        scales = weight.require_matrix(_SCALES, SCALE_DTYPES)
        inputs, outputs = words.shape[0], words.shape[1] * _WORD_CODES
        shape = (outputs, inputs)
        groups = count_blocks(inputs, self.group_size)
        check_shape(scales, (groups, outputs), shape)
        check_shape(zeros, (groups, words.shape[1]), shape)

        def build_grid() -> ScaleGrid:
            block = ScaleBlock(1, self.group_size)
            codes = _unpack_outputs(zeros.read()).float()
            return build_block_grid(scales.read_scales().T, shape, block, codes)

        return build_scaled_weight(shape, partial(_read_codes, words), build_grid)


def _read_codes(words: FileTensor, _: int, part: slice) -> Tensor:
    """Return the codes of some outputs, which may begin and end within a word."""
    first = part.start // _WORD_CODES
    used = words.values[:, first : -(-part.stop // _WORD_CODES)]
    skipped = first * _WORD_CODES
    return _unpack_outputs(used)[part.start - skipped : part.stop - skipped].float()


def _unpack_outputs(words: Tensor) -> Tensor:
    """Return the codes in words [inputs, words] as integers [outputs, inputs]."""
    import torch

    shifts = torch.tensor(_PLACES, dtype=torch.int32) * AWQ_BITS
    shifted = words.T.contiguous()[:, None, :] >> shifts[:, None]
    return (shifted & ((1 << AWQ_BITS) - 1)).flatten(0, 1)
