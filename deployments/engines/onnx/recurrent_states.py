"""Recurrent states of a decoder in host memory: what layers without attention keep of a text.

A state summarizes all tokens of a slot, so those before a token cannot be computed from it. Each
slot therefore has a second set of states: those at the start of its last prefill, from which
another prompt with the same prefix may continue.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from deployments.engines.decoder import PAST_STATES, PRESENT_STATES
from deployments.engines.onnx.kv_cache import bind_array
from deployments.errors import EngineFailed

_States = Mapping[str, NDArray[np.float32]]  # [slots, ...] each, by name


class RecurrentStates:
    """States of the slots in fp32. For a graph without states every method does nothing."""

    def __init__(self, session: ort.InferenceSession, slots: int) -> None:
        shapes = {
            state.name.removeprefix(PAST_STATES): (slots, *state.shape[1:])
            for state in session.get_inputs()
            if state.name.startswith(PAST_STATES)
        }
        self._current, self._resumable = _allocate(shapes), _allocate(shapes)
        # Number of tokens that both kinds of states include, [slots].
        self._tokens, self._resumable_tokens = np.zeros((2, slots), np.int64)

    def __bool__(self) -> bool:
        return bool(self._current)

    def bind(self, binding: ort.IOBinding, first: int, end: int) -> None:
        """Bind slots `first` to `end` - 1 as inputs and outputs of a call, in place."""
        for name, array in self._current.items():
            bind_array(binding, array[first:end], f"{PAST_STATES}{name}", f"{PRESENT_STATES}{name}")

    def start_prefill(self, slot: int, start: int, tokens: int) -> None:
        """Prepare a prefill of `tokens` tokens after `start` tokens of a slot.

        Raises EngineFailed if there are no states after `start` tokens.
        """
        if not self:
            return
        if start == 0:
            for array in self._current.values():
                array[slot] = 0
        elif start == self._resumable_tokens[slot]:
            _copy(self._resumable, self._current, slot)
        elif start == self._tokens[slot]:
            _copy(self._current, self._resumable, slot)
        else:
            raise EngineFailed(
                f"slot {slot} has states after {self._tokens[slot]} and "
                f"{self._resumable_tokens[slot]} tokens, not after {start}"
            )
        self._resumable_tokens[slot] = start
        self._tokens[slot] = start + tokens

    def start_decode(self, lengths: NDArray[np.int64]) -> None:
        """Prepare a decode step of the first slots, which have `lengths` tokens."""
        if not self:
            return
        for array in self._current.values():
            array[: len(lengths)][lengths == 0] = 0
        self._tokens[: len(lengths)] = lengths + 1

    def copy(self, source: int, target: int) -> None:
        for array in self._slot_arrays():
            array[target] = array[source]

    def swap(self, first: int, second: int) -> None:
        for array in self._slot_arrays():
            array[[first, second]] = array[[second, first]]

    def _slot_arrays(self) -> list[NDArray[np.generic]]:
        counts = (self._tokens, self._resumable_tokens)
        return [*self._current.values(), *self._resumable.values(), *counts]


def _allocate(shapes: Mapping[str, tuple[int, ...]]) -> _States:
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


def _copy(source: _States, target: _States, slot: int) -> None:
    for name, array in source.items():
        target[name][slot] = array[slot]
