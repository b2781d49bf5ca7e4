"""A running cluster: request ids, memory, reconfiguration, metrics and open ports."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.store import find_artifact
from deployments.artifacts.types import Device
from deployments.config import EncoderSettings
from deployments.engines.onnx.memory import SMALL_PASSES
from deployments.tuning.costs import TuningTarget
from deployments.tuning.lone_passes import measure_graphs
from tests.support.cluster_load import embed
from tests.support.ray_cluster import Cluster
from tests.support.served_models import (
    EMBEDDER,
    ENCODER_MODELS,
    MINILM_NLI,
    MINILM_RERANK,
    QA_MODEL,
    RAMPART,
)
from tests.support.waiting import wait_for

# Limits of resident memory. Measured with seven models: ingress 154 MiB, tokenizer 182 MiB. In
# addition to its graphs, an encoder took 199 MiB before its first forward pass. After two
# concurrent passes of 2,048 tokens of long texts it took 362 MiB, and 463 MiB on another CPU. A
# second copy of the graphs, or PyTorch, would exceed these limits.
INGRESS_LIMIT_MIB = 250
TOKENIZER_LIMIT_MIB = 250
BESIDE_GRAPHS_LIMIT_MIB = 500


def read(cluster: Cluster, context: str) -> httpx.Response:
    body = {"inputs": {"question": "What?", "context": context}, "options": {"use_cache": False}}
    return httpx.post(f"{cluster.url}/models/{QA_MODEL}", json=body, timeout=60)


def graphs_mib(store: Path, encoder: EncoderSettings) -> float:
    """Return the total size of the graphs that a CPU encoder opens for its models."""
    graphs = 0
    for model_id in (*ENCODER_MODELS, MINILM_NLI, MINILM_RERANK, RAMPART):
        directory = find_artifact(store, model_id)
        manifest = ArtifactManifest.read(directory)
        graphs += measure_graphs(TuningTarget(directory, manifest, Device.CPU, encoder))
    return graphs / (1 << 20)


def test_every_response_has_one_request_id(cluster: Cluster) -> None:
    """Requests bypass Ray Serve's wrapper of the application, which would add a second id."""
    url = f"{cluster.url}/models/{QA_MODEL}"
    wrong = httpx.post(url, json={}, headers={"x-request-id": "mine"}, timeout=60)
    listed = [httpx.get(f"{cluster.url}/v1/models", timeout=60) for _ in range(2)]
    assert wrong.headers.get_list("x-request-id") == ["mine"]
    made = [one.headers.get_list("x-request-id") for one in listed]
    assert [len(ids) for ids in made] == [1, 1]
    assert made[0] != made[1]


def test_replicas_stay_small_without_torch_and_transformers(
    cluster: Cluster, config: dict[str, Any]
) -> None:
    encoders = config["applications"][0]["args"]["encoders"]
    graphs = graphs_mib(cluster.store, EncoderSettings.model_validate(encoders["cpu"]))
    for _ in range(3):
        assert embed(cluster, ["word " * n for n in range(1, 200, 7)]).status_code == 200
        assert read(cluster, "word " * 3000).status_code == 200
    for _ in range(SMALL_PASSES):  # they return what concurrent large passes left in the arena
        assert embed(cluster, "text").status_code == 200
    limits_mib = {
        "Ingress": INGRESS_LIMIT_MIB,
        "Tokenizer": TOKENIZER_LIMIT_MIB,
        "CpuEncoder": graphs + BESIDE_GRAPHS_LIMIT_MIB,
    }
    for deployment, limit_mib in limits_mib.items():
        (replica, *_) = cluster.replicas(deployment)
        libraries = {m.path for m in replica.memory_maps()}
        assert not [path for path in libraries if "torch" in path]
        assert replica.memory_info().rss / (1 << 20) < limit_mib, deployment


def test_user_config_is_applied_without_a_restart(cluster: Cluster, config: dict[str, Any]) -> None:
    wait_for(lambda: len(cluster.replicas("CpuEncoder")) == 1, 60)
    before = replica_pids(cluster)
    changed = copy.deepcopy(config)
    user_configs = {d["name"]: d["user_config"] for d in changed["applications"][0]["deployments"]}
    user_configs["Ingress"]["limits"]["items"] = 3
    user_configs["Ingress"]["batching"]["batch_wait_timeout_s"] = 0.001
    user_configs["Tokenizer"]["cache_bytes"] = 0
    user_configs["CpuEncoder"]["batching"]["max_waiting_items"] = 2
    cluster.deploy_by_command(changed)
    wait_for(lambda: embed(cluster, ["a", "b", "c", "d"]).status_code == 422, 30)
    wait_for(lambda: 429 in crowd_statuses(cluster, ["a", "b", "c"]), 30)
    cluster.settle(config)
    assert embed(cluster, ["a", "b", "c", "d"]).status_code == 200
    assert before <= replica_pids(cluster), "the crowd may add replicas; none restarts"


def crowd_statuses(cluster: Cluster, inputs: list[str]) -> set[int]:
    """Send 16 requests, eight at a time. An idle encoder would accept a lone call of any size."""
    with ThreadPoolExecutor(8) as crowd:
        replies = crowd.map(lambda _: embed(cluster, inputs), range(16))
        return {reply.status_code for reply in replies}


def replica_pids(cluster: Cluster) -> set[int]:
    names = ("Ingress", "Tokenizer", "CpuEncoder")
    return {replica.pid for name in names for replica in cluster.replicas(name)}


def test_metrics_route_has_every_deployment(cluster: Cluster) -> None:
    embed(cluster, "counted")
    needed = {
        "hundredfold_requests_total",
        "hundredfold_request_seconds_count",
        "hundredfold_forward_seconds_count",
        "hundredfold_tokenization_seconds_count",
        "hundredfold_busy_ratio",
        "hundredfold_queued_seconds",
        *("te_request_count", "te_request_duration_count", "te_queue_size"),
    }

    def all_there() -> bool:
        text = cluster.metrics()
        names = {line.partition("{")[0] for line in text.splitlines() if line[:1] != "#"}
        return needed <= names

    wait_for(all_there, 40)
    text = cluster.metrics()
    assert f'model="{EMBEDDER}"' in text
    assert "SessionName" not in text


def test_nothing_listens_outside_loopback(cluster: Cluster) -> None:
    """Even the port for clients listens on loopback only, which is the default."""
    ports = cluster.ports()
    assert ("127.0.0.1", cluster.port) in ports
    assert {one: name for one, name in ports.items() if one[0] != "127.0.0.1"} == {}


def test_sockets_and_token_are_private(cluster: Cluster) -> None:
    # An old HAProxy that still drains may end during the loop.
    directories = set()
    for one in cluster.named("haproxy"):
        with suppress(psutil.NoSuchProcess):
            directories.add(Path(one.cmdline()[-1]).parent)
    sockets = [path for one in directories for path in one.rglob("*") if path.is_socket()]
    assert len(sockets) >= 3
    for path in (*sockets, Path.home() / ".ray" / "auth_token"):
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping", "/"])
def test_probes_return_json(cluster: Cluster, path: str) -> None:
    reply = httpx.get(cluster.url + path)
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/json"
