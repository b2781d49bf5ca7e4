from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from cluster.gpu_support import assess_gpus
from cluster.installation import (
    CPU_PACKAGES,
    GPU_PACKAGES,
    REPAIR,
    is_editable,
    main,
    plan_install,
)
from cluster.launcher import server
from cluster.launcher.command import add_arguments
from cluster.launcher.local_ports import LocalPorts
from cluster.launcher.ray_host import build_ray_command
from cluster.progress import StartupProgress
from deployments.host.gpus import Gpu, find_visible

ROOT = Path(__file__).parents[3]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
H200 = Gpu(name="H200", driver="580.159.03", compute_capability=(9, 0))
P400 = Gpu(name="Quadro P400", driver="580.159.03", compute_capability=(6, 1))
OLD = Gpu(name="V100", driver="535.54.03", compute_capability=(7, 0))


@pytest.fixture(autouse=True)
def no_hidden_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("gpus", "allow_gpu", "purpose", "extras"),
    [
        ((), True, "serve", "cpu,build"),
        ((H200,), True, "serve", "gpu-build"),
        ((H200,), False, "serve", "cpu,build"),
        ((OLD,), True, "serve", "cpu,build"),
        ((), True, "dev", "dev"),
        ((H200, H200), True, "dev", "gpu-dev"),
    ],
)
def test_machine_decides_the_extras(
    gpus: tuple[Gpu, ...], allow_gpu: bool, purpose: str, extras: str
) -> None:
    plan = plan_install(gpus, (), purpose=purpose, allow_gpu=allow_gpu)
    assert plan.extras == extras
    (command,) = plan.commands("python")
    assert command[-2:] == ["-e", f".[{extras}]"]


def test_hidden_gpu_is_not_installed_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    plan = plan_install((H200,), (), purpose="serve")
    assert plan.extras == "cpu,build"
    assert "CUDA_VISIBLE_DEVICES" in plan.reason


def test_first_visible_gpu_decides_the_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = (P400, H200)
    assert plan_install(gpus, (), purpose="serve").extras == "cpu,build"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    plan = plan_install(gpus, (), purpose="serve")
    assert plan.extras == "gpu-build"
    assert "H200" in plan.reason


@pytest.mark.parametrize(
    ("gpus", "visible", "usable", "indices"),
    [
        ((P400, H200), "0,1", 0, "1"),
        ((P400, H200), "1", 1, None),
        ((P400, H200), "1,0", 1, "1"),
        ((P400, H200), "0", 0, "1"),
        ((H200, P400), "0,1", 1, "0"),
        ((H200, P400, H200), "0,1,2", 1, "0,2"),
        ((H200, H200), "0,1", 2, None),
        ((P400, P400), "0,1", 0, None),
    ],
)
def test_ray_gets_only_gpus_that_run_cuda(
    gpus: tuple[Gpu, ...], visible: str, usable: int, indices: str | None
) -> None:
    shown = find_visible(gpus, {"CUDA_VISIBLE_DEVICES": visible})
    support = assess_gpus(gpus, {"onnxruntime-gpu": "1"}, shown)
    assert support.usable == usable
    advice = f"set `CUDA_VISIBLE_DEVICES={indices}`, because CUDA 13 does not run on Quadro P400"
    assert (advice in support.repair) == (indices is not None)


def test_gpus_of_two_kinds_are_both_described() -> None:
    support = assess_gpus((H200, P400, H200), {"onnxruntime-gpu": "1"}, (H200, P400, H200))
    assert support.describe() == (
        "2 x H200, compute capability 9.0 and Quadro P400, compute capability 6.1, "
        "driver 580.159.03: for onnxruntime-gpu"
    )


def test_other_family_is_removed_first() -> None:
    plan = plan_install((H200,), {"numpy", *CPU_PACKAGES}, purpose="serve")
    assert (plan.remove, plan.reinstall) == (CPU_PACKAGES, ())
    remove, install = plan.commands("python")
    assert remove[-3:] == ["--yes", *CPU_PACKAGES]
    assert "install" in install


def test_families_that_met_are_separated_and_written_again() -> None:
    installed = {"onnxruntime", "onnxruntime-gpu"}
    plan = plan_install((H200,), installed, purpose="serve")
    assert (plan.remove, plan.reinstall) == (("onnxruntime",), ("onnxruntime-gpu",))
    _, again, _ = plan.commands("python")
    assert again[-3:] == ["--force-reinstall", "--no-deps", "onnxruntime-gpu"]
    back = plan_install((), installed, purpose="serve")
    assert (back.remove, back.reinstall) == (("onnxruntime-gpu",), ("onnxruntime",))


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ('{"url": "file:///checkout", "dir_info": {"editable": true}}', True),
        ('{"url": "file:///checkout", "dir_info": {}}', False),
        (None, False),
    ],
    ids=["checkout", "copy of a checkout", "package of an index"],
)
def test_environment_of_a_service_keeps_its_copy(
    tmp_path: Path, origin: str | None, expected: bool
) -> None:
    record = tmp_path / "hundredfold-0.1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Name: hundredfold\nVersion: 0.1.0\n")
    if origin is not None:
        (record / "direct_url.json").write_text(origin)
    assert is_editable([metadata.Distribution.at(record)]) is expected
    assert is_editable([]), "an empty environment becomes that of the checkout"
    plan = plan_install((H200,), (), purpose="serve", is_editable=expected)
    (command,) = plan.commands("python")
    assert command[-1] == ".[gpu-build]"
    assert ("-e" in command) is expected


