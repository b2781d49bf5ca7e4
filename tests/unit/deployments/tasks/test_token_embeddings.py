from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest
from pydantic import TypeAdapter

from deployments.errors import EmptyInput, InvalidField, ServeError, UnknownParameter
from deployments.messages import Truncation
from deployments.tasks.base import DecodeContext
from deployments.tasks.token_embeddings import TokenEmbeddings
from tests.support.artifacts import WIDTH, tiny_manifest

MANIFEST = tiny_manifest()
PROMPTED = MANIFEST.model_copy(update={"prompts": {"query": "the query: "}})


def test_parse_reads_texts_and_prompt() -> None:
    single = TokenEmbeddings().parse("a", {"prompt_name": "query", "truncate": False}, PROMPTED)
    assert (single.texts, single.fields) == (("the query: a",), ("inputs",))
    assert single.truncation is Truncation.REFUSE
    several = TokenEmbeddings().parse(["a", "b"], {}, PROMPTED)
    assert (several.texts, several.fields) == (("a", "b"), ("inputs[0]", "inputs[1]"))
    assert several.truncation is Truncation.KEEP_START


@pytest.mark.parametrize(
    ("inputs", "parameters", "error", "field"),
    [
        ("", {}, EmptyInput, "inputs"),
        (["a", ""], {}, EmptyInput, "inputs[1]"),
        ({"text": "a"}, {}, InvalidField, "inputs"),
        ("a", {"prompt_name": "poem"}, InvalidField, "parameters.prompt_name"),
        ("a", {"normalize": True}, UnknownParameter, "parameters.normalize"),
        ("a", {"dimensions": 3}, UnknownParameter, "parameters.dimensions"),
    ],
)
def test_invalid_request_is_rejected_with_its_path(
    inputs: Any, parameters: dict[str, Any], error: type[ServeError], field: str
) -> None:
    with pytest.raises(error) as caught:
        TokenEmbeddings().parse(inputs, parameters, MANIFEST)
    assert caught.value.field == field


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
