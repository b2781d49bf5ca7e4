"""The variables of Ray that the cluster sets exist in the pinned Ray.

Ray ignores unknown names silently.
"""

import mmap
from importlib.util import find_spec
from pathlib import Path

import pytest

from cluster.environment import RAY_ENVIRONMENT
from cluster.launcher.local_environment import local_environment

# Modules of Ray that read a variable of the dashboard.
DASHBOARD_VARIABLES = {
    "METRICS_RECORD_INTERVAL_S": "ray.dashboard.consts",
    "REPORTER_UPDATE_INTERVAL_MS": "ray.dashboard.modules.reporter.reporter_consts",
}


def test_replicas_index_gpus_as_nvidia_smi() -> None:
    assert RAY_ENVIRONMENT["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@pytest.mark.parametrize("name", [n for n in RAY_ENVIRONMENT if n.startswith("RAY_SERVE_")])
def test_serve_reads_the_variable(name: str) -> None:
    assert f'"{name}"' in find_file("ray.serve._private.constants").read_text()


@pytest.mark.parametrize("name", [n for n in RAY_ENVIRONMENT if n.removeprefix("RAY_").islower()])
def test_raylet_reads_the_variable(name: str) -> None:
    raylet = find_file("ray").parent / "core" / "src" / "ray" / "raylet" / "raylet"
    with raylet.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as program:
        assert program.find(name.encode() + b"\0") >= 0


@pytest.mark.parametrize(("name", "module"), DASHBOARD_VARIABLES.items())
def test_dashboard_reads_the_variable(name: str, module: str) -> None:
    assert name in local_environment()
    assert f'"{name}"' in find_file(module).read_text()


def find_file(module: str) -> Path:
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin)
