"""Safetensors files, written without a whole tensor in memory.

The format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

# Bytes of a value by type, for the types of tensors that are not quantized.
VALUE_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("F64", "I64"), 8),
    **dict.fromkeys(("F32", "I32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16"), 2),
    "BOOL": 1,
}


class PlannedTensor(NamedTuple):
    """A tensor of a file that will be written. `dtype` is a key of VALUE_BYTES.

    `read` yields the values of its type, in order and in parts of any shape.
    """

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Iterator[Tensor]]

    @property
    def nbytes(self) -> int:
        return VALUE_BYTES[self.dtype] * math.prod(self.shape)


def write_shard(path: Path, tensors: Mapping[str, PlannedTensor]) -> None:
    """Write the tensors, by name, to a new file."""
    import torch

    # Larger types first: each tensor then starts at a multiple of the bytes of its values.
    ordered = sorted(tensors.items(), key=lambda item: -VALUE_BYTES[item[1].dtype])
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little"))
        file.write(head)
        for name, tensor in ordered:
            start = file.tell()
            for part in tensor.read():
                file.write(part.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            assert file.tell() - start == tensor.nbytes, f"bug: wrong size of `{name}`"
