"""Arrays of the KV slots of a torch decoder, at fixed addresses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, NamedTuple

from deployments.engines.recurrent_states import RecurrentStates

if TYPE_CHECKING:
    import torch


class SlotLayout(NamedTuple):
    """What a module stores for each slot."""

    # Heads and channels of the inputs `memory_{0, 1, ...}`. Layers may differ, and layers with
    # latent attention have latent vectors of one head instead of keys and values.
    kv_shapes: Sequence[tuple[int, int]]
    # Recurrent states by their names in `SlotCache`, as tensors of a single slot, [1, ...].
    states: Mapping[str, torch.Tensor]


class KvArrays:
    """Keys and values of the slots. Arrays of one shape are a tensor, so a copy is one kernel."""

    def __init__(
        self,
        layout: SlotLayout,
        *,
        slots: int,
        tokens: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        import torch

        self.slots = slots
        self._shapes = tuple(layout.kv_shapes)
        # [arrays, slots, heads, tokens, channels] each
        self._tensors = {
            (heads, channels): torch.zeros(
                (arrays, slots, heads, tokens, channels), dtype=dtype, device=device
            )
            for (heads, channels), arrays in Counter(self._shapes).items()
        }

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def views(self, first: int, end: int, kv_length: int) -> Sequence[torch.Tensor]:
        """Return the first `kv_length` tokens of slots `first` to `end` - 1.

        The views are in the order of the inputs `memory_{0, 1, ...}`.
        """
        views = {
            shape: iter(tensor[:, first:end, :, :kv_length].unbind())
            for shape, tensor in self._tensors.items()
        }
        return [next(views[shape]) for shape in self._shapes]

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Copy tokens `start` to `end` - 1 of a slot to another slot."""
        for tensor in self._tensors.values():
            tensor[:, target, :, start:end] = tensor[:, source, :, start:end]

    def swap(self, first: int, second: int, tokens: int) -> None:
        for tensor in self._tensors.values():
            saved = tensor[:, first, :, :tokens].clone()
            tensor[:, first, :, :tokens] = tensor[:, second, :, :tokens]
            tensor[:, second, :, :tokens] = saved


def create_states(layout: SlotLayout, slots: int) -> RecurrentStates:
    """Allocate recurrent states on the device of the module."""
    current, resumable = (
        {name: state.new_zeros((slots, *state.shape[1:])) for name, state in layout.states.items()}
        for _ in range(2)
    )
    return RecurrentStates(current, resumable, slots)


@contextmanager
def restored(
    states: RecurrentStates, slots: int, running: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Undo what calls in the block do to the states of the first `slots` slots.

    The copies run within `running()`.
    """
    views = states.views(0, slots)
    if not views:
        yield
        return
    with running():
        saved = {name: view.clone() for name, view in views.items()}
    try:
        yield
    finally:
        with running():
            for name, view in views.items():
                view.copy_(saved[name])
