"""Lazy reader of checkpoint tensors: a checkpoint may be larger than the memory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from build_artifacts.errors import UnsupportedModel
from build_artifacts.types import FloatArray

Side = Literal["encoder", "decoder"]
# Factors of tensors by the ends of their names: one for all rows, or one for each row.
RowFactors = Mapping[str, float | FloatArray]
# Pairs of a part of a name in a checkpoint and its replacement.
Renames = Sequence[tuple[str, str]]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class FusedModule:
    """A linear layer of a checkpoint that computes the outputs of several."""

    name: str
    parts: tuple[str, ...]
    # The parts alternate along the outputs, `groups` times. With one group, they follow each other.
    groups: int = 1
    sizes: tuple[int, ...] = ()  # relative sizes of the parts; () for equal ones

    @property
    def shares(self) -> tuple[int, ...]:
        """Relative sizes of the parts."""
        return self.sizes or (1,) * len(self.parts)


class _StoredTensor(NamedTuple):
    """A tensor of a checkpoint, or a part of one."""

    file: Any
    name: str  # in the file
    fused: FusedModule | None = None
    part: int = 0  # index in `fused.parts`

    def shape(self) -> tuple[int, ...]:
        rows, *columns = self.file.get_slice(self.name).get_shape()
        if self.fused is not None:
            shares = self.fused.shares
            rows = rows // sum(shares) * shares[self.part]
        return (rows, *columns)

    def read(self) -> NDArray[np.generic]:
        tensor: NDArray[np.generic] = self.file.get_tensor(self.name)
        if self.fused is None:
            return tensor
        shares, columns = self.fused.shares, tensor.shape[1:]
        groups = tensor.reshape(self.fused.groups, sum(shares), -1, *columns)
        first = sum(shares[: self.part])
        return groups[:, first : first + shares[self.part]].reshape(-1, *columns)


class CheckpointWeights:
    """Tensors by name, as fp32.

    In a checkpoint of a model with a task head, the names start with `base`, such as "model.". This
    class removes that prefix. It applies `renames`, makes the parts of `fused` modules readable
    under their own names, and multiplies tensors by `factors`.
    """

    def __init__(
        self,
        checkpoint: Path,
        base: str = "",
        *,
        renames: Renames = (),
        fused: Sequence[FusedModule] = (),
        factors: Mapping[str, float | FloatArray] = {},
    ) -> None:
        import ml_dtypes  # noqa: F401 - registers bf16 with numpy
        from safetensors import safe_open

        self._factors = factors
        self._tensors: dict[str, _StoredTensor] = {}
        for path in _files(checkpoint):
            file: Any = safe_open(path, framework="numpy")
            for stored in file.keys():  # noqa: SIM118 - the file object is no mapping
                name = stored.removeprefix(base)
                for old, new in renames:
                    name = name.replace(old, new)
                self._add(name, _StoredTensor(file, stored), fused)

    def _add(self, name: str, tensor: _StoredTensor, fused: Sequence[FusedModule]) -> None:
        whole = next((each for each in fused if f".{each.name}." in name), None)
        if whole is None:
            self._tensors[name] = tensor
            return
        rows = tensor.shape()[0]
        if rows % (sum(whole.shares) * whole.groups):
            raise UnsupportedModel(
                f"the tensor `{tensor.name}` has {rows} rows, not a multiple of "
                f"{sum(whole.shares) * whole.groups}",
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
        values: FloatArray = self.read_stored(name).astype(np.float32, copy=False)
        for end, factors in self._factors.items():
            if name.endswith(end):
                return (values.T * np.asarray(factors, np.float32)).T
        return values

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


def _files(checkpoint: Path) -> list[Path]:
    """Return the files of the weights. As in transformers, one whole file comes before shards."""
    if (checkpoint / _SINGLE).is_file():
        return [checkpoint / _SINGLE]
    shards = json.loads((checkpoint / _INDEX).read_bytes())["weight_map"].values()
    return [checkpoint / shard for shard in sorted(set(shards))]
