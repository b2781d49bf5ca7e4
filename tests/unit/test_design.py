"""Rules of the design, checked on the source: imports, file sizes, names and vocabulary."""

from __future__ import annotations

import ast
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path, PurePosixPath

import pytest

import deployments

ROOT = Path(__file__).parents[2]
PACKAGES = ("deployments", "build_artifacts", "cluster", "benchmarks", "hundredfold")
MAX_LINES = 400

# Packages that a package may import. `build_artifacts` and `cluster` import the server
# (`deployments`). `benchmarks` imports all others, also `hundredfold`, to list the commands.
# `hundredfold` loads the commands of other packages by module name, without import statements.
ALLOWED = {
    "deployments": {"deployments"},
    "build_artifacts": {"build_artifacts", "deployments"},
    "cluster": {"cluster", "deployments"},
    "benchmarks": {"benchmarks", "build_artifacts", "cluster", "deployments", "hundredfold"},
    "hundredfold": {"hundredfold", "deployments"},
}
# Inside the server, packages that compute (INNER) import no replicas, transports or HTTP (OUTER).
INNER = ("artifacts", "tasks", "tokenization", "batching", "engines", "tuning")
OUTER = ("replicas", "transports", "ingress", "app")
# The only files of the server that import Ray.
KNOW_RAY = {
    "deployments/app.py",
    "deployments/autoscaling.py",
    "deployments/metrics.py",
    "deployments/transports/serve.py",
    "deployments/transports/channel/replica_channel.py",
    "deployments/transports/channel/router.py",
    "deployments/ingress/batch_slots.py",
    "deployments/ingress/devices/cluster_state.py",
    "deployments/ingress/apis/operations/metrics_text.py",
}
# The only imports between folders of APIs. text2text-generation extends the parameters and
# responses of text-generation, and the paths of the Hugging Face API serve both tasks. Other chat
# dialects translate their bodies into those of OpenAI's chat, which the tokenizer also reads. The
# model lists take the forms of OpenAI and Anthropic.
APIS_THAT_IMPORT_APIS = {
    "anthropic": {"openai"},
    "huggingface": {"text2text", "text_generation"},
    "model_lists": {"anthropic", "openai"},
    "openai_responses": {"openai"},
    "text2text": {"text_generation"},
    "tokenizer": {"openai"},
}
# Packages for builds. A server must not load them: they cost seconds and hundreds of megabytes.
BUILD_ONLY = {"torch", "transformers", "onnx", "peft", "safetensors", "huggingface_hub"}


def source_files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@cache
def import_statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Return all import statements of a file, also those inside functions."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


def imports(path: Path) -> Iterator[str]:
    """Yield the name of every module that a file imports."""
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


OUR_FILES = [path for package in PACKAGES for path in source_files(package)]


def test_imports_point_down() -> None:
    """Packages import only the packages in ALLOWED, and never the tests."""
    wrong = {}
    for path in OUR_FILES:
        ours = {module.partition(".")[0] for module in imports(path)} & {*PACKAGES, "tests"}
        wrong[named(path)] = ours - ALLOWED[path.relative_to(ROOT).parts[0]]
    assert {name: modules for name, modules in wrong.items() if modules} == {}


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


def test_file_length_limit() -> None:
    files = (*OUR_FILES, *source_files("tests"))
    lines = {named(path): path.read_text(encoding="utf-8").count("\n") for path in files}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


CODEC = "deployments/transports/channel/codec.py"


def defined_types(path: Path) -> Iterator[str]:
    """Yield the names of all classes and of the module-level type aliases of a file."""
    module = ast.parse(path.read_text(encoding="utf-8"))
    yield from (node.name for node in ast.walk(module) if isinstance(node, ast.ClassDef))
    for node in module.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                if re.fullmatch(r"_?[A-Z]\w*[a-z]\w*", name):
                    yield name


