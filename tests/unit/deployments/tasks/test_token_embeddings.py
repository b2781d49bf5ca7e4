from __future__ import annotations

import numpy as np
import orjson
from pydantic import TypeAdapter

from deployments.tasks.base import DecodeContext
from deployments.tasks.token_embeddings import TokenEmbeddings
from tests.support.artifacts import WIDTH, tiny_manifest

MANIFEST = tiny_manifest()


def test_task_matches_no_body() -> None:
    assert not TokenEmbeddings().matches("a", {"prompt_name": "query"})


def test_response_has_unchanged_rows_that_do_not_share_the_batch() -> None:
    batch = np.arange(2 * 3 * WIDTH, dtype=np.float32).reshape(2, 3, WIDTH)
    computed = DecodeContext(
        rows=[batch[0], batch[1, :2]], items=(), token_offsets=(), manifest=MANIFEST
    )
    value = TokenEmbeddings().decode(computed, None)
    assert [rows.shape for rows in value] == [(3, WIDTH), (2, WIDTH)]
    np.testing.assert_array_equal(value[1], batch[1, :2])
    assert not any(np.shares_memory(rows, batch) for rows in value)
    response = orjson.loads(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY))
    assert TypeAdapter(TokenEmbeddings.response_type).validate_python(response) == response
