from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deployments.artifacts.types import Device
from deployments.errors import HardwareUnavailable
from deployments.ingress.cluster_state import DeploymentState, choose_device
from deployments.ingress.http.request_options import RequestOptions
from tests.support.artifacts import CLASSIFIER, EMBEDDER, seal_tiny, tiny_manifest
from tests.support.in_process import InProcess

CPU, GPU = Device.CPU, Device.GPU
EMBED = f"/models/{EMBEDDER}"
RUNS, SLEEPS, ABSENT = (
    DeploymentState(available=True, running=1),
    DeploymentState(available=True, running=0),
    DeploymentState(available=False, running=0),
)


HINT = RequestOptions(use_gpu=True)


@pytest.mark.parametrize(
    ("options", "graphs", "states", "expected"),
    [
        (RequestOptions(), (CPU, GPU), {CPU: RUNS, GPU: RUNS}, (CPU, None)),
        (RequestOptions(hardware="cpu"), (CPU, GPU), {CPU: RUNS, GPU: RUNS}, (CPU, None)),
        (HINT, (CPU, GPU), {CPU: RUNS, GPU: RUNS}, (GPU, None)),
        (HINT, (CPU, GPU), {CPU: RUNS, GPU: SLEEPS}, (GPU, None)),  # starting
        (RequestOptions(), (CPU, GPU), {CPU: SLEEPS, GPU: RUNS}, (CPU, None)),
        (HINT, (CPU, GPU), {CPU: RUNS, GPU: ABSENT}, (CPU, CPU)),
        (HINT, (CPU, GPU), {CPU: RUNS}, (CPU, CPU)),
        (HINT, (CPU,), {CPU: RUNS, GPU: RUNS}, (CPU, CPU)),
    ],
)
def test_choose_device_takes_the_requested_device_or_falls_back(
    options: RequestOptions,
    graphs: tuple[Device, ...],
    states: dict[Device, DeploymentState],
    expected: tuple[Device, Device | None],
) -> None:
    assert choose_device(options, tiny_manifest(devices=graphs), states) == expected


@pytest.mark.parametrize(
    ("options", "graphs", "states", "device"),
    [
        (RequestOptions(require_gpu=True), (CPU, GPU), {CPU: RUNS, GPU: ABSENT}, GPU),
        (RequestOptions(hardware="gpu"), (CPU, GPU), {CPU: RUNS}, GPU),
        (RequestOptions(require_gpu=True), (CPU,), {CPU: RUNS, GPU: RUNS}, GPU),
        (HINT, (GPU,), {CPU: RUNS}, GPU),
        (RequestOptions(), (GPU,), {CPU: RUNS, GPU: RUNS}, CPU),
    ],
)
def test_choose_device_without_the_required_device_raises(
    options: RequestOptions,
    graphs: tuple[Device, ...],
    states: dict[Device, DeploymentState],
    device: Device,
) -> None:
    with pytest.raises(HardwareUnavailable) as error:
        choose_device(options, tiny_manifest(devices=graphs), states)
    assert error.value.field == "options.use_gpu"
    assert device in error.value.message


@pytest.mark.parametrize(
    ("options", "headers", "compute_type"),
    [
        ({}, {}, "cpu-fp32"),
        ({"use_gpu": False}, {}, "cpu-fp32"),
        ({"use_gpu": True}, {}, "gpu-fp32"),
        ({"hardware": "gpu"}, {}, "gpu-fp32"),
        ({}, {"x-use-gpu": "true"}, "gpu-fp32"),
        ({}, {"x-hardware": "gpu"}, "gpu-fp32"),
        ({"hardware": "cpu"}, {"x-use-gpu": "true"}, "cpu-fp32"),
    ],
)
async def test_request_runs_on_the_requested_device(
    options: dict[str, Any], headers: dict[str, str], compute_type: str, tiny_store: Path
) -> None:
    async with InProcess(tiny_store, gpus=1).client() as http:
        hugging_face = await http.post(
            EMBED, json={"inputs": "a", "options": options}, headers=headers
        )
        openai = await http.post(
            "/v1/embeddings",
            json={"input": "b", "model": EMBEDDER, "options": options},
            headers=headers,
        )
    assert hugging_face.headers["x-compute-type"] == compute_type
    assert openai.headers["x-compute-type"] == compute_type


async def test_use_gpu_without_a_gpu_falls_back_to_the_cpu_with_a_header(tiny_store: Path) -> None:
    async with InProcess(tiny_store, gpus=0).client() as http:
        hinted = await http.post(EMBED, json={"inputs": "a", "options": {"use_gpu": True}})
        openai = await http.post(
            "/v1/embeddings", json={"input": "b", "model": EMBEDDER}, headers={"x-use-gpu": "1"}
        )
        default = await http.post(EMBED, json={"inputs": "c"})
    assert [r.status_code for r in (hinted, openai, default)] == [200] * 3
    for response in (hinted, openai):
        assert response.headers["x-compute-type"] == "cpu-fp32"
        assert response.headers["x-compute-fallback"] == "cpu"
    assert "x-compute-fallback" not in default.headers


@pytest.mark.parametrize(
    ("options", "headers"),
    [
        ({"require_gpu": True}, {}),
        ({"use_gpu": True, "require_gpu": True}, {}),
        ({"hardware": "gpu"}, {}),
        ({}, {"x-use-gpu": "required"}),
        ({}, {"x-hardware": "gpu"}),
    ],
)
async def test_required_gpu_without_a_gpu_is_rejected(
    options: dict[str, Any], headers: dict[str, str], tiny_store: Path
) -> None:
    async with InProcess(tiny_store, gpus=0).client() as http:
        hugging_face = await http.post(
            EMBED, json={"inputs": "a", "options": options}, headers=headers
        )
        openai = await http.post(
            "/v1/embeddings",
            json={"input": "a", "model": EMBEDDER, "options": options},
            headers=headers,
        )
    assert hugging_face.status_code == openai.status_code == 400
    assert hugging_face.json()["code"] == "hardware_unavailable"
    assert hugging_face.json()["field"] == "options.use_gpu"
    assert openai.json()["error"]["code"] == "hardware_unavailable"


async def test_model_without_a_gpu_graph_falls_back_unless_the_gpu_is_required(
    tmp_path: Path,
) -> None:
    seal_tiny(tmp_path, CLASSIFIER, labels=("NO", "YES"), devices=(Device.CPU,))
    path = f"/models/{CLASSIFIER}"
    async with InProcess(tmp_path, models=(CLASSIFIER,), gpus=1).client() as http:
        hinted = await http.post(path, json={"inputs": "a", "options": {"use_gpu": True}})
        required = await http.post(path, json={"inputs": "a", "options": {"require_gpu": True}})
    assert (hinted.status_code, hinted.headers["x-compute-fallback"]) == (200, "cpu")
    assert (required.status_code, required.json()["code"]) == (400, "hardware_unavailable")


async def test_cpu_and_gpu_encoders_answer_alike_and_cache_separately(tiny_store: Path) -> None:
    async with InProcess(tiny_store, gpus=1).client() as http:
        answers = [
            await http.post(EMBED, json={"inputs": "a", "options": {"hardware": hardware}})
            for hardware in ("cpu", "gpu", "cpu", "gpu")
        ]
    assert [response.headers["x-compute-type"] for response in answers] == [
        "cpu-fp32",
        "gpu-fp32",
        "cache",
        "cache",
    ]
    assert answers[0].json() == answers[1].json()
