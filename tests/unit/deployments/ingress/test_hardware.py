from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.artifacts.types import Device
from deployments.config import IngressUserConfig, PlacementSettings
from deployments.errors import Overloaded
from deployments.ingress.devices.device_forecasts import RequestWork
from deployments.ingress.requests import ResolvedRequest
from deployments.messages import CallResult
from tests.support.artifacts import CLASSIFIER, EMBEDDER, seal_tiny
from tests.support.in_process import InProcess

CPU, GPU = Device.CPU, Device.GPU
EMBED = f"/models/{EMBEDDER}"


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
        ({"compute": "gpu"}, {}, "gpu-fp32"),
        ({}, {"x-compute": "gpu"}, "gpu-fp32"),
        ({}, {"x-compute": "cpu"}, "cpu-fp32"),
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
    ("options", "headers", "named"),
    [
        ({"require_gpu": True}, {}, "require_gpu"),
        ({"use_gpu": True, "require_gpu": True}, {}, "require_gpu"),
        ({"hardware": "gpu"}, {}, "hardware"),
        ({}, {"x-use-gpu": "required"}, "require_gpu"),
        ({}, {"x-hardware": "gpu"}, "hardware"),
    ],
)
async def test_required_gpu_without_a_gpu_is_rejected(
    options: dict[str, Any], headers: dict[str, str], named: str, tiny_store: Path
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
        text = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a"]}
        open_inference = await http.post(
            f"/v2/models/{EMBEDDER}/infer",
            json={"inputs": [text], "parameters": options},
            headers=headers,
        )
    assert {r.status_code for r in (hugging_face, openai, open_inference)} == {400}
    assert hugging_face.json()["code"] == "hardware_unavailable"
    assert hugging_face.json()["field"] == f"options.{named}"
    assert all(f"header `{header}`" in hugging_face.json()["error"] for header in headers)
    assert openai.json()["error"]["code"] == "hardware_unavailable"
    renamed = hugging_face.json()["error"].replace("options.", "parameters.")
    assert open_inference.json()["error"] == renamed


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embed", {"inputs": "a"}),
        ("/embed_all", {"inputs": "a"}),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}),
        ("/predict", {"inputs": "a", "model": CLASSIFIER}),
        ("/rerank", {"query": "a", "texts": ["b"]}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/classify", {"input": "a", "model": CLASSIFIER}),
    ],
)
async def test_bodies_of_other_servers_take_options(
    path: str, body: dict[str, Any], tiny_store: Path
) -> None:
    async with InProcess(tiny_store, gpus=0).client() as http:
        default = await http.post(path, json=body)
        required = await http.post(path, json={**body, "options": {"require_gpu": True}})
        unknown = await http.post(path, json={**body, "options": {"gpu": True}})
    assert default.status_code == 200
    assert required.status_code in (400, 422)  # text-embeddings-inference has only 422
    assert "this cluster runs no model on `gpu`" in required.text
    assert "options.gpu" in unknown.text


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


def settings_with(**placement: Any) -> IngressUserConfig:
    return IngressUserConfig(placement=PlacementSettings(**placement))


async def embed(http: httpx.AsyncClient, text: str, **headers: str) -> str:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    response = await http.post(EMBED, json={"inputs": text}, headers=named)
    assert response.status_code == 200, response.text
    return response.headers["x-compute-type"]


CHEAP_GPU = {"cpu": 10.0, "gpu": 1.0}


async def test_auto_runs_where_it_is_cheaper(tiny_store: Path) -> None:
    for prices, compute_type in (({"cpu": 1, "gpu": 10}, "cpu-fp32"), (CHEAP_GPU, "gpu-fp32")):
        harness = InProcess(tiny_store, gpus=1, settings=settings_with(prices=prices))
        async with harness.client() as http:
            assert await embed(http, "a", x_compute="auto") == compute_type
            assert await embed(http, "b") == "cpu-fp32"  # the default device


