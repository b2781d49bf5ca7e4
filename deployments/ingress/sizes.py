"""What an answer in the response cache occupies."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

from deployments.messages import Answer, BatchKey
from deployments.tasks import TaskInput

# What a string costs besides its characters: the object, and its place in a tuple.
STRING_BYTES = 60


def answer_bytes(key: tuple[BatchKey, TaskInput], answer: Answer) -> int:
    """What a cached answer occupies: its value, and the words by which it is found.

    The words of the options count too: labels to ignore, for example, may be many or long.
    """
    parsed = key[1]
    words = (parsed.texts, parsed.fields, parsed.options)
    return _value_bytes(answer.value) + _word_bytes(words)


def _word_bytes(words: Any) -> int:
    """Of a string, or of all in a tuple; a character takes 4 bytes at most."""
    if isinstance(words, str):
        return STRING_BYTES + 4 * len(words)
    return sum(map(_word_bytes, words)) if isinstance(words, tuple) else 0


def _value_bytes(value: Any) -> int:
    arrays = value if isinstance(value, list) else [value]
    if all(isinstance(array, np.ndarray) for array in arrays):
        return sum(array.nbytes for array in arrays)
    return 4 * len(orjson.dumps(value))
