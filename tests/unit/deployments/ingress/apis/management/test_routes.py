"""Tests of the HTTP routes that manage versions, aliases, pulls and the memory of replicas."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NoReturn

import httpx
import pytest

from deployments.artifacts.store import PLAN_NAME, resolve_version
from deployments.builds.queue import BuildQueue
from deployments.config import BuildSettings, IngressUserConfig
from deployments.ingress import builds, replica_memory
from deployments.ingress.http.api import Access
from deployments.keys.key import Scope
from deployments.messages import PoolRequest
from tests.support.artifacts import seal_tiny_version
from tests.support.in_process import InProcess
from tests.support.keys import add_key, bearer
from tests.support.local_clients import LocalModelPoolClient

MODEL, OLD, NEW = "acme/tiny", "000000000001", "000000000002"
PULLS = IngressUserConfig(builds=BuildSettings(allow_pull=True))


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "has_compiler", lambda: True)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    for version in (OLD, NEW):
        seal_tiny_version(tmp_path, MODEL, version)
    return tmp_path


async def test_versions_are_moved_by_routes(store: Path) -> None:
    async with InProcess(store, models=(MODEL,)).client() as http:
        before = (await http.get(f"/models/{MODEL}/versions")).json()
        assert [one["version"] for one in before["versions"]] == [NEW, OLD]
        promoted = await http.post(f"/models/{MODEL}@{OLD}/promote")
        assert promoted.status_code == 200, promoted.text
        assert promoted.json()["versions"][1]["aliases"] == ["stable"]
        split = await http.post(f"/models/{MODEL}@{NEW}/split", json={"percent": 10})
        assert [one["percent"] for one in split.json()["versions"]] == [10, 90]
        alias = await http.post(f"/models/{MODEL}/alias", json={"alias": "canary"})
        assert alias.json()["versions"][0]["aliases"] == ["latest", "canary"]
        assert (await http.post(f"/models/{MODEL}/pin", json={})).json()["pinned"] is True
        await http.post(f"/models/{MODEL}/promote")
        rolled_back = await http.post(f"/models/{MODEL}/rollback")
        assert rolled_back.json()["versions"][1]["percent"] == 100


async def test_log_says_who_changed_what(
    store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = tmp_path / "keys.json"
    key = add_key(keys, "ops", scopes=(Scope.INFER, Scope.ADMIN))
    server = InProcess(store, models=(MODEL,), settings=IngressUserConfig(key_file=keys))
    with caplog.at_level("INFO", "ray.serve.hundredfold"):
        async with server.client() as http:
            http.headers.update(bearer(key))
            await http.post(f"/models/{MODEL}@{OLD}/promote")
            await http.get(f"/models/{MODEL}/versions")
            await http.get("/v1/models")
            await http.post("/v2/repository/index", json={})
    lines = [line for line in caplog.messages if line.startswith(("GET", "POST"))]
    assert lines == [f"POST '/models/{MODEL}@{OLD}/promote' by ops"]


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/models/no/such/promote", {}, 404, "model_not_found"),
        (f"/models/{MODEL}/split", {}, 400, "invalid_field"),
        (f"/models/{MODEL}/split", {"percent": 101}, 400, "invalid_field"),
        (f"/models/{MODEL}/split", {"percent": "1"}, 400, "invalid_field"),
        (f"/models/{MODEL}/alias", {"alias": "../x"}, 400, "invalid_field"),
        (f"/models/{MODEL}/pin", {"force": True}, 400, "invalid_field"),
        ("/models/%2E%2E/x/promote", {}, 404, "model_not_found"),
        ("/models", {"source": ""}, 400, "invalid_field"),
        ("/models", {"source": "acme/new", "id": "../x"}, 400, "invalid_field"),
        ("/models", {"id": "acme/new"}, 400, "invalid_field"),
    ],
)
async def test_wrong_requests_say_why(
    store: Path, path: str, body: dict[str, object], status: int, code: str
) -> None:
    async with InProcess(store, models=(MODEL,), settings=PULLS).client() as http:
        response = await http.post(path, json=body)
    assert (response.status_code, response.json()["code"]) == (status, code), response.text
    assert not BuildQueue(store).pending()


async def test_damaged_plan_answers_503(store: Path) -> None:
    async with InProcess(store, models=(MODEL,)).client() as http:
        (store / PLAN_NAME).write_text("{")
        answers = [
            await http.get(f"/models/{MODEL}/versions"),
            await http.post(f"/models/{MODEL}/pin"),
            await http.delete(f"/models/{MODEL}"),
        ]
        seen = {(one.status_code, one.json()["code"]) for one in answers}
        assert seen == {(503, "plan_unusable")}
        assert resolve_version(store, MODEL, "latest") == NEW


async def test_removed_model_is_unknown_and_used_version_stays(store: Path) -> None:
    async with InProcess(store, models=(MODEL,)).client() as http:
        used = await http.delete(f"/models/{MODEL}@{NEW}")
        assert (used.status_code, used.json()["code"]) == (409, "model_in_use")
        assert (await http.delete(f"/models/{MODEL}@{OLD}")).json() == {
            "id": MODEL,
            "versions": [OLD],
        }
        assert (await http.delete(f"/models/{MODEL}")).json()["versions"] == [NEW]
        assert (await http.delete(f"/models/{MODEL}")).status_code == 404


async def test_pull_is_queued_for_any_source(tmp_path: Path) -> None:
    async with InProcess(tmp_path, models=("a/b",), settings=PULLS).client() as http:
        response = await http.post("/models", json={"source": "/data/checkpoint"})
        assert response.status_code == 200, response.text
        assert response.json()["state"] == "queued"
        again = await http.post("/models", json={"source": "/data/checkpoint"})
        assert again.json()["state"] == "queued"
        status = (await http.get("/status/local/checkpoint")).json()
    assert status["build"]["source"] == ".../checkpoint", "clients see no directories of the host"
    assert len(BuildQueue(tmp_path).pending()) == 1


async def test_pull_for_a_task_is_queued_with_it(tmp_path: Path) -> None:
    body = {"source": "acme/new", "task": "sparse-embeddings"}
    async with InProcess(tmp_path, models=("a/b",), settings=PULLS).client() as http:
        refused = await http.post("/models", json={**body, "task": "sparse"})
        assert (await http.post("/models", json=body)).status_code == 200
    assert (refused.status_code, refused.json()["field"]) == (400, "task")
    assert "`sparse`" in refused.json()["error"][0]
    assert [record.task for record in BuildQueue(tmp_path).pending()] == ["sparse-embeddings"]


async def test_hub_id_without_an_organization_is_pulled(tmp_path: Path) -> None:
    async with InProcess(tmp_path, models=("a/b",), settings=PULLS).client() as http:
        response = await http.post("/models", json={"source": "gpt2"})
        assert response.status_code == 200, response.text
        status = (await http.get("/status/gpt2")).json()
    assert status["build"]["source"] == "gpt2"


async def test_pull_needs_the_permission_of_the_configuration(tmp_path: Path) -> None:
    async with InProcess(tmp_path, models=("a/b",)).client() as http:
        response = await http.post("/models", json={"source": "acme/new"})
    assert (response.status_code, response.json()["code"]) == (403, "permission_denied")
    assert not BuildQueue(tmp_path).pending()


async def test_pull_without_a_compiler_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builds, "has_compiler", lambda: False)
    async with InProcess(tmp_path, models=("a/b",), settings=PULLS).client() as http:
        response = await http.post("/models", json={"source": "acme/new"})
    assert response.status_code == 400
    assert "no compiler" in response.json()["error"][0]


async def test_operators_manage_the_models_that_their_key_permits(
    store: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    key_file = tmp_path_factory.mktemp("keys") / "keys.json"
    key = add_key(key_file, scopes=(Scope.ADMIN,), models=("other/*",))
    settings = IngressUserConfig(key_file=key_file, builds=BuildSettings(allow_pull=True))
    async with InProcess(store, models=(MODEL,), settings=settings).application() as app:
        transport = httpx.ASGITransport(app)
        headers = bearer(key)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://test", headers=headers
        ) as http:
            managed = [
                (*(route.methods - {"HEAD"}), route.path.replace("{id:path}", name))
                for route in app.table.routes
                if route.operation.access is Access.ADMIN and "{id:path}" in route.path
                for name in (MODEL, f"{MODEL}@{OLD}")
            ]
            assert {method for method, _ in managed} == {"GET", "POST", "DELETE"}
            for method, path in managed:
                assert (await http.request(method, path)).status_code == 403, path
            assert (await http.post("/models", json={"source": MODEL})).status_code == 403
            assert (await http.post("/models", json={"source": "other/x"})).status_code == 200


async def test_memory_of_the_replicas_is_shown_and_changed(store: Path) -> None:
    async with InProcess(store, models=()).client() as http:
        loaded = await http.post(f"/models/{MODEL}@{OLD}/load")
        assert loaded.status_code == 200, loaded.text
        (entry, *_) = loaded.json()
        assert (entry["model"], entry["version"], entry["in_use"]) == (MODEL, OLD, 0)
        assert entry["bytes"] > 0
        answered = await http.post(f"/models/{MODEL}", json={"inputs": "a"})
        assert answered.status_code == 200
        entries = (await http.get("/models/ps")).json()
        assert {one["version"] for one in entries} == {OLD, NEW}
        used = next(one for one in entries if one["version"] == NEW)
        assert used["deployment"] == "CpuEncoder"
        assert used["requests_per_minute"] == 1
        assert (await http.post(f"/models/{MODEL}@{OLD}/unload")).json() == []
        assert {one["version"] for one in (await http.get("/models/ps")).json()} == {NEW}


async def test_replicas_that_do_not_answer_end_the_request(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(_self: LocalModelPoolClient, _request: PoolRequest) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(replica_memory, "TIMEOUT_S", 0.05)
    async with InProcess(store, models=(MODEL,)).client() as http:
        monkeypatch.setattr(LocalModelPoolClient, "send", hang)
        response = await http.get("/models/ps")
    assert (response.status_code, response.json()["code"]) == (504, "deadline_exceeded")


async def test_pinned_model_is_not_unloaded(store: Path) -> None:
    async with InProcess(store, models=(MODEL,)).client() as http:
        response = await http.post(f"/models/{MODEL}/unload")
        assert response.status_code == 400
        assert "it is pinned" in response.json()["error"][0]
        assert (await http.post("/models/no/such/unload")).status_code == 404


async def test_memory_of_models_that_a_key_does_not_permit_is_hidden(
    store: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    key_file = tmp_path_factory.mktemp("keys") / "keys.json"
    key = add_key(key_file, scopes=(Scope.ADMIN,), models=("other/*",))
    everything = add_key(key_file, "ops", scopes=(Scope.ADMIN,))
    settings = IngressUserConfig(key_file=key_file)
    async with InProcess(store, models=(), settings=settings).client() as http:
        load = await http.post(f"/models/{MODEL}/load", headers=bearer(everything))
        assert load.status_code == 200
        assert (await http.get("/models/ps", headers=bearer(key))).json() == []
        unload = await http.post(f"/models/{MODEL}/unload", headers=bearer(key))
        assert unload.status_code == 403
        assert len((await http.get("/models/ps", headers=bearer(everything))).json()) > 0
