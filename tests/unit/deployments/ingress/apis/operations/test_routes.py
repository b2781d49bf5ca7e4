from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.artifacts import CLASSIFIER, EMBEDDER, GRAPH_NAME, seal_tiny
from tests.support.in_process import InProcess


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_health_does_not_depend_on_replicas(path: str, tiny_store: Path) -> None:
    async with InProcess(tiny_store, running={}).client() as http:
        response = await http.get(path)
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


async def test_ready_lists_encoders_and_replicas(tiny_store: Path) -> None:
    running = {"Tokenizer": 1, "CpuEncoder": 2, "GpuEncoder": 0}
    async with InProcess(tiny_store, running=running, gpus=0).client() as http:
        response = await http.get("/ready")
    assert response.status_code == 200
    assert response.json() == {
        "ready": True,
        "missing": [],
        "encoders": {
            "cpu": {"available": True, "replicas": 2},
            "gpu": {"available": False, "replicas": 0},
        },
        "refused": {},
    }


@pytest.mark.parametrize(
    ("running", "missing"),
    [
        ({}, ["no tokenizer is running", "no cpu encoder is running"]),
        ({"Tokenizer": 1}, ["no cpu encoder is running"]),
    ],
)
async def test_missing_deployments_are_not_ready(
    running: dict[str, int], missing: list[str], tiny_store: Path
) -> None:
    async with InProcess(tiny_store, running=running).client() as http:
        response = await http.get("/ready")
    assert response.status_code == 503
    assert response.json()["missing"] == missing


async def test_ready_needs_one_usable_model_and_lists_rejected_ones(
    tmp_path: Path,
) -> None:
    (seal_tiny(tmp_path, EMBEDDER) / GRAPH_NAME).unlink()
    async with InProcess(tmp_path, models=(EMBEDDER,)).client() as http:
        none_left = await http.get("/ready")
    seal_tiny(tmp_path, CLASSIFIER, labels=("NO", "YES"))
    async with InProcess(tmp_path).client() as http:
        one_left = await http.get("/ready")
    async with InProcess(tmp_path, models=(EMBEDDER,)).client() as http:
        only_outside_of_the_configuration = await http.get("/ready")
    assert one_left.status_code == only_outside_of_the_configuration.status_code == 200
    assert list(one_left.json()["refused"]) == [EMBEDDER]
    assert GRAPH_NAME in one_left.json()["refused"][EMBEDDER]
    assert none_left.status_code == 503
    (reason,) = none_left.json()["missing"]
    assert reason.startswith("no model could be opened: ")
    assert GRAPH_NAME in reason
    assert str(tmp_path) not in one_left.text + none_left.text, "it is public"


async def test_metrics_have_prometheus_format(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        response = await http.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert response.text == "hundredfold_requests_total 1\n"
