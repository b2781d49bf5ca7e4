"""Weights of GPTQ: codes packed along the inputs, with scales and zeros of groups of inputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from build_artifacts.errors import UnsupportedModel
from build_artifacts.weight_formats.base import (
    SCALE_DTYPES,
    FileTensor,
    FloatWeight,
    QuantizedWeight,
    WeightFormat,
    check_shape,
)
from build_artifacts.weight_formats.packing import WORD_BITS, unpack_words
from build_artifacts.weight_formats.scale_grid import (
    ScaleGrid,
    build_scaled_weight,
    count_blocks,
    index_blocks,
    read_groups,
)

if TYPE_CHECKING:
    from torch import Tensor

GPTQ_BITS = (2, 3, 4, 8)


@dataclass(frozen=True, slots=True)
class GptqFormat(WeightFormat):
    """Weights [inputs, outputs] in int32 words, with the group of each input in `g_idx`.

    `bits` and `group_size` are those of the config, whose `dynamic` may state others for modules.
    The bits of a weight follow from its shapes, and its groups from `g_idx`.
    """

    bits: int
    group_size: int | None  # None: all inputs
    zero_offset: int  # added to the stored zeros, modulo the number of codes
    endings: ClassVar = dict.fromkeys((".qweight", ".qzeros", ".scales", ".g_idx"), ".weight")

    @property
    def title(self) -> str:
        return f"GPTQ with {self.bits} bits"

    def decode(self, weight: QuantizedWeight) -> FloatWeight:
        words = weight.require_matrix(".qweight", ("I32",))
        zeros = weight.require_matrix(".qzeros", ("I32",))
        scales = weight.require_matrix(".scales", SCALE_DTYPES)
        groups, outputs = scales.shape
        bits = WORD_BITS * zeros.shape[1] // max(1, outputs)
        if bits not in GPTQ_BITS:
            raise UnsupportedModel(
                f"the tensor `{zeros.name}` has the shape {list(zeros.shape)}, which is that of "
                f"{bits} bits for {outputs} outputs",
                hint=f"supported are {', '.join(map(str, GPTQ_BITS))} bits",
            )
        inputs = words.shape[0] * WORD_BITS // bits
        shape = (outputs, inputs)
        check_shape(words, (inputs * bits // WORD_BITS, outputs), shape)
        check_shape(zeros, (groups, outputs * bits // WORD_BITS), shape)
        order = weight.find(".g_idx", ("I32", "I64"))
        if order is None:
            self._check_groups(scales, shape)
        else:
            check_shape(order, (inputs,), shape)

        def build_grid() -> ScaleGrid:
            import torch

            codes = unpack_words(zeros.read(), bits).int() + self.zero_offset
            return ScaleGrid(
                scales=scales.read_scales().T.contiguous()[None],
                rows=torch.arange(outputs),
                columns=self._read_groups(order, scales, shape),
                zeros=(codes & ((1 << bits) - 1)).float().T.contiguous()[None],
            )

        return build_scaled_weight(shape, partial(_read_codes, words, bits), build_grid)

    def _check_groups(self, scales: FileTensor, shape: tuple[int, int]) -> None:
        """Raise UnsupportedModel unless the weight has groups of the size in the config."""
        outputs, inputs = shape
        check_shape(scales, (count_blocks(inputs, self.group_size), outputs), shape)

    def _read_groups(
        self, order: FileTensor | None, scales: FileTensor, shape: tuple[int, int]
    ) -> Tensor:
        """Return the group of each input.

        Early checkpoints without activation order have zeros in place of the groups. Raises
        UnsupportedModel if such a checkpoint has groups of another size than its config.
        """
        if order is not None:
            groups = scales.shape[0]
            stored = read_groups(order, groups)
            if stored is not None and (groups == 1 or bool(stored.any())):
                return stored
            self._check_groups(scales, shape)
        return index_blocks(shape[1], self.group_size)


def _read_codes(words: FileTensor, bits: int, _: int, part: slice) -> Tensor:
    """Return the codes of some outputs, which are columns of the words."""
    return unpack_words(words.values[:, part].T.contiguous(), bits).float()
