from __future__ import annotations

from pathlib import Path

import pytest

from deployments.artifacts.types import Device
from deployments.ingress.apis.model_list import owner
from tests.support.artifacts import CLASSIFIER, EMBEDDER, GRAPH_NAME, MAX_TOKENS, WIDTH, seal_tiny
from tests.support.in_process import InProcess


async def test_model_facts_have_tasks_and_devices(tiny_store: Path) -> None:
    async with InProcess(tiny_store, gpus=0).client() as http:
        facts = (await http.get(f"/models/{EMBEDDER}")).json()
    assert facts["id"] == EMBEDDER
    assert facts["object"] == "model"
    assert facts["owned_by"] == "tiny"
    assert facts["created"] > 1_700_000_000
    assert facts["state"] == "ready"
    assert facts["tasks"][:2] == ["feature-extraction", "sentence-similarity"]
    assert (facts["max_tokens"], facts["width"]) == (MAX_TOKENS, WIDTH)
    assert facts["devices"] == {
        "cpu": {"compute_type": "cpu-fp32", "available": True, "replicas": 1},
        "gpu": {"compute_type": "gpu-fp32", "available": False, "replicas": 1},
    }


async def test_all_model_paths_return_the_same_facts(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        responses = [
            await http.get(path)
            for path in (
                f"/models/{CLASSIFIER}",
                f"/models/{CLASSIFIER}/",
                "/models/tiny%2Fclassifier",
                f"/models/{CLASSIFIER}/info",
            )
        ]
    assert [response.json()["labels"] for response in responses] == [
        ["NEGATIVE", "NEUTRAL", "POSITIVE"]
    ] * 4


@pytest.mark.parametrize("path", ["/models", "/v1/models"])
async def test_model_list_ends_with_rejected_models_and_reasons(path: str, tmp_path: Path) -> None:
    (seal_tiny(tmp_path, EMBEDDER) / GRAPH_NAME).unlink()
    seal_tiny(tmp_path, CLASSIFIER, labels=("NO", "YES"))
    async with InProcess(tmp_path).client() as http:
        listed = (await http.get(path)).json()
    assert listed["object"] == "list"
    assert [(m["id"], m["object"], m["state"]) for m in listed["data"]] == [
        (CLASSIFIER, "model", "ready"),
        (EMBEDDER, "model", "refused"),
    ]
    assert GRAPH_NAME in listed["data"][1]["reason"]


async def test_models_without_replicas_are_loading(tiny_store: Path) -> None:
    async with InProcess(tiny_store, running={}).client() as http:
        facts = (await http.get(f"/models/{EMBEDDER}")).json()
        health = await http.get(f"/models/{EMBEDDER}/health")
    assert facts["state"] == "loading"
    assert (health.status_code, health.json()["code"]) == (503, "model_loading")
    assert health.headers["retry-after"] == "20"


async def test_model_with_a_replica_is_healthy(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        assert (await http.get(f"/models/{EMBEDDER}/health")).status_code == 200


async def test_replica_without_the_model_is_not_healthy(tmp_path: Path) -> None:
    seal_tiny(tmp_path, EMBEDDER, devices=(Device.GPU,))
    server = InProcess(tmp_path, models=(EMBEDDER,), running={"Tokenizer": 1, "CpuEncoder": 1})
    async with server.client() as http:
        health = await http.get(f"/models/{EMBEDDER}/health")
        ready = await http.get(f"/v2/models/{EMBEDDER}/ready")
        facts = (await http.get(f"/models/{EMBEDDER}")).json()
    assert (health.status_code, ready.status_code, facts["state"]) == (503, 503, "loading")


@pytest.mark.parametrize(
    "path", ["/models/no/such", "/models/no/such/info", "/models/no/such/health"]
)
async def test_unknown_model_is_404(path: str, tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        response = await http.get(path)
    assert (response.status_code, response.json()["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(("model_id", "name"), [("org/name", "org"), ("name", "hundredfold")])
def test_owner_is_the_organization_of_the_id(model_id: str, name: str) -> None:
    assert owner(model_id) == name


async def test_default_model_is_the_first_that_fits(tiny_store: Path) -> None:
    async with InProcess(tiny_store, models=(CLASSIFIER, EMBEDDER)).client() as http:
        named = await http.post("/v1/embeddings", json={"input": "a"})
        meant = await http.post("/", json={"inputs": {"source_sentence": "a", "sentences": ["b"]}})
        neither = await http.post("/", json={"inputs": "a"})
    assert named.json()["model"] == EMBEDDER
    assert meant.status_code == 200
    assert [matches["label"] for matches in neither.json()[0]]
