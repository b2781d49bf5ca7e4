"""Selection of CPU or GPU by the request.

Here the GPU encoder runs its FP16 graph on the CPU provider.
"""

from __future__ import annotations

import httpx
import numpy as np

from tests.support.ray_cluster import Cluster
from tests.support.served_models import CLASSIFIER, EMBEDDER

TEXT = "Hardware is a property of the request."


def ask(cluster: Cluster, model: str, **options: object) -> httpx.Response:
    body = {"inputs": TEXT, "options": {"use_cache": False, **options}}
    return httpx.post(f"{cluster.url}/models/{model}", json=body, timeout=120)


def test_encoder_scaled_to_zero_returns_503_then_starts(cluster: Cluster) -> None:
    assert cluster.replicas("GpuEncoder") == []
    cold = ask(cluster, EMBEDDER, use_gpu=True)
    assert cold.status_code == 503
    assert cold.json()["estimated_time"] > 0
    assert int(cold.headers["retry-after"]) > 0
    warm = ask(cluster, EMBEDDER, use_gpu=True, wait_for_model=True)
    assert warm.status_code == 200
    assert warm.headers["x-compute-type"] == "gpu-fp16"
    assert len(cluster.replicas("GpuEncoder")) == 1


def test_cpu_and_gpu_encoder_agree_within_the_gate(cluster: Cluster) -> None:
    on_gpu = ask(cluster, EMBEDDER, use_gpu=True, wait_for_model=True)
    on_cpu = ask(cluster, EMBEDDER, use_gpu=False)
    assert on_cpu.headers["x-compute-type"] == "cpu-int8"
    gpu, cpu = (np.array(reply.json()[0]) for reply in (on_gpu, on_cpu))
    assert float(gpu @ cpu) > 0.98


def test_header_selects_the_hardware_without_options(cluster: Cluster) -> None:
    reply = httpx.post(
        f"{cluster.url}/v1/embeddings",
        json={"input": TEXT, "model": EMBEDDER},
        headers={"x-use-gpu": "true", "x-use-cache": "false", "x-wait-for-model": "1"},
        timeout=120,
    )
    assert reply.headers["x-compute-type"] == "gpu-fp16"


def test_default_hardware_is_the_cpu(cluster: Cluster) -> None:
    assert ask(cluster, CLASSIFIER).headers["x-compute-type"] == "cpu-int8"
