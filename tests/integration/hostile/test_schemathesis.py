"""Responses to requests that schemathesis generates conform to the OpenAPI document."""

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
    """All operations of the OpenAPI document except DELETE, because the tests share the models."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    found = [result.ok() for result in schema.get_all_operations()]
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    # schemathesis leaves out the route of the OpenAPI document itself.
    assert len(found) == sum(len(item) for item in paths.values()) - 1
    return [operation for operation in found if operation.method != "delete"]


def build_strategy(operation: APIOperation, mode: GenerationMode) -> st.SearchStrategy[Any]:
    """Generate requests of the operation, two thirds of them for existing models."""
    anything = operation.as_strategy(mode)
    if "{id}" not in operation.path:
        return anything
    known = st.sampled_from(ALL_MODELS).flatmap(
        lambda model_id: operation.as_strategy(mode, path_parameters={"id": model_id})
    )
    return st.one_of(known, known, anything)


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_responses_conform_to_the_document(
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
        @given(case=build_strategy(operation, mode))
        def check_case(case: schemathesis.Case) -> None:
            nonlocal sent
            sent += 1
            response = case.call()
            # Status 504 is right for a request with a deadline, which may be a few microseconds.
            if response.status_code != 504 or not says_deadline(case):
                case.validate_response(response, checks=CHECKS)

        if mode is GenerationMode.NEGATIVE and not can_be_negated(operation):
            continue
        check_case()
    assert sent > EXAMPLES_PER_OPERATION * 10


def says_deadline(case: schemathesis.Case) -> bool:
    sent = f"{case.headers} {case.body!r}".lower()
    return "timeout" in sent or "deadline" in sent


def can_be_negated(operation: APIOperation) -> bool:
    """Return whether a request can be invalid. Only a body can, because any text is a valid id."""
    return bool(operation.body)
