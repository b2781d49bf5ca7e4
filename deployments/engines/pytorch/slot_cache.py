"""The cache of transformers models over the arrays of KV slots.

Models call these methods of their cache, and do not check that it is of transformers' class
`Cache`. Deriving from that class would load transformers with this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from deployments.engines.pytorch.slot_arrays import SlotLayout

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache

    # Takes a cache array, new keys or values, and their positions. Returns the whole array.
    WriteKv = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class SlotCache:
    """Writes keys, values and states of new tokens to the arrays of a call, in place."""

    def __init__(
        self,
        kv_layers: Sequence[int],
        arrays: Sequence[torch.Tensor],
        states: Mapping[str, torch.Tensor],
        positions: torch.Tensor,
        write_kv: WriteKv,
    ) -> None:
        """Take two arrays for each of `kv_layers`, and the positions [B, T] of the new tokens."""
        self._kv_layers, self._arrays, self._states = kv_layers, arrays, states
        self._positions, self._write_kv = positions, write_kv

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        place = 2 * self._kv_layers.index(layer)
        cached_keys, cached_values = self._arrays[place : place + 2]
        return (
            self._write_kv(cached_keys, keys, self._positions),
            self._write_kv(cached_values, values, self._positions),
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # no common length: the mask and position_ids state the length per slot

    # Layers name the parameters of the following methods. Their step of a single token updates the
    # tensors that the getters return.

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        return self._states[_name_state(layer_idx, "conv", state_idx)]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._states.get(_name_state(layer_idx, "recurrent", state_idx))

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> torch.Tensor:
        """Return the inputs of the convolution: the last ones of earlier tokens, then the new."""
        import torch

        state = self.get_conv_state(layer_idx, state_idx)
        inputs = torch.cat([state, conv_states], dim=-1)
        state.copy_(inputs[..., -state.shape[-1] :])
        return inputs

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> torch.Tensor:
        state = self._states[_name_state(layer_idx, "recurrent", state_idx)]
        return state.copy_(recurrent_states)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


def read_layout(cache: DynamicCache) -> tuple[list[int], SlotLayout]:
    """Return the layers with a KV cache, and what `cache` has stored for a token of one text.

    Layers that read the keys and values of other layers store nothing.
    """
    layers = list(enumerate(cache.layers))
    kv_layers = [number for number, layer in layers if getattr(layer, "keys", None) is not None]
    arrays = [
        array
        for number in kv_layers
        for array in (cache.layers[number].keys, cache.layers[number].values)
    ]
    states = dict(pair for number, layer in layers for pair in _list_states(number, layer))
    return kv_layers, SlotLayout([(array.shape[1], array.shape[3]) for array in arrays], states)


def _list_states(number: int, layer: object) -> Iterator[tuple[str, torch.Tensor]]:
    for kind in ("conv", "recurrent"):
        for index, state in getattr(layer, f"{kind}_states", {}).items():
            if state is not None:
                yield _name_state(number, kind, index), state


def _name_state(layer: int, kind: str, index: int) -> str:
    return f"{layer}.{kind}.{index}"