async def test_auto_as_the_default_yields_to_what_a_request_names(tiny_store: Path) -> None:
    settings = settings_with(default="auto", prices=CHEAP_GPU)
    async with InProcess(tiny_store, gpus=1, settings=settings).client() as http:
        assert await embed(http, "a") == "gpu-fp32"
        assert await embed(http, "b", x_compute="cpu") == "cpu-fp32"
        assert await embed(http, "c", x_use_gpu="false") == "cpu-fp32"


async def test_auto_does_not_wake_a_gpu_for_a_request_that_the_cpu_answers_in_time(
    tiny_store: Path,
) -> None:
    asleep = {"Tokenizer": 1, "CpuEncoder": 1, "GpuEncoder": 0}
    settings = settings_with(default="auto", prices=CHEAP_GPU)
    async with InProcess(tiny_store, gpus=1, running=asleep, settings=settings).client() as http:
        assert await embed(http, "a") == "cpu-fp32"


async def test_auto_without_a_gpu_is_the_cpu_and_no_fallback(tiny_store: Path) -> None:
    settings = settings_with(default="auto", prices=CHEAP_GPU)
    async with InProcess(tiny_store, gpus=0, settings=settings).client() as http:
        response = await http.post(EMBED, json={"inputs": "a"})
    assert response.headers["x-compute-type"] == "cpu-fp32"
    assert "x-compute-fallback" not in response.headers


async def test_auto_moves_to_the_gpu_while_the_cpu_queue_is_longer_than_the_deadline(
    tiny_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = InProcess(tiny_store, gpus=1)
    async with harness.client() as http:
        forecasts = harness.pipeline.devices.forecasts
        # Only the queue must decide, and not the times that the passes take on this host.
        monkeypatch.setattr(forecasts, "record_result", lambda *_: None)
        model = harness.pipeline.permitted.find(EMBEDDER)
        assert await embed(http, "a", x_compute="auto") == "cpu-fp32"
        end = forecasts.start(RequestWork(model, tokens=1e9), Device.CPU)
        assert await embed(http, "b", x_compute="auto") == "gpu-fp32"
        end()
        assert await embed(http, "c", x_compute="auto") == "cpu-fp32"


@pytest.mark.parametrize(
    ("headers", "refusing", "status", "asked"),
    [
        ({"x-compute": "auto"}, {Device.GPU}, 200, [Device.GPU, Device.CPU]),
        ({"x-compute": "auto"}, {*Device}, 429, [Device.GPU, Device.CPU]),
        ({"x-compute": "gpu"}, {Device.GPU}, 429, [Device.GPU]),
        ({"x-compute": "auto", "x-request-timeout-ms": "0.01"}, {Device.GPU}, 429, [Device.GPU]),
    ],
)
async def test_auto_asks_another_device_once_after_a_refusal(
    headers: dict[str, str],
    refusing: set[Device],
    status: int,
    asked: list[Device],
    tiny_store: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = InProcess(tiny_store, gpus=1, settings=settings_with(prices=CHEAP_GPU))
    devices = []
    async with harness.client() as http:
        executor = harness.pipeline._encoders
        execute = executor.execute

        async def refuse(request: ResolvedRequest) -> tuple[CallResult, bool]:
            devices.append(request.device)
            if request.device in refusing:
                raise Overloaded("the queue is full")
            return await execute(request)

        monkeypatch.setattr(executor, "execute", refuse)
        body = {"inputs": "a", "options": {"use_cache": False}}
        response = await http.post(EMBED, json=body, headers=headers)
    assert (response.status_code, devices) == (status, asked)
    assert len(harness.recorder.records) == 1


async def test_invalid_compute_names_the_header_and_its_values(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        refused = await http.post(EMBED, json={"inputs": "a"}, headers={"x-compute": "tpu"})
        in_body = await http.post(EMBED, json={"inputs": "a", "options": {"compute": "tpu"}})
    assert (refused.status_code, refused.json()["field"]) == (400, "x-compute")
    assert "`auto`, `cpu`, `gpu`" in refused.json()["error"][0]
    assert in_body.json()["field"] == "options.compute"
