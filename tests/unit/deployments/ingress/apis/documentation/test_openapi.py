"""Tests of the OpenAPI document against the standard, the Pydantic models and real responses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import orjson
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from deployments.artifacts.types import TaskName
from deployments.grpc_status import GRPC_PATHS
from deployments.ingress.apis.documentation.components import Components, infer_schema
from deployments.ingress.apis.openai_responses.routes import STORED
from deployments.ingress.apis.playground.routes import ASSETS
from deployments.ingress.apis.shared.response_headers import INFERENCE_HEADERS
from deployments.ingress.apis.text2text.routes import text2text_body_schemas
from deployments.ingress.apis.text2text.schemas import NESTED_KEYS, TextToTextParameters
from deployments.ingress.http.api import build_schema
from deployments.request_headers import OPTION_HEADERS
from tests.support.all_models import ALL_MODELS, ENCODER_MODELS, seal_all_models
from tests.support.artifacts import EMBEDDER, tiny_manifest
from tests.support.decoder_artifacts import DECODER
from tests.support.generators import ScriptedGeneratorClient
from tests.support.in_process import InProcess

JSON = "application/json"


@pytest.fixture(scope="module")
def all_models_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seal_all_models(tmp_path_factory.mktemp("zoo"))


def all_models_server(store: Path) -> InProcess:
    """Return a server with a model for every task, including text generation."""
    return InProcess(store, models=ALL_MODELS, generator=ScriptedGeneratorClient())


async def document_of(http: httpx.AsyncClient) -> dict[str, Any]:
    response = await http.get("/openapi.json")
    assert response.headers["content-type"] == JSON
    document: dict[str, Any] = response.json()
    return document


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in document["paths"].items():
        for method, operation in item.items():
            yield method, path, operation


def is_valid(value: Any, schema: dict[str, Any], document: dict[str, Any]) -> None:
    full = {**schema, "components": document["components"]}
    jsonschema.Draft202012Validator(full).validate(value)


async def test_document_is_valid_openapi(all_models_store: Path) -> None:
    async with all_models_server(all_models_store).client() as http:
        document = await document_of(http)
    assert document["openapi"] == "3.1.0"
    assert list(OpenAPIV31SpecValidator(document).iter_errors()) == []
    assert "$defs" not in str(document)
    ids = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(set(ids)) == len(ids)


async def test_all_routes_with_answers_except_page_files_and_grpc_are_documented(
    all_models_store: Path,
) -> None:
    async with all_models_server(all_models_store).application() as app:
        served = {
            (re.sub(r"\{(\w+):path\}", r"{\1}", route.path), method.lower())
            for route in app.table.routes
            for method in route.methods - {"HEAD"}
        }
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            document = await document_of(http)
    documented = {(path, method) for method, path, _ in operations(document)}
    hidden = {
        path for path, _ in served - documented if path not in GRPC_PATHS and STORED not in path
    }
    assert hidden == {
        "/docs/swagger-ui.css",
        "/docs/swagger-ui-bundle.js",
        "/docs/start.js",
        *(f"/page/{name}" for name in ASSETS),
    }
    assert documented <= served


async def test_examples_fit_their_schemas_and_responses(
    all_models_store: Path,
) -> None:
    tried = 0
    async with all_models_server(all_models_store).client() as http:
        document = await document_of(http)
        for method, path, operation in operations(document):
            media = operation.get("requestBody", {}).get("content", {}).get(JSON, {})
            for example in media.get("examples", {}).values():
                is_valid(example["value"], media["schema"], document)
                responses = [
                    await http.request(method, filled, json=example["value"])
                    for filled in filled_in(path, operation)
                ]
                # Some examples contain token ids that the small test vocabulary does not have.
                if any("unknown_token" in response.text for response in responses):
                    continue
                good = [response for response in responses if response.status_code == 200]
                assert good, (path, example, [response.text for response in responses][:3])
                content = operation["responses"]["200"]["content"]
                for response in good:
                    kind = response.headers["content-type"].partition(";")[0]
                    for value in told_in(response):
                        is_valid(value, response_schema(content, kind), document)
                tried += 1
    assert tried > 10


def response_schema(content: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the schema of a response body, or of the event data of a stream."""
    schema: dict[str, Any] = content[kind]["schema"]
    return schema if kind == JSON else schema["properties"]["data"]["contentSchema"]