def test_no_class_name_has_two_meanings() -> None:
    """Names of classes and aliases are unique, including private names and those of tests."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in (*OUR_FILES, *source_files("tests")):
        for name in defined_types(path):
            # In the codec, `_Name` is the wire form of the message `Name`.
            public = name if named(path) == CODEC else name.removeprefix("_")
            places[public].append(named(path))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def import_graph() -> dict[str, set[str]]:
    """Map each source file to the source files that it imports."""
    modules = {
        named(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): named(path)
        for path in OUR_FILES
    }
    graph: dict[str, set[str]] = {}
    for path in OUR_FILES:
        targets: set[str] = set()
        for node in import_statements(path):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    module = f"{node.module}.{alias.name}"
                    targets.add(modules.get(module) or modules.get(node.module or "") or "")
            else:
                targets.update(modules.get(alias.name, "") for alias in node.names)
        graph[named(path)] = targets - {"", named(path)}
    return graph


def grouped_by_child(graph: dict[str, set[str]], folder: str) -> dict[str, set[str]]:
    """Map each direct child (file or folder) of `folder` to the children that it imports."""

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


def test_apis_import_only_what_is_shared() -> None:
    """What several APIs need is in `apis/shared`, which imports no API."""
    apis = ROOT / "deployments/ingress/apis"
    folders = {path.parent.name for path in apis.glob("*/__init__.py")}
    imported = grouped_by_child(import_graph(), f"{named(apis)}/")
    found = {name: (imported[name] & folders) - {"shared"} for name in folders & imported.keys()}
    assert {name: others for name, others in found.items() if others} == APIS_THAT_IMPORT_APIS


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


# Earlier words that standard terms have replaced, and pronouns for unnamed people.
RETIRED = re.compile(
    r"\b(lanes?|gatekeeper|judge[sd]?|judging|judgements?|verdicts?|contenders?|journey|rotations|"
    r"(?<!in-)company|teller|heat|mend(?:ed|ing)?|nobody|somebody|anybody|everybody|whoever)\b",
    re.IGNORECASE,
)
# British spelling, also inside names.
BRITISH = re.compile(
    r"(?:label|model|travel)l(?:ed|ing)|behaviour|colour|neighbour|licence|artefact|"
    r"(?:initial|normal|organ|optim|quant|serial|summar|token)is(?:e|ing|ation)",
    re.IGNORECASE,
)
# Files with input texts of models. These texts are data and may contain any words.
MODEL_TEXTS = {
    "benchmarks/common/sentences.py",
    "build_artifacts/checkpoints/qwen3_reranker.py",
    "benchmarks/soak/mixed_load.py",
    "benchmarks/generation/schemas.py",
    "build_artifacts/decoders/gate_inputs.py",
    "build_artifacts/encoders/probes.py",
    "build_artifacts/training/gate_data.py",
}


@pytest.mark.parametrize("words", [RETIRED, BRITISH], ids=["retired", "british"])
def test_retired_words_and_british_spelling_are_gone(words: re.Pattern[str]) -> None:
    found = {}
    for path in (*OUR_FILES, *DOCUMENTS, ROOT / "serve_config.yaml", ROOT / "NOTICE"):
        if path.name != "CHANGELOG.md" and named(path) not in MODEL_TEXTS:
            text = path.read_text(encoding="utf-8").replace("_", " ")
            found[named(path)] = words.findall(text)
    assert {name: seen for name, seen in found.items() if seen} == {}


def loaded_by(*modules: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has after importing `modules`."""
    code = f"import sys, {', '.join(modules)}; print(*{{m.partition('.')[0] for m in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_the_serving_path_loads_nothing_of_the_build() -> None:
    walked = pkgutil.walk_packages(deployments.__path__, "deployments.")
    everything = [module.name for module in walked]
    assert "deployments.engines.onnx.sessions" in everything
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


def test_changelog_bullets_start_with_the_verb_of_their_section() -> None:
    verbs = {"Added": "Add", "Changed": "Change", "Fixed": "Fix", "Removed": "Remove"}
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    section, misplaced = "", []
    for line in changelog.splitlines():
        if line.startswith("### "):
            section = line.removeprefix("### ")
        elif line.startswith("- ") and not line.startswith(f"- {verbs[section]} "):
            misplaced.append(line)
    assert misplaced == []