def test_packages_without_metadata_are_no_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """pip leaves such a folder if it is killed."""
    (tmp_path / "torn-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["serve", "--dry-run"]) == 0
    assert "pip" in capsys.readouterr().out


def packages_of(extra: str) -> set[str]:
    """Return the packages that an extra installs, including those of extras that it refers to."""
    names: set[str] = set()
    for requirement in EXTRAS[extra]:
        name, inner = re.match(r"([A-Za-z0-9_.-]+)(?:\[(.*?)\])?", requirement).groups()
        if name == "hundredfold":
            names |= set().union(*map(packages_of, inner.split(",")))
        else:
            names.add(name)
    return names


@pytest.mark.parametrize("extra", EXTRAS)
def test_no_extra_brings_both_families(extra: str) -> None:
    packages = packages_of(extra)
    assert not (packages & set(CPU_PACKAGES) and packages & set(GPU_PACKAGES))


@pytest.mark.parametrize(("cpu", "gpu"), [({"cpu", "build"}, "gpu-build"), ({"dev"}, "gpu-dev")])
def test_both_plans_install_the_same_but_the_family(cpu: set[str], gpu: str) -> None:
    on_cpu, on_gpu = set().union(*map(packages_of, cpu)), packages_of(gpu)
    assert set(CPU_PACKAGES) <= on_cpu
    assert set(GPU_PACKAGES) <= on_gpu
    assert on_cpu - set(CPU_PACKAGES) == on_gpu - set(GPU_PACKAGES)


def test_runs_before_anything_is_installed() -> None:
    command = [sys.executable, "-S", "-m", "cluster.installation", "serve", "--dry-run"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "pip" in done.stdout


@pytest.mark.parametrize(
    ("packages", "engines", "usable"),
    [
        ({"onnxruntime-gpu": "1.31.1"}, ("onnxruntime-gpu",), 1),
        (
            {"onnxruntime-gpu": "1", "torch": "2", "transformers": "5"},
            ("onnxruntime-gpu", "torch"),
            1,
        ),
        # The torch of PyPI is built for CUDA, although its version has no suffix for CUDA.
        ({"onnxruntime": "1", "torch": "2.13.0", "transformers": "5"}, ("torch",), 0),
        ({"onnxruntime": "1", "torch": "2.13.0+cpu", "transformers": "5"}, (), 0),
        ({"onnxruntime": "1", "onnxruntime-gpu": "1"}, ("onnxruntime-gpu",), 0),
        ({}, (), 0),
    ],
)
def test_ray_gets_a_gpu_only_if_onnx_runtime_can_use_it(
    packages: dict[str, str], engines: tuple[str, ...], usable: int
) -> None:
    support = assess_gpus((H200,), packages, (H200,))
    assert (support.engines, support.usable) == (engines, usable)
    assert (support.problem is None) == bool(usable)
    assert support.repair == ("" if usable else REPAIR)
    assert "H200" in support.describe()


class Lines(StartupProgress):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def report(self, text: str) -> None:
        self.lines.append(text)


def test_serve_tells_ray_the_usable_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = Lines()
    support = assess_gpus((H200,), {"onnxruntime-gpu": "1.31.1"}, (H200,))
    monkeypatch.setattr(server, "read_gpu_support", lambda: support)
    assert server.count_gpus(None, progress) == 1
    assert progress.lines == [
        "H200, compute capability 9.0, driver 580.159.03: for onnxruntime-gpu"
    ]
    assert server.count_gpus(0, progress) == 0
    monkeypatch.setattr(server, "read_gpu_support", lambda: assess_gpus((), {}, ()))
    assert server.count_gpus(None, progress) == 0
    assert len(progress.lines) == 1
    for_cuda = assess_gpus((), {"onnxruntime-gpu": "1.31.1"}, ())
    monkeypatch.setattr(server, "read_gpu_support", lambda: for_cuda)
    assert server.count_gpus(None, progress) == 0
    assert progress.lines[1].startswith("no GPU, although `onnxruntime-gpu` is installed; run `")
    command = build_ray_command(LocalPorts(*range(8)), 1)
    assert command[-1] == "--num-gpus=1"


def test_no_gpu_is_zero_gpus() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert parser.parse_args(["--no-gpu"]).num_gpus == 0
    assert parser.parse_args([]).num_gpus is None
