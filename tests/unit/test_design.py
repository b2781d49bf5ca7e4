"""The design's own rules, checked on the source: who imports whom, how large files are."""

from __future__ import annotations

import ast
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path, PurePosixPath

import pytest

import deployments

ROOT = Path(__file__).parents[2]
PACKAGES = ("deployments", "build_artifacts", "cluster", "benchmarks", "hundredfold")
MAX_LINES = 400

# Imports point one way: compiler and cluster use the server; benchmarks and commands use all.
ALLOWED = {
    "deployments": {"deployments"},
    "build_artifacts": {"build_artifacts", "deployments"},
    "cluster": {"cluster", "deployments"},
    "benchmarks": {"benchmarks", "build_artifacts", "cluster", "deployments"},
    "hundredfold": {"hundredfold", "deployments"},
}
# Inside the server: what computes knows nothing of replicas, wires and HTTP.
INNER = ("artifacts", "tasks", "tokenization", "batching", "engines", "tuning")
OUTER = ("replicas", "transports", "ingress", "app")
# The only files of the server that know Ray.
KNOW_RAY = {
    "deployments/app.py",
    "deployments/metrics.py",
    "deployments/transports/serve.py",
    "deployments/transports/channel/hooks.py",
    "deployments/transports/channel/router.py",
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


def import_graph() -> dict[str, set[str]]:
    """Map each source file to the source files that it imports."""
    modules = {
        named(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): named(path)
        for path in OUR_FILES
    }
    graph: dict[str, set[str]] = {}
    for path in OUR_FILES:
        targets: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    module = f"{node.module}.{alias.name}"
                    targets.add(modules.get(module) or modules.get(node.module or "") or "")
            elif isinstance(node, ast.Import):
                targets.update(modules.get(alias.name, "") for alias in node.names)
        graph[named(path)] = targets - {"", named(path)}
    return graph


def grouped_by_child(graph: dict[str, set[str]], folder: str) -> dict[str, set[str]]:
    """The imports between the direct children, files and folders, of `folder`."""

    def child(path: str) -> str:
        return path.removeprefix(folder).partition("/")[0]

    children: dict[str, set[str]] = {}
    for path, targets in graph.items():
        if path.startswith(folder) and child(path) != "__init__.py":
            inside = {child(t) for t in targets if t.startswith(folder)}
            children.setdefault(child(path), set()).update(inside - {child(path), "__init__.py"})
    return children


def test_no_cycle_between_files() -> None:
    TopologicalSorter(import_graph()).prepare()


def test_no_cycle_between_folders() -> None:
    graph = import_graph()
    folders = {f"{parent}/" for path in graph for parent in PurePosixPath(path).parents}
    for folder in sorted(folders - {"./"}):
        TopologicalSorter(grouped_by_child(graph, folder)).prepare()


DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_documents_name_existing_files(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    links = {
        link.partition("#")[0].replace("\\", "")
        for link in re.findall(r"\]\(([^)\s]+)\)", text)
        if not link.startswith(("http", "#"))
    }
    missing = {link for link in links if not (path.parent / link).exists()}
    packages = "|".join((*PACKAGES[:-1], "tests", "docs"))
    for name in re.findall(rf"`((?:{packages})/[\w/.-]+)`", text):
        if "NAME" not in name and not (ROOT / name).exists():
            missing.add(name)
    assert not missing


# Words of an earlier vocabulary, replaced by the field's terms.
RETIRED = re.compile(
    r"\b(lanes?|gatekeeper|judgements?|verdicts?|contenders?|journey|rotations|"
    r"(?<!in-)company|teller|heat|mended|mending)\b",
    re.IGNORECASE,
)
# Input texts of models. They are data and keep their words.
MODEL_TEXTS = re.compile(r"one lane, hung|heat two tablespoons|minister company market")


@pytest.mark.parametrize("path", [*OUR_FILES, *DOCUMENTS], ids=named)
def test_retired_words_are_gone(path: Path) -> None:
    if path.name == "CHANGELOG.md":
        return
    text = MODEL_TEXTS.sub("", path.read_text(encoding="utf-8")).replace("_", " ")
    found = RETIRED.findall(text)
    assert not found


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
