"""What schemathesis makes of our own document, right and wrong, is answered as it says."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.all_models import ALL_MODELS
from tests.support.http_server import HttpServer

EXAMPLES_PER_OPERATION = 12
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def operations(server: HttpServer) -> list[APIOperation]:
    """Every operation of the document that the server itself gives."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    found = [result.ok() for result in schema.get_all_operations()]
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    # It leaves out the document itself.
    assert len(found) == sum(len(item) for item in paths.values()) - 1
    return found


def cases_of(operation: APIOperation, mode: GenerationMode) -> st.SearchStrategy[Any]:
    """Requests of the operation, mostly to models that exist: other ids end with a 404."""
    anything = operation.as_strategy(mode)
    if "{id}" not in operation.path:
        return anything
    known = st.sampled_from(ALL_MODELS).flatmap(
        lambda model_id: operation.as_strategy(mode, path_parameters={"id": model_id})
    )
    return st.one_of(known, known, anything)


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_every_operation_does_what_its_document_says(
    mode: GenerationMode, operations: list[APIOperation]
) -> None:
    sent = 0
    for operation in operations:

        @settings(
            max_examples=EXAMPLES_PER_OPERATION,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )
        @given(case=cases_of(operation, mode))
        def conforms(case: schemathesis.Case) -> None:
            nonlocal sent
            sent += 1
            case.call_and_validate(checks=CHECKS)

        if mode is GenerationMode.NEGATIVE and not can_be_negated(operation):
            continue
        conforms()
    assert sent > EXAMPLES_PER_OPERATION * 10


def can_be_negated(operation: APIOperation) -> bool:
    """Whether a request can be wrong at all: any text is an id, so only a body can."""
    return bool(operation.body)
