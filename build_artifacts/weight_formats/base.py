"""Interface of a weight format, and the tensors of a quantized weight."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from build_artifacts.checkpoints.checkpoint import DAMAGED_HINT
from build_artifacts.errors import UnsupportedModel

if TYPE_CHECKING:
    from torch import Tensor

# Values in memory at once. Parts that fit into the cache of a core are converted twice as fast.
_MAX_PART_VALUES = 1 << 20
UNQUANTIZED_HINT = "build from a checkpoint that is not quantized"
CONFIG_HINT = "correct `quantization_config` in config.json, or download the checkpoint again"
SCALE_DTYPES = ("F32", "BF16", "F16")


def split_rows(rows: int, columns: int) -> Iterator[slice]:
    """Yield the rows of a matrix in slices of a few megabytes."""
    step = max(1, _MAX_PART_VALUES // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


class FileTensor(NamedTuple):
    """A tensor of the checkpoint. Its values stay in the file."""

    file: Any  # a `safe_open` object of torch tensors
    name: str
    dtype: str  # in the words of safetensors
    shape: tuple[int, ...]

    @property
    def values(self) -> Any:
        """The object whose slices, such as `values[2:5]`, are read from the file."""
        return self.file.get_slice(self.name)

    def read(self) -> Tensor:
        tensor: Tensor = self.file.get_tensor(self.name)
        return tensor

    def read_parts(self) -> Iterator[Tensor]:
        """Yield the values in order, in parts of the first axis."""
        if not self.shape:
            yield self.read()
            return
        values = self.values
        for part in split_rows(self.shape[0], math.prod(self.shape[1:])):
            yield values[part]

    def read_rows(self, matrix: int, part: slice) -> Tensor:
        """Return some rows of a matrix in fp32. A tensor of two axes is one matrix."""
        rows = self.values[part] if len(self.shape) == 2 else self.values[matrix, part]
        numbers: Tensor = rows.float()
        return numbers

    def read_scales(self) -> Tensor:
        """Return the values in fp32. Raises UnsupportedModel if some are not finite."""
        import torch

        scales = self.read().float()
        if not bool(torch.isfinite(scales).all()):
            raise UnsupportedModel(
                f"the scales `{self.name}` have values that are not finite", hint=DAMAGED_HINT
            )
        return scales


class FloatWeight(NamedTuple):
    """Shape of a weight and its values, which `read` yields in fp32, in order and in parts."""

    shape: tuple[int, ...]
    read: Callable[[], Iterator[Tensor]]


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """The tensors that together are one weight. They may be in several files.

    `tensors` has them by the ending of their names, as in `endings` of the format.
    """

    name: str
    tensors: Mapping[str, FileTensor]
    endings: Mapping[str, str]

    def find(self, ending: str, dtypes: Collection[str] | None = None) -> FileTensor | None:
        """Return the tensor, or None if it is missing.

        Raises UnsupportedModel if it has another type than `dtypes`. None allows all types.
        """
        tensor = self.tensors.get(ending)
        if tensor is not None and dtypes is not None and tensor.dtype not in dtypes:
            raise UnsupportedModel(
                f"the tensor `{tensor.name}` has the type {tensor.dtype}, which cannot be built",
                hint=f"supported for this tensor: {', '.join(dtypes)}",
            )
        return tensor

    def require(self, ending: str, dtypes: Collection[str]) -> FileTensor:
        """Return the tensor. Raises UnsupportedModel if it is missing or has another type."""
        tensor = self.find(ending, dtypes)
        if tensor is None:
            name = f"{self.name.removesuffix(self.endings[ending])}{ending}"
            raise UnsupportedModel(
                f"the checkpoint has no tensor `{name}`, which its quantized weight "
                f"`{self.name}` needs",
                hint=DAMAGED_HINT,
            )
        return tensor

    def require_matrix(self, ending: str, dtypes: Collection[str]) -> FileTensor:
        """Return the tensor. Raises as `require` does, and for a tensor that is no matrix."""
        tensor = self.require(ending, dtypes)
        if len(tensor.shape) != 2:
            raise UnsupportedModel(
                f"the tensor `{tensor.name}` has the shape {list(tensor.shape)}, which is not that "
                "of a matrix",
                hint=UNQUANTIZED_HINT,
            )
        return tensor


def check_shape(tensor: FileTensor, expected: tuple[int, ...], weight: tuple[int, ...]) -> None:
    """Raise UnsupportedModel unless the tensor has the shape that its weight needs."""
    if tensor.shape != expected:
        raise shape_error(tensor, expected, weight)


def shape_error(
    tensor: FileTensor, expected: tuple[int, ...], weight: tuple[int, ...]
) -> UnsupportedModel:
    return UnsupportedModel(
        f"the tensor `{tensor.name}` has the shape {list(tensor.shape)}; its weight of the shape "
        f"{list(weight)} needs {list(expected)}",
        hint=CONFIG_HINT,
    )


class WeightFormat(ABC):
    """A format of the quantized weights of a checkpoint."""

    # Ending of a tensor's name -> ending of its weight's name, such as `.qweight` -> `.weight`. The
    # ending "" is the tensor with the weight's own name.
    endings: ClassVar[Mapping[str, str]]
    unused: ClassVar[tuple[str, ...]] = ()  # endings of tensors for activations and KV caches
    # Types that only tensors of quantized weights have.
    quantized_dtypes: ClassVar[Collection[str]] = ()

    @property
    @abstractmethod
    def title(self) -> str:
        """Name of the format in progress and messages, such as `GPTQ with 4 bits`."""

    @abstractmethod
    def decode(self, weight: QuantizedWeight) -> FloatWeight:
        """Check the tensors of a weight, and return its float form.

        The values stay in the file until `read` is called. Raises UnsupportedModel for a missing
        tensor, or another type or shape. `read` raises UnsupportedModel for invalid values, such
        as scales that are not finite.
        """

    def find_weight(self, name: str, names: Collection[str]) -> tuple[str, str] | None:
        """Return weight and ending of the tensor `name`, or None if it is no part of a weight.

        `names` has all tensors: a tensor such as `logit_scale` belongs to no weight among them.
        """
        for ending, replacement in self.endings.items():
            weight = f"{name.removesuffix(ending)}{replacement}"
            if ending and name.endswith(ending) and (weight.endswith(".weight") or weight in names):
                return weight, ending
        return None
