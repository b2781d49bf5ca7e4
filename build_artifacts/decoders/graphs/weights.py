"""Lazy reader of checkpoint tensors: a checkpoint may be larger than the memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from build_artifacts.checkpoints.checkpoint import list_weight_files
from build_artifacts.errors import UnsupportedModel
from build_artifacts.types import FloatArray

Side = Literal["encoder", "decoder"]
# Factors of tensors by the ends of their names: one for all rows, or one for each row.
RowFactors = Mapping[str, float | FloatArray]
# Pairs of a part of a name in a checkpoint and its replacement.
Renames = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class FusedModule:
    """A linear layer of a checkpoint that computes the outputs of several."""

    name: str
    parts: tuple[str, ...]
    # The parts alternate along the outputs, `groups` times. With one group, they follow each other.
    groups: int = 1
    shares: tuple[int, ...] = ()  # relative sizes of the parts; empty if all sizes are equal

    @property
    def bounds(self) -> list[int]:
        """Ends of the parts within a group, in units of the shares, after a first 0."""
        return [0, *accumulate(self.shares or (1,) * len(self.parts))]

    @property
    def units(self) -> int:
        """Number of units of all groups. It divides the outputs."""
        return self.bounds[-1] * self.groups


class _StoredTensor(NamedTuple):
    """A tensor of a checkpoint, or a part of one."""

    file: Any
    name: str  # in the file
    is_transposed: bool = False  # whether the file has a weight as [in, out]
    fused: FusedModule | None = None
    part: int = 0  # index in `fused.parts`

    def shape(self) -> tuple[int, ...]:
        shape = self.file.get_slice(self.name).get_shape()
        rows, *columns = shape[::-1] if self.is_transposed else shape
        if self.fused is not None:
            first, end = self.fused.bounds[self.part :][:2]
            rows = rows // self.fused.bounds[-1] * (end - first)
        return (rows, *columns)

    def read(self) -> NDArray[np.generic]:
        tensor: NDArray[np.generic] = self.file.get_tensor(self.name)
        if self.is_transposed:
            tensor = tensor.T
        if self.fused is None:
            return tensor
        first, end = self.fused.bounds[self.part :][:2]
        groups = tensor.reshape(self.fused.groups, self.fused.bounds[-1], -1, *tensor.shape[1:])
        return groups[:, first:end].reshape(-1, *tensor.shape[1:])


class CheckpointWeights:
    """Tensors by name, as fp32.

    In a checkpoint of a model with a task head, the names start with `base`, such as "model.". This
    class removes that prefix. It applies `renames` to names with a dot in front, so that ".h." is
    a whole part of a name. It makes the parts of `fused` modules readable under their own names.
    The weights of modules in `transposed`, the last part of a stored name, become [out, in]. It
    multiplies tensors by `factors`.
    """

    def __init__(
        self,
        checkpoint: Path,
        base: str = "",
        *,
        renames: Renames = (),
        fused: Sequence[FusedModule] = (),
        transposed: Collection[str] = (),
        factors: RowFactors = MappingProxyType({}),
    ) -> None:
        import ml_dtypes  # noqa: F401 - registers bf16 with numpy
        from safetensors import safe_open

        self._factors = factors
        self._tensors: dict[str, _StoredTensor] = {}
        for path in list_weight_files(checkpoint):
            file: Any = safe_open(path, framework="numpy")
            for stored in file.keys():  # noqa: SIM118 - the file object is no mapping
                name = f".{stored.removeprefix(base)}"
                for old, new in renames:
                    name = name.replace(old, new)
                module, _, kind = stored.rpartition(".")
                is_transposed = kind == "weight" and module.rpartition(".")[2] in transposed
                tensor = _StoredTensor(file, stored, is_transposed)
                self._add(name.removeprefix("."), tensor, fused)

    def _add(self, name: str, tensor: _StoredTensor, fused: Sequence[FusedModule]) -> None:
        whole = next((each for each in fused if f".{each.name}." in name), None)
        if whole is None:
            self._tensors[name] = tensor
            return
        rows = tensor.shape()[0]
        if rows % whole.units:
            raise UnsupportedModel(
                f"the tensor `{tensor.name}` has {rows} rows, not a multiple of {whole.units}",
                hint="download the checkpoint again, or correct the sizes in config.json",
            )
        for index, part in enumerate(whole.parts):
            own = tensor._replace(fused=whole, part=index)
            self._tensors[name.replace(f".{whole.name}.", f".{part}.")] = own

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the tensor. Raises UnsupportedModel when it is missing."""
        return self._find(name).shape()

    def read(self, name: str) -> FloatArray:
        """Return a copy of the tensor. Raises UnsupportedModel when it is missing."""
        return self._convert(name, self.read_stored(name))

    def read_columns(self, name: str, columns: slice) -> FloatArray:
        """Return columns of a matrix. Raises UnsupportedModel when it is missing."""
        tensor = self._find(name)
        part: NDArray[np.generic] = tensor.file.get_slice(tensor.name)[:, columns]
        return self._convert(name, part)

    def read_stored(self, name: str) -> NDArray[np.generic]:
        """Return a copy of the tensor with its own type.

        Raises UnsupportedModel when it is missing.
        """
        return self._find(name).read()

    def first(self, names: Sequence[str]) -> str:
        """Return the first of `names` that the checkpoint has, or `names[0]` if it has none.

        A checkpoint stores a shared tensor under only one of its names.
        """
        return next((name for name in names if name in self), names[0])

    def _convert(self, name: str, stored: NDArray[np.generic]) -> FloatArray:
        """Convert rows of a tensor to fp32, and multiply them by their factors."""
        values: FloatArray = stored.astype(np.float32, copy=False)
        for end, factors in self._factors.items():
            if name.endswith(end):
                return (values.T * np.asarray(factors, np.float32)).T
        return values

    def _find(self, name: str) -> _StoredTensor:
        if name not in self._tensors:
            raise UnsupportedModel(
                f"the checkpoint has no tensor `{name}`",
                hint="download the checkpoint again, or correct the architecture in config.json",
            )
        return self._tensors[name]


def embedding_names(side: Side) -> list[str]:
    """Return the possible names of the embedding table of `side`: its own or the shared table."""
    return [f"{side}.embed_tokens.weight", "shared.weight"]
