"""All routes of the Open Inference Protocol except `infer`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.artifacts.manifest import MANIFEST_NAME
from deployments.config import IngressUserConfig, LimitSettings
from deployments.tasks import find_tasks
from tests.support.artifacts import (
    CLASSIFIER,
    EMBEDDER,
    WIDTH,
    seal_tiny,
    seal_tiny_version,
    tiny_manifest,
)
from tests.support.in_process import InProcess

VERSION = tiny_manifest(EMBEDDER).version
MODEL = f"/v2/models/{EMBEDDER}"
TEXT = {"inputs": [{"name": "text", "shape": [2], "datatype": "BYTES", "data": ["a", "b"]}]}


@pytest.mark.parametrize("path", ["/v2", "/v2/"])
async def test_server_metadata_has_extensions(path: str, tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        response = await http.get(path)
    assert response.status_code == 200
    assert response.json()["name"] == "hundredfold"
    assert "binary_tensor_data" in response.json()["extensions"]


async def test_health_is_reported_by_status(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        assert (await http.get("/v2/health/live")).json() == {"live": True}
        assert (await http.get("/v2/health/ready")).json() == {"ready": True}
        assert (await http.get(f"{MODEL}/ready")).json() == {"name": EMBEDDER, "ready": True}
    async with InProcess(tiny_store, running={}).client() as http:
        assert (await http.get("/v2/health/live")).status_code == 200
        for path in ("/v2/health/ready", f"{MODEL}/ready"):
            response = await http.get(path)
            assert (response.status_code, response.json()["ready"]) == (503, False)
            assert response.json()["error"]


async def test_metadata_has_the_tensors_of_each_task(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        result = (await http.get(MODEL)).json()
        classifier = (await http.get(f"/v2/models/{CLASSIFIER}")).json()
    assert (result["name"], result["versions"], result["platform"]) == (
        EMBEDDER,
        [VERSION],
        "onnxruntime",
    )
    assert result["inputs"] == [{"name": "text", "datatype": "BYTES", "shape": [-1, 1]}]
    assert result["outputs"] == [{"name": "embedding", "datatype": "FP32", "shape": [-1, -1]}]
    tasks = {one["task"]: one for one in result["tasks"]}
    assert set(tasks) == set(find_tasks(tiny_manifest(EMBEDDER)))
    assert len(tasks) > 1
    names = [one["name"] for one in tasks["sentence-similarity"]["inputs"]]
    assert names == ["source_sentence", "sentences"]
    assert "dimensions" in tasks["feature-extraction"]["parameters"]
    assert [one["name"] for one in classifier["outputs"]] == ["label", "score"]
    assert classifier["inputs"][1]["optional"] is True


async def test_metadata_lists_all_versions_of_a_model(tmp_path: Path) -> None:
    for version in ("0000000000a1", "0000000000a2"):
        seal_tiny_version(tmp_path, EMBEDDER, version)
    async with InProcess(tmp_path, models=(EMBEDDER,)).client() as http:
        default = (await http.get(MODEL)).json()
        older = (await http.get(f"{MODEL}/versions/0000000000a1")).json()
    assert default["versions"] == older["versions"] == ["0000000000a2", "0000000000a1"]


async def test_token_embeddings_are_rows_of_json(tiny_store: Path) -> None:
    request = TEXT | {"parameters": {"task": "token-embeddings"}}
    async with InProcess(tiny_store).client() as http:
        (output,) = (await http.post(f"{MODEL}/infer", json=request)).json()["outputs"]
    rows = [json.loads(row) for row in output["data"]]
    assert len(rows) == output["shape"][0] == TEXT["inputs"][0]["shape"][0]
    assert {len(vector) for row in rows for vector in row} == {WIDTH}


async def test_config_has_the_format_of_triton(tmp_path: Path) -> None:
    seal_tiny(tmp_path, EMBEDDER)
    settings = IngressUserConfig(limits=LimitSettings(items=64))
    async with InProcess(tmp_path, models=(EMBEDDER,), settings=settings).client() as http:
        result = (await http.get(f"{MODEL}/config")).json()
    assert (result["name"], result["max_batch_size"]) == (EMBEDDER, 64)
    (text,), (embedding,) = result["input"], result["output"]
    assert (text["name"], text["data_type"], text["dims"]) == ("text", "TYPE_STRING", [1])
    assert (embedding["data_type"], embedding["dims"]) == ("TYPE_FP32", [-1])


@pytest.mark.parametrize("model_id", [EMBEDDER, EMBEDDER.replace("/", "%2F")])
async def test_paths_accept_the_served_version_only(model_id: str, tiny_store: Path) -> None:
    path = f"/v2/models/{model_id}"
    async with InProcess(tiny_store).client() as http:
        for suffix in ("", "/ready", "/config", "/stats"):
            plain = await http.get(path + suffix)
            named = await http.get(f"{path}/versions/{VERSION}{suffix}")
            other = await http.get(f"{path}/versions/1{suffix}")
            assert plain.status_code == named.status_code == 200, suffix
            assert named.json() == plain.json(), suffix
            assert other.status_code == 404, suffix
            assert VERSION in other.json()["error"]


@pytest.mark.parametrize("model_id", [EMBEDDER, EMBEDDER.replace("/", "%2F")])
async def test_infer_accepts_the_served_version(model_id: str, tiny_store: Path) -> None:
    path = f"/v2/models/{model_id}"
    async with InProcess(tiny_store).client() as http:
        plain = await http.post(f"{path}/infer", json=TEXT)
        named = await http.post(f"{path}/versions/{VERSION}/infer", json=TEXT)
        other = await http.post(f"{path}/versions/1/infer", json=TEXT)
    assert plain.status_code == 200, plain.text
    assert named.json() == plain.json()
    assert plain.json()["model_version"] == VERSION
    assert other.status_code == 404


ABSENT = [
    ("GET", "/v2/models/no/such", 404),
    ("GET", "/v2/models/no/such/ready", 404),
    ("POST", "/v2/models/no/such/infer", 404),
    ("GET", "/v2/poems", 404),
    ("GET", "/v2/models/org/v1/poems", 404),
    ("GET", f"{MODEL}/infer", 404),  # `/infer` is parsed as a part of the model id
    ("POST", "/v2/health/live", 405),
    ("POST", "/v2/repository/models/no/such/load", 404),
    ("POST", "/v2/repository/models/no/such/unload", 404),
]


async def test_unknown_models_return_an_error_string(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        for method, path, status in ABSENT:
            response = await http.request(method, path)
            assert response.status_code == status, path
            assert isinstance(response.json()["error"], str), path


def damaged(store: Path) -> str:
    """Add a damaged model to `store`."""
    directory = seal_tiny(store, "tiny/damaged")
    (directory / MANIFEST_NAME).write_text("{")
    return "tiny/damaged"


async def test_index_lists_all_configured_models(tmp_path: Path) -> None:
    seal_tiny(tmp_path, EMBEDDER)
    models = (EMBEDDER, damaged(tmp_path))
    async with InProcess(tmp_path, models=models).client() as http:
        everything = (await http.post("/v2/repository/index")).json()
        ready = (await http.post("/v2/repository/index", json={"ready": True})).json()
        wrong = await http.post("/v2/repository/index", json={"ready": "yes"})
    assert everything[0] == {"name": EMBEDDER, "version": VERSION, "state": "READY", "reason": ""}
    assert (everything[1]["name"], everything[1]["state"]) == (models[1], "UNAVAILABLE")
    assert "manifest" in everything[1]["reason"]
    assert ready == everything[:1]
    assert wrong.status_code == 400
    async with InProcess(tmp_path, models=(EMBEDDER,), running={}).client() as http:
        entries = (await http.post("/v2/repository/index")).json()
    assert entries[0]["state"] == "LOADING"


LOADING = [
    (f"{EMBEDDER}/load", b"", 200, ""),
    (f"{EMBEDDER}/load", b"{}", 200, ""),
    (f"{EMBEDDER}/load", b'{"parameters": {}}', 200, ""),
    (f"{EMBEDDER}/load", b'{"parameters": {"config": "{}"}}', 400, "parameters"),
    (f"{EMBEDDER}/load", b"[]", 400, "object"),
    (f"{EMBEDDER}/load", b"{", 400, "JSON"),
    ("no/such/load", b"{}", 404, "does not exist"),
    ("tiny/damaged/load", b"{}", 503, "manifest"),
    (
        f"{EMBEDDER}/unload",
        b'{"parameters": {"unload_dependents": false}}',
        400,
        "serve_config.yaml",
    ),
]


async def read_index(http: httpx.AsyncClient) -> list[tuple[str, str, str]]:
    entries = (await http.post("/v2/repository/index")).json()
    return [(entry["name"], entry["state"], entry["reason"]) for entry in entries]


async def test_index_tells_which_models_of_the_store_are_loaded(tmp_path: Path) -> None:
    seal_tiny(tmp_path, EMBEDDER)
    seal_tiny(tmp_path, "acme/other")
    async with InProcess(tmp_path, models=(EMBEDDER,)).client() as http:
        never_loaded = await read_index(http)
        assert (await http.post("/v2/models/acme/other/infer", json=TEXT)).status_code == 200
        loaded = await read_index(http)
        await http.post("/v2/repository/models/acme/other/unload")
        unloaded = await read_index(http)
        only_ready = (await http.post("/v2/repository/index", json={"ready": True})).json()
        assert (await http.post("/v2/models/acme/other/infer", json=TEXT)).status_code == 200
    assert loaded == [(EMBEDDER, "READY", ""), ("acme/other", "READY", "")]
    assert (
        never_loaded
        == unloaded
        == [
            (EMBEDDER, "READY", ""),
            ("acme/other", "UNAVAILABLE", "unloaded"),
        ]
    )
    assert [entry["name"] for entry in only_ready] == [EMBEDDER]


async def test_model_that_is_not_configured_is_loaded_and_unloaded(tmp_path: Path) -> None:
    seal_tiny(tmp_path, EMBEDDER)
    seal_tiny(tmp_path, "acme/other")
    async with InProcess(tmp_path, models=(EMBEDDER,)).client() as http:

        async def loaded() -> set[str]:
            entries = (await http.get("/models/ps")).json()
            return {entry["model"] for entry in entries} - {EMBEDDER}

        assert await loaded() == set()
        for _ in range(2):
            load = await http.post("/v2/repository/models/acme/other/load")
            assert (load.status_code, load.json()) == (200, {})
            assert await loaded() == {"acme/other"}
            unload = await http.post("/v2/repository/models/acme/other/unload")
            assert (unload.status_code, unload.json()) == (200, {}), unload.text
            assert await loaded() == set()


async def test_load_and_unload_say_why_they_fail(tmp_path: Path) -> None:
    seal_tiny(tmp_path, EMBEDDER)
    async with InProcess(tmp_path, models=(EMBEDDER, damaged(tmp_path))).client() as http:
        for path, body, status, words in LOADING:
            response = await http.post(f"/v2/repository/models/{path}", content=body)
            assert response.status_code == status, f"{path} {body!r}"
            assert words in response.text


async def test_statistics_count_requests_of_all_apis(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        await http.post(f"{MODEL}/infer", json=TEXT)
        await http.post(f"{MODEL}/infer", json=TEXT)  # answered from the cache
        await http.post(f"/models/{EMBEDDER}", json={"inputs": ["one", "more", "list"]})
        await http.post(f"/models/{EMBEDDER}", json={"inputs": ""})
        own = (await http.get(f"{MODEL}/stats")).json()["model_stats"]
        everyones = (await http.get("/v2/models/stats")).json()["model_stats"]
    (result,) = own
    assert own[0] in everyones
    assert {one["name"] for one in everyones} == {EMBEDDER, CLASSIFIER}
    assert (result["inference_count"], result["execution_count"]) == (7, 2)
    assert counts(result) == {
        "success": 3,
        "fail": 1,
        "queue": 2,
        "compute_input": 2,
        "compute_infer": 2,
        "compute_output": 0,
        "cache_hit": 1,
    }
    spent = result["inference_stats"]
    assert 0 < spent["compute_infer"]["ns"] < spent["success"]["ns"]
    assert result["last_inference"] > 1.7e12, "milliseconds"


def counts(stats: dict[str, Any]) -> dict[str, int]:
    return {name: sum_["count"] for name, sum_ in stats["inference_stats"].items()}
