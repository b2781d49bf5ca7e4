"""Lists of models in Anthropic's form. tests/unit/.../shared/test_model_list.py has OpenAI's."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from deployments.artifacts.manifest import MANIFEST_NAME
from deployments.config import IngressUserConfig
from deployments.keys.key import KeyLimits, Scope
from tests.support.artifacts import EMBEDDER, seal_tiny
from tests.support.in_process import InProcess
from tests.support.keys import add_key

ANTHROPIC = {"anthropic-version": "2023-06-01"}
IDS = [f"tiny/model-{number}" for number in range(5)]
LISTED = [IDS[3], *IDS[:3], IDS[4]]  # the model of the configuration is the first


@pytest.fixture(scope="module")
def five_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("five")
    for model_id in IDS:
        seal_tiny(store, model_id)
    return store


async def get(store: Path, path: str, models: tuple[str, ...] = (), **query: Any) -> Any:
    async with InProcess(store, models=models).client() as http:
        return (await http.get(path, params=query, headers=ANTHROPIC)).json()


async def test_model_has_the_form_of_anthropic(tiny_store: Path) -> None:
    model = await get(tiny_store, f"/v1/models/{EMBEDDER}", (EMBEDDER,))
    created_at = datetime.fromisoformat(model.pop("created_at"))
    assert created_at.tzinfo is not None
    assert created_at.year > 2000
    assert model == {
        "type": "model",
        "id": EMBEDDER,
        "display_name": EMBEDDER,
        "lifecycle": "active",
    }


async def test_list_below_a_model_has_only_this_model(tiny_store: Path) -> None:
    page = await get(tiny_store, f"/models/{EMBEDDER}/v1/models", (EMBEDDER,))
    assert [model["id"] for model in page["data"]] == [EMBEDDER]
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, EMBEDDER, EMBEDDER)


@pytest.mark.parametrize(
    ("query", "listed", "has_more"),
    [
        ({}, LISTED, False),
        ({"limit": 2}, LISTED[:2], True),
        ({"limit": 2, "after_id": LISTED[0]}, LISTED[1:3], True),
        ({"limit": 2, "after_id": LISTED[2]}, LISTED[3:], False),
        ({"limit": 2, "before_id": LISTED[4]}, LISTED[2:4], True),
        ({"limit": 2, "before_id": LISTED[2]}, LISTED[:2], False),
        ({"before_id": LISTED[0]}, [], False),
        ({"after_id": "tiny/model-3x"}, LISTED[4:], False),
        ({"before_id": "tiny/model-0x"}, LISTED[:2], False),
    ],
)
async def test_pages_go_forward_and_backward(
    query: dict[str, Any], listed: list[str], has_more: bool, five_models: Path
) -> None:
    page = await get(five_models, "/v1/models", (IDS[3],), **query)
    assert [model["id"] for model in page["data"]] == listed
    assert page["has_more"] == has_more
    ends = (listed[0], listed[-1]) if listed else (None, None)
    assert (page["first_id"], page["last_id"]) == ends


async def test_page_has_twenty_models_by_default(tmp_path: Path) -> None:
    original = seal_tiny(tmp_path, EMBEDDER).parent
    for number in range(20):
        (tmp_path / f"many--m{number:02d}").symlink_to(original)
    page = await get(tmp_path, "/v1/models", (EMBEDDER,))
    assert (len(page["data"]), page["has_more"]) == (20, True)


async def test_rejected_model_has_the_epoch_as_its_date(tmp_path: Path) -> None:
    (seal_tiny(tmp_path, EMBEDDER) / MANIFEST_NAME).write_bytes(b"damaged")
    (model,) = (await get(tmp_path, "/v1/models"))["data"]
    assert (model["id"], model["created_at"]) == (EMBEDDER, "1970-01-01T00:00:00+00:00")


@pytest.mark.parametrize(
    ("path", "error_type"),
    [
        ("/v1/models/no/such", "not_found_error"),
        ("/models/no/such/v1/models", "not_found_error"),
        ("/v1/models?limit=0", "invalid_request_error"),
    ],
)
async def test_errors_have_the_form_of_the_client(
    path: str, error_type: str, tiny_store: Path
) -> None:
    async with InProcess(tiny_store).client() as http:
        anthropic = (await http.get(path, headers=ANTHROPIC)).json()
        openai = (await http.get(path)).json()
    assert (anthropic["type"], anthropic["error"]["type"]) == ("error", error_type)
    assert "type" not in openai
    assert openai["error"]["message"] == anthropic["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/models", f"/v1/models/{EMBEDDER}"])
async def test_refusals_of_a_key_have_the_form_of_the_client(
    path: str, tiny_store: Path, tmp_path: Path
) -> None:
    key_file = tmp_path / "keys.json"
    keys = {
        401: "-",
        403: add_key(key_file, scopes=(Scope.GPU,)),
        429: add_key(key_file, "bob", limits=KeyLimits(requests_per_minute=1)),
    }
    in_process = InProcess(tiny_store, settings=IngressUserConfig(key_file=key_file))
    found = {}
    async with in_process.client() as http:
        for status, key in keys.items():
            for headers in ({}, ANTHROPIC):
                await http.get(path, headers={"x-api-key": keys[429]})
                response = await http.get(path, headers={"x-api-key": key, **headers})
                assert response.status_code == status
                error = response.json()["error"]
                assert ("type" in response.json()) == bool(headers)
            found[status] = error["type"]
    assert found == {
        401: "authentication_error",
        403: "permission_error",
        429: "rate_limit_error",
    }


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "/v1/models", 405), ("POST", "/v1/messages/batches", 404), ("GET", "/v1/files", 404)],
)
async def test_paths_that_are_missing_have_the_form_of_the_client(
    method: str, path: str, status: int, tiny_store: Path
) -> None:
    async with InProcess(tiny_store).client() as http:
        anthropic = await http.request(method, path, headers=ANTHROPIC)
        openai = await http.request(method, path)
    assert anthropic.status_code == openai.status_code == status
    assert anthropic.json()["type"] == "error"
    assert openai.json()["error"]["code"] == anthropic.json()["error"]["details"]["error_code"]


async def test_client_header_does_not_change_errors_of_other_apis(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        response = await http.post("/v1/embeddings", json={}, headers=ANTHROPIC)
    assert response.json()["error"]["code"] == "invalid_field"
