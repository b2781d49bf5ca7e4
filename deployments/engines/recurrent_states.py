"""Recurrent states of a decoder: what convolutions and linear attention keep of a text.

A state summarizes all tokens of a slot, so those before a token cannot be computed from it. Each
slot therefore has a second set of states: those at the start of its last prefill, from which
another prompt with the same prefix may continue.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deployments.errors import EngineFailed

# Arrays of numpy or tensors of torch, [slots, ...] each, by name.
_States = Mapping[str, Any]


class RecurrentStates:
    """States of the slots. For a decoder without states every method does nothing."""

    def __init__(self, current: _States, resumable: _States, slots: int) -> None:
        """Take the arrays of both sets. Calls of the engine read and update those of `current`."""
        self._current, self._resumable = current, resumable
        # Number of tokens that both kinds of states include, [slots].
        self._tokens, self._resumable_tokens = np.zeros((2, slots), np.int64)

    def __bool__(self) -> bool:
        return bool(self._current)

    def views(self, first: int, end: int) -> dict[str, Any]:
        """Return the current states of slots `first` to `end` - 1, which a call updates."""
        return {name: array[first:end] for name, array in self._current.items()}

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
        for slot in np.flatnonzero(lengths == 0):
            for array in self._current.values():
                array[slot] = 0
        self._tokens[: len(lengths)] = lengths + 1

    def copy(self, source: int, target: int) -> None:
        for array in self._slot_arrays():
            array[target] = array[source]

    def swap(self, first: int, second: int) -> None:
        for array in self._slot_arrays():
            array[[first, second]] = array[[second, first]]

    def _slot_arrays(self) -> list[Any]:
        counts = (self._tokens, self._resumable_tokens)
        return [*self._current.values(), *self._resumable.values(), *counts]


def _copy(source: _States, target: _States, slot: int) -> None:
    for name, array in source.items():
        target[name][slot] = array[slot]