def told_in(response: httpx.Response) -> list[Any]:
    """Return the JSON body of a response in a list, or the JSON data of each stream event."""
    if response.headers["content-type"] == JSON:
        return [response.json()]
    data = re.findall("^data:(.*)$", response.text, re.MULTILINE)
    return [orjson.loads(event) for event in data if event.strip() != "[DONE]"]


def filled_in(path: str, operation: dict[str, Any]) -> list[str]:
    """Return the URLs of `path` for every documented combination of model and task."""
    paths = [path]
    for parameter in operation["parameters"]:
        if parameter["in"] == "path":
            values = parameter["schema"].get("enum") or list(parameter.get("examples", ()))
            if parameter["name"] == "version":
                continue
            paths = [one.replace(f"{{{parameter['name']}}}", v) for one in paths for v in values]
    return [path.replace("{version}", version_in(path)) for path in paths]


def version_in(path: str) -> str:
    """Return the version of the encoder model that `path` names, else an empty string."""
    found = [model_id for model_id in ENCODER_MODELS if model_id in path]
    return tiny_manifest(found[0]).version if found else ""


async def test_examples_name_all_configured_models_even_before_they_are_built(
    tmp_path: Path,
) -> None:
    async with InProcess(tmp_path, models=(EMBEDDER, DECODER)).client() as http:
        document = await document_of(http)
    (parameter,) = document["paths"]["/models/{id}"]["get"]["parameters"]
    assert list(parameter["examples"]) == [EMBEDDER, DECODER]


async def test_errors_fit_their_schemas(all_models_store: Path) -> None:
    async with all_models_server(all_models_store).client() as http:
        document = await document_of(http)
    statuses: set[int] = set()
    for _, _, operation in operations(document):
        for status, content in operation["responses"].items():
            for media in content["content"].values():
                for example in media.get("examples", {}).values():
                    is_valid(example["value"], media["schema"], document)
                    statuses.add(int(status))
    assert {400, 404, 408, 413, 415, 422, 429, 500, 503, 504} <= statuses


async def test_documented_errors_have_the_format_of_the_path(all_models_store: Path) -> None:
    async with all_models_server(all_models_store).client() as http:
        document = await document_of(http)
    content = {
        path: document["paths"][path]["post"]["responses"]["404"]["content"][JSON]
        for path in ("/models/{id}", "/v1/embeddings")
    }
    names = [
        schema["$ref"].rpartition("/")[2] for schema in content["/models/{id}"]["schema"]["anyOf"]
    ]
    assert names == ["HuggingFaceError", "TextGenerationInferenceError"]
    value = content["/v1/embeddings"]["examples"]["model_not_found"]["value"]
    assert value["error"]["type"] == "invalid_request_error"


CONDITIONAL = {"x-compute-fallback", "x-hf-warning"}


async def test_response_headers_are_documented(all_models_store: Path) -> None:
    async with all_models_server(all_models_store).client() as http:
        document = await document_of(http)
        response = await http.post(f"/models/{EMBEDDER}", json={"inputs": "a"})
        embedded = await http.post("/v1/embeddings", json={"input": "a", "model": EMBEDDER})
    for name in ("x-request-id", "x-ratelimit-remaining-requests"):
        assert name in document["info"]["description"]
    own = {"content-type", "content-length"}
    assert (
        set(INFERENCE_HEADERS) - CONDITIONAL
        == set(response.headers) - own
        == set(embedded.headers) - own
    )
    assert headers_told(document, "/v1/embeddings") == set(INFERENCE_HEADERS)
    assert headers_told(document, "/models/{id}") > set(INFERENCE_HEADERS)
    assert headers_told(document, "/similarity") == set(INFERENCE_HEADERS)
    assert not headers_told(document, "/tokenize") | headers_told(document, "/decode")
    for path in ("/models/{id}", "/v2/models/{id}/infer"):
        parameters = {p["name"] for p in document["paths"][path]["post"]["parameters"]}
        assert parameters == {"id", *OPTION_HEADERS}


