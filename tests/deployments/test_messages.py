from __future__ import annotations

import pickle

import numpy as np

from deployments.errors import InputTooLong
from deployments.manifest import Device, TaskName
from deployments.messages import BatchKey, EncodedBatch, EncodedCall, ModelRef

KEY = BatchKey(
    ModelRef("tiny/model", "0123456789ab"), TaskName.FEATURE_EXTRACTION, Device.CPU, long=False
)


def encoded(*items: list[int]) -> bytes:
    return np.array([i for ids in items for i in ids], dtype="<i4").tobytes()


def test_ragged_items_come_back_in_order_with_their_own_lengths() -> None:
    calls = (EncodedCall((2, 1), 0, None, 0.0), EncodedCall((3,), 0, None, 0.0))
    batch = EncodedBatch(KEY, encoded([1, 2], [3], [4, 5, 6]), calls, 0.0)
    assert [ids.tolist() for ids in batch.items()] == [[1, 2], [3], [4, 5, 6]]


def test_a_call_that_could_not_be_encoded_has_no_items() -> None:
    calls = (InputTooLong("too long", field="inputs"), EncodedCall((2,), 0, None, 0.0))
    assert [ids.tolist() for ids in EncodedBatch(KEY, encoded([7, 8]), calls, 0.0).items()] == [
        [7, 8]
    ]
    assert EncodedBatch(KEY, b"", calls[:1], 0.0).items() == []


def test_a_list_crosses_processes_with_its_errors() -> None:
    calls = (InputTooLong("too long", field="inputs"), EncodedCall((1,), 0, None, 2.0))
    sent = EncodedBatch(KEY, encoded([9]), calls, 0.5)
    received = pickle.loads(pickle.dumps(sent))
    assert received.key == KEY
    assert received.calls[0].field == "inputs"
    assert received.calls[1] == calls[1]
    assert received.items()[0].tolist() == [9]
