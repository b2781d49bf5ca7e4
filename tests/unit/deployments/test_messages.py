from __future__ import annotations

import pickle
import pkgutil
from importlib import import_module

import numpy as np

from deployments import messages
from deployments.artifacts.types import Device, TaskName
from deployments.errors import InputTooLong
from deployments.messages import (
    BatchKey,
    Chat,
    GenerationTimings,
    ModelRef,
    TokenizedBatch,
    TokenizedCall,
    count_characters,
    count_prompt,
    merge_timings,
)

KEY = BatchKey(
    ModelRef("tiny/model", "0123456789ab"), TaskName.FEATURE_EXTRACTION, Device.CPU, long=False
)


def encode(*items: list[int]) -> bytes:
    return np.array([i for ids in items for i in ids], dtype="<i4").tobytes()


def test_items_returns_ragged_items_in_order() -> None:
    calls = (TokenizedCall((2, 1), 0, None, 0.0), TokenizedCall((3,), 0, None, 0.0))
    batch = TokenizedBatch(KEY, encode([1, 2], [3], [4, 5, 6]), calls, 0.0)
    assert [item.ids.tolist() for item in batch.items()] == [[1, 2], [3], [4, 5, 6]]


def test_items_skips_failed_calls() -> None:
    calls = (InputTooLong("too long", field="inputs"), TokenizedCall((2,), 0, None, 0.0))
    assert [
        item.ids.tolist() for item in TokenizedBatch(KEY, encode([7, 8]), calls, 0.0).items()
    ] == [[7, 8]]
    assert TokenizedBatch(KEY, b"", calls[:1], 0.0).items() == []


def test_batch_with_errors_survives_pickling() -> None:
    calls = (InputTooLong("too long", field="inputs"), TokenizedCall((1,), 0, None, 2.0))
    sent = TokenizedBatch(KEY, encode([9]), calls, 0.5)
    received = pickle.loads(pickle.dumps(sent))
    assert received.key == KEY
    assert received.calls[0].field == "inputs"
    assert received.calls[1] == calls[1]
    assert received.items()[0].ids.tolist() == [9]


def test_items_default_to_no_second_segment() -> None:
    calls = (TokenizedCall((2, 3), 0, None, 0.0), TokenizedCall((3, 1), 0, None, 0.0, (2, 1)))
    batch = TokenizedBatch(KEY, encode([1, 2], [3, 4, 5], [6, 7, 8], [9]), calls, 0.0)
    received = pickle.loads(pickle.dumps(batch))
    assert [item.second_segment_start for item in received.items()] == [2, 3, 2, 1]
    assert [item.ids.tolist() for item in received.items()][2:] == [[6, 7, 8], [9]]


def test_count_characters_of_a_pair_adds_both_segments() -> None:
    assert [count_characters(text) for text in ("abc", ("ab", "cdef"), ("", ""))] == [3, 6, 0]


def test_prompts_are_counted_with_their_tools() -> None:
    assert count_prompt("four") == count_prompt((1, 2, 3, 4)) == 4
    plain = Chat(({"role": "user", "content": "four"},) * 2)
    assert count_prompt(plain) == 8
    long = ({"name": "x" * 100},)
    assert count_prompt(plain._replace(tools=long)) > 108
    called = Chat(({"role": "assistant", "content": "", "tool_calls": long},))
    assert count_prompt(called) > 100


def test_merged_timings_have_the_longest_time_of_each_phase() -> None:
    timings = [GenerationTimings(1, 2, 3, 4), GenerationTimings(4, 3, 2, 1)]
    assert merge_timings(timings) == GenerationTimings(4, 3, 3, 4)
    assert merge_timings([]) == GenerationTimings()


def test_the_package_exports_every_message() -> None:
    names = set()
    for module in pkgutil.iter_modules(messages.__path__, "deployments.messages."):
        contents = vars(import_module(module.name)).items()
        names |= {name for name, it in contents if getattr(it, "__module__", "") == module.name}
    assert "LoadedModel" in names
    assert names <= set(messages.__all__)
