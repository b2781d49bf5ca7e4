"""One cluster for all end-to-end tests, with a model for every task."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.artifacts.store import LATEST_NAME
from deployments.tuning.costs import TuningTarget
from tests.support.artifacts import EMBEDDER
from tests.support.model_hub import ModelHub, serve_hub
from tests.support.ray_cluster import REPOSITORY, Cluster
from tests.support.served_models import DAMAGED, LONG_CONTEXT, SOUND, fill
from tests.support.tuning_artifacts import seal_tunable

TIMEOUT_S = 1_200  # of a test, in seconds
BUILD_TIMEOUT_S = 3_600  # of the first test with `store`, which builds models for minutes
KV_SLOTS = 4  # sequences that a generator generates at a time


@pytest.hookimpl(trylast=True)  # after the deselection of items
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    own = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in own:
        item.add_marker(pytest.mark.ray)
        item.add_marker(pytest.mark.slow)
        item.add_marker(pytest.mark.timeout(TIMEOUT_S))
    # Tests with a store of their own come first. `make test` builds the other models meanwhile.
    own.sort(key=needs_store)
    for first in list(filter(needs_store, own))[:1]:
        first.add_marker(pytest.mark.timeout(BUILD_TIMEOUT_S), append=False)
    others = [item for item in items if item not in own]
    items[:] = [*others, *own]


def needs_store(item: pytest.Item) -> bool:
    return "store" in getattr(item, "fixturenames", ())


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with all models of the end-to-end tests."""
    store = tmp_path_factory.mktemp("store")
    fill(store)
    return store


def quick_config() -> dict[str, Any]:
    """Return serve_config.yaml with fast scaling and without tuning.

    The graphs for GPUs run on the CPU provider. Tuning would occupy the two cores of the tests.
    """
    config: dict[str, Any] = yaml.safe_load((REPOSITORY / "serve_config.yaml").read_text())
    application = config["applications"][0]
    application["args"]["models"] = [
        {"id": model_id, "version": LATEST_NAME} for model_id in (*SOUND, DAMAGED)
    ]
    args = application["args"]
    for encoder in args["encoders"].values():
        encoder |= {"tune": "off", "providers": ["CPUExecutionProvider"]}
    for generator in args["generators"].values():
        generator |= {
            "kv_slots": KV_SLOTS,
            "max_context_tokens": LONG_CONTEXT,
            "intra_op_threads": 1,
        }
        generator["providers"] = ["CPUExecutionProvider"]
    deployments = {d["name"]: d for d in application["deployments"]}
    for deployment in deployments.values():
        deployment["health_check_period_s"] = 1  # detects a dead replica within 1 s
        deployment["graceful_shutdown_wait_loop_s"] = 0.5  # minimum wait before a replica stops
    # Slow hosts take longer than the default, 30 s, to start a replica for which a request waits.
    deployments["Ingress"]["user_config"] |= {"timeout_s": 90, "cold_start_wait_s": 0.5}
    autoscaling = deployments["CpuEncoder"]["autoscaling_config"]
    autoscaling |= {
        "max_replicas": 2,
        "metrics_interval_s": 0.2,
        "look_back_period_s": 1,
        "upscale_delay_s": 0,
        "downscale_delay_s": 3,
    }
    autoscaling["policy"]["policy_kwargs"]["cores_per_replica"] = 1  # allows two replicas
    return config


def encoder_config(config: dict[str, Any], models: list[dict[str, str]]) -> dict[str, Any]:
    """Copy the config with these models and without generators, which also need time to start."""
    copied = copy.deepcopy(config)
    application = copied["applications"][0]
    application["args"] |= {"models": models, "generators": {}}
    application["deployments"] = [
        each for each in application["deployments"] if "Generator" not in each["name"]
    ]
    return copied


@pytest.fixture(scope="session")
def config() -> dict[str, Any]:
    return quick_config()


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelHub]:
    """The hub from which the cluster builds models. Tests write models to its directory."""
    with serve_hub(tmp_path_factory.mktemp("hub")) as hub:
        yield hub


@pytest.fixture(scope="session")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any], store: Path, hub: ModelHub
) -> Iterator[Cluster]:
    cache = tmp_path_factory.mktemp("hub-cache")
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(cache)}
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), config, store, environment)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()


@pytest.fixture(scope="session")
def placement(tmp_path_factory: pytest.TempPathFactory) -> TuningTarget:
    """A tiny model whose default candidate is slow; its candidate `int8` is fast."""
    return seal_tunable(tmp_path_factory.mktemp("tuned") / "store", names=["slow", "int8"])


@pytest.fixture(scope="session")
def tuning_cluster(
    tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any], placement: TuningTarget
) -> Iterator[Cluster]:
    """A cluster with one tiny model, whose processes tests may kill.

    The first test that uses the cluster starts it. The cluster tunes the model in the background.
    It listens on all network interfaces, without API keys, so that a test can check which ports
    other hosts reach.
    """
    tuning = encoder_config(config, [{"id": EMBEDDER, "version": LATEST_NAME}])
    tuning["http_options"]["host"] = "0.0.0.0"
    ingress = next(d for d in tuning["applications"][0]["deployments"] if d["name"] == "Ingress")
    ingress["user_config"]["no_auth"] = True
    arguments = tuning["applications"][0]["args"]
    arguments["encoders"]["cpu"] |= {"tune": "background", "tune_seconds": 1}
    store = placement.artifact.parents[1]
    cluster = Cluster(tmp_path_factory.mktemp("own"), tuning, store)
    yield cluster
    cluster.end()


@pytest.fixture
def own_cluster(tuning_cluster: Cluster) -> Cluster:
    """Start `tuning_cluster` if it does not run, and return it."""
    if not tuning_cluster.is_running:
        tuning_cluster.start()
    return tuning_cluster
