"""Management of models over HTTP with a real cluster: pull, load, versions, removal."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.artifacts import seal_tiny_version
from tests.support.model_hub import ModelHub
from tests.support.ray_cluster import Cluster
from tests.support.tiny_encoders import tiny_checkpoint
from tests.support.waiting import wait_for

MODEL, PULLED = "http/versions", "http/pulled"
FIRST, SECOND = "0000000000a1", "0000000000a2"
FOLLOWS_S = 60.0  # maximum wait until every ingress replica applies a change
BUILT_S = 600.0


@pytest.fixture
def http(cluster: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        yield client


@pytest.fixture
def pulling(cluster: Cluster, config: dict[str, Any]) -> Iterator[None]:
    """Set `builds.allow_pull` in the cluster's config, so that POST /models may pull a model."""
    allowing = copy.deepcopy(config)
    deployments = {d["name"]: d for d in allowing["applications"][0]["deployments"]}
    deployments["Ingress"]["user_config"]["builds"]["allow_pull"] = True
    cluster.settle(allowing)
    yield
    cluster.settle(config)


def ask(http: httpx.Client, name: str) -> httpx.Response:
    body = {"inputs": "a", "options": {"use_cache": False}}
    return http.post(f"/models/{name}", json=body)


def manage(http: httpx.Client, route: str, **body: object) -> Any:
    response = http.post(f"/models/{route}", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def wait_for_version(http: httpx.Client, name: str, version: str) -> None:
    wait_for(lambda: ask(http, name).headers.get("x-sha") == version, FOLLOWS_S)


def test_versions_are_loaded_routed_and_removed(http: httpx.Client, store: Path) -> None:
    for version in (FIRST, SECOND):
        seal_tiny_version(store, MODEL, version)
    loaded = manage(http, f"{MODEL}@{FIRST}/load")
    assert {(entry["model"], entry["version"]) for entry in loaded} == {(MODEL, FIRST)}
    assert {entry["deployment"] for entry in loaded} >= {"CpuEncoder"}
    listed = http.get("/models/ps").json()
    assert any((e["model"], e["version"]) == (MODEL, FIRST) for e in listed)
    assert manage(http, f"{MODEL}@{FIRST}/unload") == []
    assert not any(entry["model"] == MODEL for entry in http.get("/models/ps").json())

    manage(http, f"{MODEL}@{FIRST}/promote")
    wait_for_version(http, MODEL, FIRST)
    manage(http, f"{MODEL}@{SECOND}/alias", alias="canary")
    wait_for_version(http, f"{MODEL}@canary", SECOND)
    manage(http, f"{MODEL}@{SECOND}/promote")
    wait_for_version(http, MODEL, SECOND)
    manage(http, f"{MODEL}/rollback")
    wait_for_version(http, MODEL, FIRST)
    assert ask(http, f"{MODEL}@{SECOND}").headers["x-sha"] == SECOND
    names = [model["id"] for model in http.get("/v1/models").json()["data"]]
    assert MODEL in names

    assert sorted(http.delete(f"/models/{MODEL}").json()["versions"]) == [FIRST, SECOND]
    wait_for(lambda: ask(http, MODEL).status_code == 404, FOLLOWS_S)
    assert http.get(f"/models/{MODEL}/versions").status_code == 404


def test_model_of_the_hub_is_pulled_answers_and_is_removed(
    http: httpx.Client, pulling: None, hub: ModelHub
) -> None:
    tiny_checkpoint(hub.root / PULLED, layers=1)
    body = {"source": PULLED}
    wait_for(lambda: http.post("/models", json=body).status_code == 200, FOLLOWS_S)

    def state() -> str:
        return str(http.get(f"/status/{PULLED}").json()["build"]["state"])

    wait_for(lambda: state() in ("ready", "failed"), BUILT_S)
    assert http.get(f"/status/{PULLED}").json()["build"]["reason"] in (None, "")
    wait_for(lambda: ask(http, PULLED).status_code == 200, FOLLOWS_S)
    assert len(http.delete(f"/models/{PULLED}").json()["versions"]) == 1
    assert http.get(f"/models/{PULLED}/versions").status_code == 404
