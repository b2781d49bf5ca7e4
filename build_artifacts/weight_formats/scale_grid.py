"""Weights as (code - zero) * scale. A block of values shares its zero and its scale."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, NamedTuple

from build_artifacts.checkpoints.checkpoint import DAMAGED_HINT
from build_artifacts.errors import UnsupportedModel
from build_artifacts.weight_formats.base import (
    FileTensor,
    FloatWeight,
    shape_error,
    split_rows,
)

if TYPE_CHECKING:
    from torch import Tensor


class ScaleBlock(NamedTuple):
    """Rows and columns of a weight that share a scale. None stands for all of them."""

    rows: int | None
    columns: int | None


WHOLE = ScaleBlock(None, None)
ROW = ScaleBlock(1, None)


class ScaleGrid(NamedTuple):
    """Scales and zeros of a weight [..., rows, columns], one for each block of its matrices.

    `zeros` has the shape of `scales`. A number is the zero of all blocks.
    """

    scales: Tensor  # fp32, [matrices, block rows, block columns]
    rows: Tensor  # block row of each row
    columns: Tensor  # block column of each column
    zeros: Tensor | int = 0

    def scale(self, codes: Tensor, matrix: int, part: slice) -> Tensor:
        """Return the values of some rows of a matrix. `codes` is in fp32, and changes."""
        rows = self.rows[part]
        if not isinstance(self.zeros, int):
            codes.sub_(_expand(self.zeros[matrix], rows, self.columns))
        elif self.zeros:
            codes.sub_(self.zeros)
        return codes.mul_(_expand(self.scales[matrix], rows, self.columns))


def build_scaled_weight(
    shape: tuple[int, ...],
    read_codes: Callable[[int, slice], Tensor],
    build_grid: Callable[[], ScaleGrid],
) -> FloatWeight:
    """Return a weight of this shape, whose values are read in parts of rows.

    `read_codes` returns the codes of some rows of a matrix in fp32. The grid is built when the
    values are read: the scales of all weights together would take gigabytes.
    """
    *_, rows, columns = shape

    def read() -> Iterator[Tensor]:
        grid = build_grid()
        for matrix in range(len(grid.scales)):
            for part in split_rows(rows, columns):
                yield grid.scale(read_codes(matrix, part), matrix, part)

    return FloatWeight(shape, read)


def index_blocks(size: int, block: int | None) -> Tensor:
    """Return the block of each of `size` rows or columns. The last block may be smaller."""
    import torch

    return torch.arange(size) // (block or size or 1)


def count_blocks(size: int, block: int | None) -> int:
    """Return the number of blocks of `size` rows or columns, which is 1 for the block None."""
    return 1 if block is None else -(-size // block)


def read_groups(order: FileTensor, groups: int) -> Tensor | None:
    """Return the group of each input that `order` states, or None if it states -1 for all.

    Raises UnsupportedModel for a group beyond `groups`, the number of groups with scales.
    """
    indices = order.read().long()
    lowest, highest = (int(each) for each in indices.aminmax()) if len(indices) else (0, 0)
    if lowest == highest == -1:
        return None
    if lowest < 0 or highest >= groups:
        raise UnsupportedModel(
            f"the tensor `{order.name}` states groups from {lowest} to {highest}; its weight has "
            f"{groups} groups",
            hint=DAMAGED_HINT,
        )
    return indices


def choose_block(
    scales: FileTensor, blocks: Collection[ScaleBlock], shape: tuple[int, int]
) -> ScaleBlock:
    """Return the block among those of the config to which the shape of the scales fits.

    `shape` is that of the weight. Raises UnsupportedModel if it fits to none.
    """
    for block in blocks:
        expected = _count_scales(shape, block)
        short = {WHOLE: ((), (1,)), ROW: ((shape[0],),)}.get(block, ())
        if scales.shape in (expected, *short):
            return block
    raise shape_error(scales, _count_scales(shape, next(iter(blocks))), shape)


def _count_scales(shape: tuple[int, int], block: ScaleBlock) -> tuple[int, int]:
    return count_blocks(shape[0], block.rows), count_blocks(shape[1], block.columns)


def build_block_grid(
    scales: Tensor, shape: tuple[int, int], block: ScaleBlock, zeros: Tensor | int = 0
) -> ScaleGrid:
    """Return the grid of a matrix. `scales` and `zeros` have any shape with the right count."""
    counts = _count_scales(shape, block)
    return ScaleGrid(
        scales=scales.reshape(1, *counts),
        rows=index_blocks(shape[0], block.rows),
        columns=index_blocks(shape[1], block.columns),
        zeros=zeros if isinstance(zeros, int) else zeros.reshape(1, *counts),
    )


def _expand(blocks: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return the number of each value of some rows, or one for all columns.

    `rows` and `columns` are the block rows and the block columns of the values.
    """
    first, last = int(rows[0]), int(rows[-1])
    used = blocks[first : last + 1]
    # Columns first: of the few block rows instead of the many rows.
    spread = used if used.shape[1] == 1 else used.index_select(1, columns)
    return spread if len(spread) == len(rows) else spread.index_select(0, rows - first)
