"""Memory that torch holds."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def count_tensor_bytes() -> int:
    """Return the bytes of all tensors of this process that something refers to.

    Tensors without memory, which stand for those of a traced program, have other types.
    """
    types = (torch.Tensor, torch.nn.Parameter)
    tensors = (each for each in gc.get_objects() if type(each) in types)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@contextmanager
def without_collections() -> Iterator[None]:
    """Let no garbage collection start by itself in the block, as in an idle replica."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
