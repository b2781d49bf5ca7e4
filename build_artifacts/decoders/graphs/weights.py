"""The tensors of a checkpoint, read one at a time: a model need not fit into memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from build_artifacts.decoders.float_graph import FloatArray
from build_artifacts.errors import UnsupportedModel

Side = Literal["encoder", "decoder"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class CheckpointWeights:
    """Tensors by name, as fp32.

    A model is stored with its head or without: `base` is what the names then begin with or not,
    such as "model.", and is left out here.
    """

    def __init__(self, checkpoint: Path, base: str = "") -> None:
        import ml_dtypes  # noqa: F401 - numpy knows bf16 from then on
        from safetensors import safe_open

        self._files: dict[str, Any] = {}  # of each tensor, under the name without `base`
        self._stored: dict[str, str] = {}  # the name that it has there
        for path in _files(checkpoint):
            file: Any = safe_open(path, framework="numpy")
            for stored in file.keys():  # noqa: SIM118 - no mapping
                name = stored.removeprefix(base)
                self._files[name], self._stored[name] = file, stored

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises UnsupportedModel where there is no such tensor."""
        return tuple(self._file(name).get_slice(self._stored[name]).get_shape())

    def read(self, name: str) -> FloatArray:
        """A copy of the tensor. Raises UnsupportedModel where there is none."""
        tensor: NDArray[np.generic] = self._file(name).get_tensor(self._stored[name])
        return tensor.astype(np.float32, copy=False)

    def first(self, names: Sequence[str]) -> str:
        """The first of `names` that is stored: tensors that are shared have several."""
        return next((name for name in names if name in self), names[0])

    def _file(self, name: str) -> Any:
        if name not in self._files:
            raise UnsupportedModel(
                f"the checkpoint has no tensor `{name}`",
                hint="download it again; or it is of another architecture than config.json says",
            )
        return self._files[name]


def embedding_names(side: Side) -> list[str]:
    """Under which the words of a side are stored: by itself, or shared by both."""
    return [f"{side}.embed_tokens.weight", "shared.weight"]


def _files(checkpoint: Path) -> list[Path]:
    index = checkpoint / _INDEX
    if not index.is_file():
        return [checkpoint / _SINGLE]
    shards = json.loads(index.read_bytes())["weight_map"].values()
    return [checkpoint / shard for shard in sorted(set(shards))]
