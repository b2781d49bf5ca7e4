"""The design's own rules, checked on the source: who imports whom, how large files are."""

from __future__ import annotations

import ast
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import deployments

ROOT = Path(__file__).parents[2]
PACKAGES = ("deployments", "build_artifacts", "cluster")
MAX_LINES = 400

# Arrows point down: the build and the cluster know the server, never the other way.
ALLOWED = {
    "deployments": {"deployments"},
    "build_artifacts": {"build_artifacts", "deployments"},
    "cluster": {"cluster", "deployments"},
}
# Inside the server: what computes knows nothing of replicas, wires and HTTP.
INNER = ("artifacts", "tasks", "tokenization", "batching", "engines", "tuning")
OUTER = ("replicas", "transports", "ingress", "app")
# The only files of the server that know Ray.
KNOW_RAY = {
    "deployments/app.py",
    "deployments/metrics.py",
    "deployments/transports/serve.py",
    "deployments/ingress/routing.py",
    "deployments/ingress/cluster_state.py",
    "deployments/ingress/apis/operations/metrics_text.py",
}
# What a build needs and a server must not load: seconds of start and hundreds of megabytes.
BUILD_ONLY = {"torch", "transformers", "onnx", "peft", "safetensors", "huggingface_hub"}


def source_files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Every module a file names in an import, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


OUR_FILES = [path for package in PACKAGES for path in source_files(package)]


@pytest.mark.parametrize("path", OUR_FILES, ids=named)
def test_imports_point_down(path: Path) -> None:
    ours = {module.partition(".")[0] for module in imports(path)} & {
        *PACKAGES,
        "tests",
        "benchmarks",
    }
    assert ours <= ALLOWED[path.relative_to(ROOT).parts[0]], "it reaches up or sideways"


@pytest.mark.parametrize("layer", INNER)
def test_compute_layers_do_not_import_transport(layer: str) -> None:
    carriers = tuple(f"deployments.{name}" for name in OUTER)
    for path in source_files(f"deployments/{layer}"):
        assert not [m for m in imports(path) if m.startswith(carriers)], named(path)


def test_ray_is_known_in_few_named_places() -> None:
    knowing = {
        named(path)
        for path in source_files("deployments")
        if any(module.partition(".")[0] == "ray" for module in imports(path))
    }
    assert knowing == KNOW_RAY


@pytest.mark.parametrize("path", OUR_FILES, ids=named)
def test_file_length_limit(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES, f"{lines} lines, at most {MAX_LINES}"


def loaded_by(*modules: str) -> set[str]:
    """Top-level modules that a fresh interpreter has after importing `modules`."""
    code = f"import sys, {', '.join(modules)}; print(*{{m.partition('.')[0] for m in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_the_serving_path_loads_nothing_of_the_build() -> None:
    walked = pkgutil.walk_packages(deployments.__path__, "deployments.")
    everything = [module.name for module in walked]
    assert "deployments.engines.onnx" in everything
    loaded = loaded_by(*everything)
    assert {"deployments", "onnxruntime", "tokenizers", "ray"} <= loaded
    assert not loaded & BUILD_ONLY


@pytest.mark.parametrize(
    "module",
    ["deployments.tasks", "deployments.artifacts.manifest", "deployments.batching.scheduler"],
)
def test_what_a_build_shares_with_the_server_needs_neither_ray_nor_an_engine(module: str) -> None:
    assert not loaded_by(module) & {"ray", "onnxruntime", "starlette", *BUILD_ONLY}


def test_the_changelog_knows_the_released_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", changelog, flags=re.MULTILINE)
    assert released, "no `## [x.y.z]` heading"
    assert released[0] == project["version"]
