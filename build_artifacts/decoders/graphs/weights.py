"""Lazy reader of checkpoint tensors: a checkpoint may be larger than the memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from build_artifacts.errors import UnsupportedModel
from build_artifacts.types import FloatArray

Side = Literal["encoder", "decoder"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class CheckpointWeights:
    """Tensors by name, as fp32.

    In a checkpoint of a model with a task head, the names start with `base`, such as "model.". This
    class removes that prefix.
    """

    def __init__(self, checkpoint: Path, base: str = "") -> None:
        import ml_dtypes  # noqa: F401 - registers bf16 with numpy
        from safetensors import safe_open

        self._files: dict[str, Any] = {}  # open file, by tensor name without `base`
        self._stored: dict[str, str] = {}  # tensor name in the file, by name without `base`
        for path in _files(checkpoint):
            file: Any = safe_open(path, framework="numpy")
            for stored in file.keys():  # noqa: SIM118 - the file object is no mapping
                name = stored.removeprefix(base)
                self._files[name], self._stored[name] = file, stored

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the tensor. Raises UnsupportedModel when it is missing."""
        return tuple(self._file(name).get_slice(self._stored[name]).get_shape())

    def read(self, name: str) -> FloatArray:
        """Return a copy of the tensor. Raises UnsupportedModel when it is missing."""
        tensor: NDArray[np.generic] = self._file(name).get_tensor(self._stored[name])
        return tensor.astype(np.float32, copy=False)

    def first(self, names: Sequence[str]) -> str:
        """Return the first of `names` that the checkpoint has, or `names[0]` if it has none.

        A checkpoint stores a shared tensor under only one of its names.
        """
        return next((name for name in names if name in self), names[0])

    def _file(self, name: str) -> Any:
        if name not in self._files:
            raise UnsupportedModel(
                f"the checkpoint has no tensor `{name}`",
                hint="download the checkpoint again, or correct the architecture in config.json",
            )
        return self._files[name]


def embedding_names(side: Side) -> list[str]:
    """Return the possible names of the embedding table of `side`: its own or the shared table."""
    return [f"{side}.embed_tokens.weight", "shared.weight"]


def _files(checkpoint: Path) -> list[Path]:
    """Return the files of the weights. As in transformers, one whole file comes before shards."""
    if (checkpoint / _SINGLE).is_file():
        return [checkpoint / _SINGLE]
    shards = json.loads((checkpoint / _INDEX).read_bytes())["weight_map"].values()
    return [checkpoint / shard for shard in sorted(set(shards))]
