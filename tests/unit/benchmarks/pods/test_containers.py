"""Containers of the pods of the rendered RayService. No container is started."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.report import REPOSITORY
from benchmarks.pods.containers import (
    PodNetwork,
    build_arguments,
    build_ray_command,
    find_engine,
    read_ray_cluster,
    run_engine,
)

MANIFEST = REPOSITORY / "cluster" / "kuberay" / "rayservice.yaml"
NETWORK = PodNetwork(
    name="net", subnet="10.1.2", image="image:1", store=Path("/models"), token="secret"
)


@pytest.fixture(scope="module")
def groups() -> dict[str, Any]:
    return read_ray_cluster(MANIFEST)[0]


def test_ray_starts_as_the_operator_starts_it(groups: dict[str, Any]) -> None:
    head = build_ray_command(groups["headGroupSpec"], None).split()
    assert head[:4] == ["ray", "start", "--head", "--no-monitor"]
    assert {"--block", "--num-cpus=0", "--dashboard-host=0.0.0.0"} <= set(head)
    worker = build_ray_command(groups["workerGroupSpecs"][0], "10.1.2.2").split()
    assert worker[2] == "--address=10.1.2.2:6379"
    assert {"--num-cpus=4", f"--memory={8 << 30}", "--labels=hundredfold/pool=cpu"} <= set(worker)


def test_container_has_the_restrictions_and_variables_of_the_pod(groups: dict[str, Any]) -> None:
    group = groups["workerGroupSpecs"][0]
    arguments = build_arguments("worker-1", 11, group, NETWORK, {8701: 8000})
    text = " ".join(arguments)
    assert "--ip 10.1.2.11" in text
    assert "--user 1000:1000 --cap-drop all" in text
    assert "--memory 8g" in text
    assert "--publish=127.0.0.1:8701:8000" in text
    assert "--volume /models:/artifacts:ro" in text
    assert "--env=RAY_AUTH_MODE=token" in arguments
    assert "--env=RAY_AUTH_TOKEN=secret" in arguments
    assert "--env=RAY_ADDRESS=10.1.2.2:6379" in arguments
    container = group["template"]["spec"]["containers"][0]
    command = [*container["command"], *container["args"]]
    start = arguments.index("--entrypoint")
    assert arguments[start:] == ["--entrypoint", command[0], "image:1", *command[1:]]


def test_config_of_serve_is_that_of_the_manifest() -> None:
    _, config = read_ray_cluster(MANIFEST)
    assert [application["name"] for application in config["applications"]] == ["hundredfold"]


@pytest.mark.parametrize("text", [None, "", "{", "kind: ConfigMap\nspec: {}\n"])
def test_manifest_without_a_service_is_named(text: str | None, tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.yaml"
    if text is not None:
        manifest.write_text(text)
    with pytest.raises(BenchmarkError, match="has no RayService"):
        read_ray_cluster(manifest)


def test_failed_engine_is_named_with_its_error() -> None:
    with pytest.raises(BenchmarkError, match=r"-c` failed: .*no such container"):
        run_engine(sys.executable, ("-c", "raise SystemExit('no such container')"))
    assert run_engine(sys.executable, ("-c", "raise SystemExit(1)"), check=False) == ""


def test_missing_engine_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BenchmarkError, match="neither podman nor docker is installed"):
        find_engine(None)
    podman = tmp_path / "podman"
    podman.touch(mode=0o755)
    assert find_engine(None) == str(podman)
