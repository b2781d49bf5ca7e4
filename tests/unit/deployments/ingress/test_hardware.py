from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deployments.artifacts.types import Device
from deployments.errors import HardwareUnavailable
from deployments.ingress.cluster_state import DeploymentState, choose_device
from tests.support.artifacts import CLASSIFIER, EMBEDDER, seal_tiny, tiny_manifest
from tests.support.in_process import InProcess

CPU, GPU = Device.CPU, Device.GPU
EMBED = f"/models/{EMBEDDER}"
RUNS, SLEEPS, ABSENT = (
    DeploymentState(available=True, running=1),
    DeploymentState(available=True, running=0),
    DeploymentState(available=False, running=0),
)


@pytest.mark.parametrize(
    ("wanted", "graphs", "encoders", "chosen"),
    [
        (None, (CPU, GPU), {CPU: RUNS, GPU: RUNS}, CPU),
        (CPU, (CPU, GPU), {CPU: RUNS, GPU: RUNS}, CPU),
        (GPU, (CPU, GPU), {CPU: RUNS, GPU: RUNS}, GPU),
        (GPU, (CPU, GPU), {CPU: RUNS, GPU: SLEEPS}, GPU),  # it wakes up
        (None, (CPU, GPU), {CPU: SLEEPS, GPU: RUNS}, CPU),
        (GPU, (CPU, GPU), {CPU: RUNS, GPU: ABSENT}, None),
        (GPU, (CPU, GPU), {CPU: RUNS}, None),
        (GPU, (CPU,), {CPU: RUNS, GPU: RUNS}, None),
        (None, (GPU,), {CPU: RUNS, GPU: RUNS}, None),
    ],
)
def test_the_caller_decides_and_the_cpu_is_the_default(
    wanted: Device | None,
    graphs: tuple[Device, ...],
    encoders: dict[Device, DeploymentState],
    chosen: Device | None,
) -> None:
    manifest = tiny_manifest(devices=graphs)
    if chosen is not None:
        assert choose_device(wanted, manifest, encoders) is chosen
        return
    with pytest.raises(HardwareUnavailable) as refusal:
        choose_device(wanted, manifest, encoders)
    assert refusal.value.field == "options.use_gpu"
    assert str(wanted or CPU) in refusal.value.message


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
async def test_a_request_runs_where_it_asked_to(
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


async def test_without_a_gpu_the_wish_is_refused_and_the_cpu_serves_on(tiny_store: Path) -> None:
    async with InProcess(tiny_store, gpus=0).client() as http:
        refused = await http.post(EMBED, json={"inputs": "a", "options": {"use_gpu": True}})
        in_openai_words = await http.post(
            "/v1/embeddings", json={"input": "a", "model": EMBEDDER}, headers={"x-use-gpu": "1"}
        )
        served = await http.post(EMBED, json={"inputs": "a", "options": {"use_gpu": False}})
    assert refused.status_code == 400
    assert refused.json()["code"] == "hardware_unavailable"
    assert refused.json()["field"] == "options.use_gpu"
    assert in_openai_words.status_code == 400
    assert in_openai_words.json()["error"]["code"] == "hardware_unavailable"
    assert served.status_code == 200


async def test_a_model_without_a_gpu_graph_is_refused_there(tmp_path: Path) -> None:
    seal_tiny(tmp_path, CLASSIFIER, labels=("NO", "YES"), devices=(Device.CPU,))
    async with InProcess(tmp_path, models=(CLASSIFIER,), gpus=1).client() as http:
        path = f"/models/{CLASSIFIER}"
        refused = await http.post(path, json={"inputs": "a", "options": {"use_gpu": True}})
        served = await http.post(path, json={"inputs": "a"})
    assert (refused.status_code, refused.json()["code"]) == (400, "hardware_unavailable")
    assert served.status_code == 200


async def test_both_encoders_give_the_same_answer_and_share_no_memory(tiny_store: Path) -> None:
    async with InProcess(tiny_store, gpus=1).client() as http:
        answers = [
            await http.post(EMBED, json={"inputs": "a", "options": {"hardware": hardware}})
            for hardware in ("cpu", "gpu", "cpu", "gpu")
        ]
    assert [reply.headers["x-compute-type"] for reply in answers] == [
        "cpu-fp32",
        "gpu-fp32",
        "cache",
        "cache",
    ]
    assert answers[0].json() == answers[1].json()
