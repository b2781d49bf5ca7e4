"""The variables of Ray that the cluster sets exist in the pinned Ray.

Ray ignores unknown names silently.
"""

import mmap
from importlib.util import find_spec
from pathlib import Path

import pytest

from cluster.environment import RAY_ENVIRONMENT
from cluster.launcher.local_environment import local_environment


def test_replicas_index_gpus_as_nvidia_smi() -> None:
    assert RAY_ENVIRONMENT["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@pytest.mark.parametrize("name", [n for n in RAY_ENVIRONMENT if n.startswith("RAY_SERVE_")])
def test_serve_reads_the_variable(name: str) -> None:
    assert f'"{name}"' in find_file("ray.serve._private.constants").read_text()


@pytest.mark.parametrize("name", [n for n in RAY_ENVIRONMENT if n.removeprefix("RAY_").islower()])
def test_raylet_reads_the_variable(name: str) -> None:
    assert is_in_raylet(name)


@pytest.mark.parametrize("name", ["RAY_ROTATION_MAX_BYTES", "RAY_ROTATION_BACKUP_COUNT"])
def test_sizes_of_logs_are_limited_by_variables_that_ray_reads(name: str) -> None:
    assert f'"{name}"' in find_file("ray._private.node").read_text()
    assert is_in_raylet(name)
    assert int(RAY_ENVIRONMENT["RAY_ROTATION_MAX_BYTES"]) <= 64 << 20
    assert int(RAY_ENVIRONMENT["RAY_ROTATION_BACKUP_COUNT"]) >= 1


def test_dashboard_reads_the_variable() -> None:
    name = "REPORTER_UPDATE_INTERVAL_MS"
    assert name in local_environment()
    reader = find_file("ray.dashboard.modules.reporter.reporter_consts")
    assert f'"{name}"' in reader.read_text()


def is_in_raylet(text: str) -> bool:
    raylet = find_file("ray").parent / "core" / "src" / "ray" / "raylet" / "raylet"
    with raylet.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as program:
        return program.find(text.encode() + b"\0") >= 0


def find_file(module: str) -> Path:
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin)
