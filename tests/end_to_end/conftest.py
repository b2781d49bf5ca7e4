"""One cluster for all end-to-end tests: the demo models, one of them damaged on purpose."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.config import default_store
from deployments.store import LATEST_NAME, model_directory
from tests.end_to_end.cluster import REPOSITORY, Cluster

EMBEDDER = "sentence-transformers/all-MiniLM-L6-v2"
CLASSIFIER = "hundredfold/minilm-sst2"
DAMAGED = "hundredfold/damaged"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.ray)
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo models, built once per machine, and a copy of one with a byte changed."""
    subprocess.run([sys.executable, "-m", "build_artifacts", "demo"], cwd=REPOSITORY, check=True)
    store = tmp_path_factory.mktemp("store")
    for model_id in (EMBEDDER, CLASSIFIER):
        source = model_directory(default_store(), model_id)
        target = model_directory(store, model_id)
        shutil.copytree(source, target, copy_function=link_or_copy)
    damage_a_copy(model_directory(store, CLASSIFIER), model_directory(store, DAMAGED))
    return store


def link_or_copy(source: str, target: str) -> None:
    """Hard links where the file system allows them: artifacts are never written to."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def damage_a_copy(source: Path, target: Path) -> None:
    """Copy a model and change one byte of its tokenizer."""
    shutil.copytree(source, target)
    version = (target / LATEST_NAME).read_text().strip()
    tokenizer = target / version / "tokenizer.json"
    content = bytearray(tokenizer.read_bytes())
    content[-3] ^= 1
    tokenizer.write_bytes(content)


def quick_config() -> dict[str, Any]:
    """serve_config.yaml, quick to scale, with the GPU lane's graph on the CPU provider.

    Nothing is tuned beside the tests, which have two cores to share.
    """
    config: dict[str, Any] = yaml.safe_load((REPOSITORY / "serve_config.yaml").read_text())
    application = config["applications"][0]
    application["args"]["models"].append({"id": DAMAGED, "version": LATEST_NAME})
    application["args"]["lanes"]["gpu"]["providers"] = ["CPUExecutionProvider"]
    for lane in application["args"]["lanes"].values():
        lane["tune"] = "off"
    deployments = {d["name"]: d for d in application["deployments"]}
    deployments["Ingress"]["user_config"]["loading_wait_s"] = 0.5
    deployments["CpuLane"]["autoscaling_config"] |= {
        "target_ongoing_requests": 1,
        "metrics_interval_s": 0.2,
        "look_back_period_s": 1,
        "upscale_delay_s": 0,
        "downscale_delay_s": 3,
    }
    return config


@pytest.fixture(scope="session")
def config() -> dict[str, Any]:
    return quick_config()


@pytest.fixture(scope="session")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any], store: Path
) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), config, store)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()
