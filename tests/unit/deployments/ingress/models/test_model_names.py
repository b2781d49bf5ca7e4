"""Names of the configuration in place of model ids, in requests and in lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from deployments.config import IngressUserConfig
from tests.support.artifacts import CLASSIFIER, EMBEDDER
from tests.support.in_process import InProcess
from tests.support.keys import add_key, bearer

NAMES = {"text-embedding-3-small": EMBEDDER, "judge": f"{CLASSIFIER}@latest", "lost": "no/such"}


def settings(**options: Any) -> IngressUserConfig:
    return IngressUserConfig(model_names=NAMES, **options)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/models/text-embedding-3-small/v1/embeddings"])
async def test_name_stands_for_a_model(path: str, tiny_store: Path) -> None:
    body = {"input": "good film", "model": "text-embedding-3-small"}
    async with InProcess(tiny_store, settings=settings()).client() as http:
        named = await http.post(path, json=body)
        plain = await http.post("/v1/embeddings", json=body | {"model": EMBEDDER})
        judged = await http.post("/predict", json={"inputs": "good film", "model": "judge"})
    assert named.status_code == plain.status_code == judged.status_code == 200
    assert named.json()["data"] == plain.json()["data"]


async def test_name_without_a_model_is_unknown(tiny_store: Path) -> None:
    async with InProcess(tiny_store, settings=settings()).client() as http:
        response = await http.post("/v1/embeddings", json={"input": "a", "model": "lost"})
    assert response.status_code == 404
    assert "no/such" in response.json()["error"]["message"]


async def test_lists_have_the_names_that_the_key_permits(tiny_store: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    key = add_key(file, models=(EMBEDDER,))
    async with InProcess(tiny_store, settings=settings(key_file=file)).client() as http:
        models = (await http.get("/v1/models", headers=bearer(key))).json()["data"]
        body = {"inputs": "good film", "model": "judge"}
        refused = await http.post("/predict", json=body, headers=bearer(key))
    assert [(model["id"], model.get("root")) for model in models] == [
        (EMBEDDER, None),
        ("text-embedding-3-small", EMBEDDER),
    ]
    assert refused.status_code == 403


async def test_names_change_live(tiny_store: Path) -> None:
    in_process = InProcess(tiny_store)
    async with in_process.client() as http:
        body = {"input": "a", "model": "text-embedding-3-small"}
        assert (await http.post("/v1/embeddings", json=body)).status_code == 404
        in_process.replica.configure(settings())
        assert (await http.post("/v1/embeddings", json=body)).status_code == 200


@pytest.mark.parametrize("name", ["", "a b", "a@b", "a" * 201])
def test_impossible_names_are_refused(name: str) -> None:
    with pytest.raises(ValidationError):
        IngressUserConfig(model_names={name: EMBEDDER})
