from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec

import pytest

from deployments.artifacts.types import Device
from deployments.engines import ENGINES
from deployments.host.machine import read_cpu_info
from deployments.tuning.host import Host, read_engine_versions, read_host
from tests.support.toy_engine import TOY

HOST = Host(device=Device.CPU, name="EPYC", generation="25-17-1", flags=("avx2",), cores=2)


def test_equal_hosts_have_equal_fingerprints() -> None:
    other = Host.model_validate_json(HOST.model_dump_json())
    assert other.fingerprint == HOST.fingerprint
    assert len(HOST.fingerprint) == 12


@pytest.mark.parametrize(
    "change",
    [
        {"device": Device.GPU},
        {"name": "Xeon"},
        {"generation": "25-17-2"},
        {"flags": ("avx2", "avx512_vnni")},
        {"cores": 4},
    ],
)
def test_each_difference_changes_the_fingerprint(change: dict[str, object]) -> None:
    assert HOST.model_copy(update=change).fingerprint != HOST.fingerprint


def test_cpu_host_has_the_name_of_its_processor() -> None:
    host = read_host(Device.CPU)
    assert (host.name, host.flags) == (read_cpu_info().name, read_cpu_info().flags)


@pytest.mark.parametrize(
    ("visible", "name"),
    [
        (None, "NVIDIA H200, 570.86.15"),
        ("1", "NVIDIA A10, 570.86.15"),
        ("GPU-b,GPU-a", "NVIDIA A10, 570.86.15"),
        ("MIG-c", "NVIDIA H200, 570.86.15"),
    ],
)
def test_gpu_host_has_the_name_of_its_own_gpu(
    visible: str | None,
    name: str,
    fake_nvidia_smi: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """nvidia-smi lists all GPUs of a host, but a replica has the one that Ray assigned."""
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    fake_nvidia_smi(
        'case "$1" in *index,uuid*) a="0, GPU-a, "; b="1, GPU-b, ";; esac\n'
        'echo "${a}NVIDIA H200, 570.86.15"; echo "${b}NVIDIA A10, 570.86.15"'
    )
    assert read_host(Device.GPU).name == name
    assert read_host(Device.CPU).name == read_cpu_info().name


def test_failing_driver_is_logged_and_ignored(
    fake_nvidia_smi: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    fake_nvidia_smi("echo 'NVIDIA-SMI has failed'; exit 9")
    assert read_host(Device.GPU).name == read_cpu_info().name
    assert "failed to query" in caplog.text


def test_versions_are_those_of_installed_packages() -> None:
    versions = read_engine_versions(["onnxruntime", "onnxruntime"])
    assert versions == {"onnxruntime": f"onnxruntime {version('onnxruntime')}"}
    assert read_engine_versions([]) == {}


def test_versions_of_every_engine_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "toy", replace(TOY, packages=("numpy",)))
    installed = {
        name
        for name, kind in ENGINES.items()
        if kind.open_encoder is not None and all(map(find_spec, kind.packages))
    }
    versions = read_engine_versions(installed)
    assert versions.keys() == installed
    assert versions["toy"] == f"numpy {version('numpy')}"


def test_versions_of_all_packages_count(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = replace(TOY, distributions=("numpy", "no-such", "pydantic"))
    monkeypatch.setitem(ENGINES, "toy", engine)
    both = f"numpy {version('numpy')}, pydantic {version('pydantic')}"
    assert read_engine_versions(["toy", "unknown"]) == {"toy": both}