def headers_told(document: dict[str, Any], path: str) -> set[str]:
    """Return the documented response headers of `path`."""
    return set(document["paths"][path]["post"]["responses"]["200"].get("headers", {}))


GENERATING = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5},
    "/v1/completions": {"prompt": "a"},
    "/generate": {"inputs": "a"},
    "/generate_stream": {"inputs": "a"},
    "/models/{id}": {"inputs": "a"},
}


@pytest.mark.parametrize("path", GENERATING)
async def test_generation_responses_and_streams_fit_their_schemas(
    path: str, all_models_store: Path
) -> None:
    own = {"content-type", "content-length", "cache-control", "x-accel-buffering"}
    kinds: set[str] = set()
    async with all_models_server(all_models_store).client() as http:
        document = await document_of(http)
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        for stream in (False, True):
            body = {**GENERATING[path], "model": DECODER, "stream": stream}
            response = await http.post(path.replace("{id}", DECODER), json=body)
            assert response.status_code == 200, response.text
            kind = response.headers["content-type"].partition(";")[0]
            kinds.add(kind)
            values = told_in(response)
            assert values
            for value in values:
                is_valid(value, response_schema(content, kind), document)
            sent = set(response.headers) - own
            assert sent <= headers_told(document, path)
            if kind == JSON and path != "/models/{id}":
                assert sent == headers_told(document, path) - CONDITIONAL
    assert kinds == set(content)


async def test_task_parameter_has_all_tasks(all_models_store: Path) -> None:
    async with all_models_server(all_models_store).client() as http:
        document = await document_of(http)
    (_, task, *_) = document["paths"]["/models/{id}/pipeline/{task}"]["post"]["parameters"]
    assert sorted(task["schema"]["enum"]) == sorted(TaskName)


def test_body_schemas_of_text2text_do_not_change_the_shared_schema() -> None:
    nested = set(NESTED_KEYS)
    for schema in text2text_body_schemas():
        assert nested <= schema["properties"]["parameters"]["properties"].keys()
    assert nested.isdisjoint(build_schema(TextToTextParameters)["properties"])


def test_only_equal_definitions_share_a_name() -> None:
    components = Components()

    def with_part(kind: str) -> dict[str, Any]:
        return {
            "$defs": {"Part": {"type": kind}, "Whole": {"items": {"$ref": "#/$defs/Part"}}},
            "$ref": "#/$defs/Whole",
        }

    texts = components.add_schema("A", with_part("string"))
    assert components.add_schema("Other", with_part("string")) == texts
    numbers = components.add_schema("A", with_part("number"))
    refs = {name: schema.get("$ref") for name, schema in components.schemas.items()}
    prefix = "#/components/schemas/"
    assert (texts["$ref"], numbers["$ref"]) == (f"{prefix}A", f"{prefix}A2")
    assert (refs["A"], refs["A2"]) == (f"{prefix}Whole", f"{prefix}Whole2")
    assert components.schemas["Whole2"] == {"items": {"$ref": f"{prefix}Part2"}}
    assert components.schemas["Part2"] == {"type": "number"}


def test_definitions_may_be_recursive() -> None:
    components = Components()
    tree = {"$defs": {"Tree": {"items": {"$ref": "#/$defs/Tree"}}}, "$ref": "#/$defs/Tree"}
    components.add_schema("Forest", tree)
    assert components.schemas["Tree"] == {"items": {"$ref": "#/components/schemas/Tree"}}


def test_inferred_schema_fits_all_values() -> None:
    values = [{"error": "a", "n": 1}, {"error": ["b"], "n": None}, {"error": "c"}]
    schema = infer_schema(values)
    assert schema["required"] == ["error"]
    for value in values:
        jsonschema.Draft202012Validator(schema).validate(value)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema).validate({"error": 7})
