from __future__ import annotations

from pathlib import Path

import pytest

from deployments.artifacts.manifest import MANIFEST_NAME, ArtifactManifest, PruningSource
from deployments.artifacts.types import Device
from deployments.config import IngressUserConfig
from deployments.ingress.apis.shared.model_list import owner
from tests.support.artifacts import (
    CLASSIFIER,
    EMBEDDER,
    GRAPH_NAME,
    MAX_TOKENS,
    WIDTH,
    refuse_version,
    seal,
    seal_tiny,
    seal_tiny_version,
)
from tests.support.in_process import InProcess
from tests.support.keys import add_key, bearer


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
    assert facts["max_model_len"] == MAX_TOKENS
    assert facts["similarity"] == "cosine"
    sizes = [device.pop("size_bytes") for device in facts["devices"].values()]
    assert 0 < sizes[0] < facts["size_bytes"]
    assert facts["devices"] == {
        device: {
            "compute_type": f"{device}-fp32",
            "candidate": f"tiny-{device}",
            "precision": "fp32",
            "available": device == "cpu",
            "replicas": 1,
        }
        for device in ("cpu", "gpu")
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


async def test_keys_that_only_use_models_see_the_versions(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for version in ("000000000001", "000000000002", "000000000003", "000000000004"):
        directory = seal_tiny_version(tmp_path, EMBEDDER, version)
        if version == "000000000003":
            (directory / MANIFEST_NAME).write_text("{}")
    refuse_version(tmp_path, EMBEDDER, "000000000002")
    key_file = tmp_path_factory.mktemp("keys") / "keys.json"
    key = add_key(key_file, models=(EMBEDDER,))
    settings = IngressUserConfig(key_file=key_file)
    async with InProcess(tmp_path, models=(EMBEDDER,), settings=settings).client() as http:
        facts = (await http.get(f"/models/{EMBEDDER}", headers=bearer(key))).json()
        other = await http.get(f"/models/{CLASSIFIER}", headers=bearer(key))
    assert [one["version"] for one in facts["versions"]] == ["000000000004", "000000000001"]
    for key in ("version", "size_bytes", "pruned", "devices"):
        assert facts["versions"][0][key] == facts[key]
    assert other.status_code == 403


async def test_versions_tell_how_they_were_pruned(tmp_path: Path) -> None:
    directory = seal_tiny(tmp_path, EMBEDDER)
    manifest = ArtifactManifest.parse(directory)
    pruned = manifest.source.model_copy(update={"pruning": PruningSource(fraction=0.4)})
    (directory / MANIFEST_NAME).unlink()
    seal(directory, manifest.model_copy(update={"source": pruned}))
    async with InProcess(tmp_path, models=(EMBEDDER,)).client() as http:
        facts = (await http.get(f"/models/{EMBEDDER}")).json()
    assert [facts["pruned"], facts["versions"][0]["pruned"]] == [0.4, 0.4]


@pytest.mark.parametrize("path", ["", "/info", "/report", "/v1/models"])
async def test_clients_see_no_directories_of_the_host_of_a_build(path: str, tmp_path: Path) -> None:
    directory = seal_tiny(tmp_path, EMBEDDER)
    manifest = ArtifactManifest.parse(directory)
    local = manifest.source.model_copy(update={"ref": "/home/ann/models/tiny"})
    (directory / MANIFEST_NAME).unlink()
    seal(directory, manifest.model_copy(update={"source": local}))
    async with InProcess(tmp_path, models=(EMBEDDER,)).client() as http:
        answer = (await http.get(f"/models/{EMBEDDER}{path}")).json()
    model = answer["data"][0] if "data" in answer else answer
    assert model["source"] == {**local.model_dump(), "ref": ".../tiny"}


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


async def test_models_of_the_store_follow_those_of_the_configuration_in_pages(
    tmp_path: Path,
) -> None:
    ids = [f"tiny/model-{number}" for number in range(5)]
    directories = [seal_tiny(tmp_path, model_id) for model_id in ids]
    (directories[1] / MANIFEST_NAME).write_bytes(b"damaged")
    async with InProcess(tmp_path, models=(ids[3],)).client() as http:
        pages = []
        after = {}
        for _ in range(3):
            pages.append((await http.get("/v1/models", params={"limit": 2, **after})).json())
            after = {"after": pages[-1]["data"][-1]["id"]}
        short = (await http.get("/models", params={"limit": 1})).json()
        past = (await http.get("/v1/models", params={"after": "tiny/model-2x"})).json()
    listed = [model["id"] for page in pages for model in page["data"]]
    assert listed == [ids[3], ids[0], ids[1], ids[2], ids[4]]
    assert [model["state"] for model in pages[1]["data"]] == ["refused", "ready"]
    assert [page["has_more"] for page in pages] == [True, True, False]
    assert pages[0]["data"][1]["tasks"][0] == "feature-extraction"
    assert [model["id"] for model in short["data"]] == [ids[3]]
    assert [model["id"] for model in past["data"]] == [ids[4]]


async def test_pages_have_every_model_if_directories_sort_differently(tmp_path: Path) -> None:
    for model_id in ("meta/x", "meta-llama/y", "meta/z"):
        seal_tiny(tmp_path, model_id)
    listed: list[str] = []
    async with InProcess(tmp_path, models=()).client() as http:
        for _ in range(3):
            after = {"after": listed[-1]} if listed else {}
            page = (await http.get("/v1/models", params={"limit": 1, **after})).json()
            listed += [model["id"] for model in page["data"]]
    assert listed == ["meta-llama/y", "meta/x", "meta/z"]
    assert not page["has_more"]


async def test_five_thousand_models_are_listed_by_a_thousand(tmp_path: Path) -> None:
    original = seal_tiny(tmp_path, EMBEDDER).parent
    for number in range(5_000):
        (tmp_path / f"many--m{number:04d}").symlink_to(original)
    async with InProcess(tmp_path, models=(EMBEDDER,)).client() as http:
        page = (await http.get("/v1/models")).json()
        assert (await http.post("/models/many/m0007", json={"inputs": "a"})).status_code == 503
        document = (await http.get("/openapi.json")).text
    assert (len(page["data"]), page["has_more"]) == (1_000, True)
    assert "many/" not in document
    assert len(document) < 1_000_000


@pytest.mark.parametrize("limit", ["0", "1001", "-1", "many", "9" * 5_000])
async def test_invalid_limit_is_named(limit: str, tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        response = await http.get("/models", params={"limit": limit})
    assert (response.status_code, response.json()["field"]) == (400, "limit")
