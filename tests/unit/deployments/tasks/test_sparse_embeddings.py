from __future__ import annotations

import numpy as np
import orjson
import pytest
from pydantic import TypeAdapter

from deployments.artifacts.types import TaskName
from deployments.errors import InputTooLong
from deployments.tasks import sparse_embeddings
from deployments.tasks.base import DecodeContext
from deployments.tasks.sparse_embeddings import SparseEmbeddings
from tests.support.artifacts import tiny_manifest, with_tasks

MANIFEST = with_tasks(tiny_manifest(), TaskName.SPARSE_EMBEDDINGS)


def computed(*rows: list[float]) -> DecodeContext:
    return DecodeContext(
        rows=np.array(rows, dtype=np.float32), items=(), token_offsets=(), manifest=MANIFEST
    )


def test_response_has_the_nonzero_weights_in_the_order_of_their_tokens() -> None:
    value = SparseEmbeddings().decode(computed([0, 0.5, 0, 1.25], [0, 0, 0, 0]), None)
    response = orjson.loads(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY))
    assert response == [
        {"indices": [1, 3], "values": [0.5, 1.25]},
        {"indices": [], "values": []},
    ]
    assert TypeAdapter(SparseEmbeddings.response_type).validate_python(response) == response


def test_response_does_not_share_the_memory_of_the_batch() -> None:
    context = computed([1, 0, 2])
    (vector,) = SparseEmbeddings().decode(context, None)
    assert not np.shares_memory(vector["values"], context.rows[0])


def test_response_with_too_many_weights_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_embeddings, "MAX_WEIGHTS", 3)
    assert SparseEmbeddings().decode(computed([1, 0, 2], [0, 3, 0]), None)
    with pytest.raises(InputTooLong, match="4 weights; the maximum is 3") as caught:
        SparseEmbeddings().decode(computed([1, 0, 2], [0, 3, 4]), None)
    assert caught.value.field == "inputs"
