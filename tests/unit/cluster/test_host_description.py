"""Facts of a host that need a store."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from cluster import host_description
from cluster.host_description import read_host_description
from deployments.artifacts.manifest import EngineOptions
from deployments.artifacts.types import Device
from deployments.host.gpus import Gpu
from tests.support.artifacts import seal_tiny_version, tiny_manifest
from tests.support.checked_configs import APP, create_config

KV_CACHE_BYTES = 5 << 30


def seal_offloaded(store: Path, model_id: str) -> None:
    """Seal a version whose candidate for GPUs has its KV cache in main memory."""
    candidates = [
        candidate.model_copy(
            update={"engine": "transformers", "options": EngineOptions(kv_offload=True)}
        )
        if candidate.device is Device.GPU
        else candidate
        for candidate in tiny_manifest(model_id).candidates
    ]
    seal_tiny_version(store, model_id, "000000000001", candidates=tuple(candidates))


def test_kv_caches_in_main_memory_count_where_there_is_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {f"{APP}.args.generators.gpu.kv_cache_bytes": KV_CACHE_BYTES}
    config, store = tmp_path / "config.yaml", tmp_path / "store"
    config.write_text(yaml.safe_dump(create_config(changes)))
    seal_tiny_version(store, "acme/encoder", "000000000001")

    def read_maximum() -> int:
        needed = read_host_description(config, store).needed
        assert needed is not None
        return needed.maximum

    card = Gpu(name="NVIDIA H200", driver="580.159.03", compute_capability=(9, 0))
    for gpus, caches in (((card,), 1), ((), 0)):
        monkeypatch.setattr(host_description, "find_visible", lambda _, gpus=gpus: gpus)
        former = read_maximum()
        seal_offloaded(store, "acme/long")
        assert read_host_description(config, store).store.offloaded_models == 1
        assert read_maximum() == former + caches * KV_CACHE_BYTES
        seal_tiny_version(store, "acme/long", "000000000002")  # the latest version counts
