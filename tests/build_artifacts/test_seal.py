from __future__ import annotations

from pathlib import Path

import pytest

from build_artifacts.facts import ModelFacts
from build_artifacts.recipe import CPU_FP32, RECIPE, CandidateRecipe, Recipe, artifact_version
from build_artifacts.steps.seal import Identity, PassedGraph, assemble, publish
from build_artifacts.workspace import BUILDING_NAME, workspace
from deployments.errors import DigestMismatch
from deployments.manifest import (
    LATEST_NAME,
    ArtifactManifest,
    Parity,
    Source,
    TaskName,
    resolve_version,
)
from tests.builders import tiny_tokenizer

VERSION = "0123456789ab"
EXACT = Parity(cosine_mean=1.0, cosine_worst=1.0, company_cosine_worst=1.0)
FACTS = ModelFacts(
    tasks=(TaskName.TEXT_CLASSIFICATION,),
    architecture="BertForSequenceClassification",
    max_tokens=16,
    width=2,
    labels=("NO", "YES"),
    problem="single_label",
)


def stage(root: Path, graph_bytes: bytes = b"a graph") -> Path:
    """An artifact laid out in `root`, as the last step before publishing leaves it."""
    tiny_tokenizer(root / "weights")
    graph = root / "graph.onnx"
    graph.write_bytes(graph_bytes)
    staged = root / "artifact"
    staged.mkdir()
    identity = Identity(
        id="tiny/model",
        version=VERSION,
        source=Source(ref="here", revision="1"),
        recipe_digest=RECIPE.digest(),
    )
    passed = [PassedGraph(CPU_FP32, graph, EXACT)]
    assemble(identity, FACTS, passed, root / "weights" / "tokenizer.json", staged)
    return staged


def test_publishing_is_one_rename_and_makes_the_version_the_latest(tmp_path: Path) -> None:
    staged = stage(tmp_path / "work")
    inode = staged.stat().st_ino
    directory = publish(staged, tmp_path / "store", replace=False)
    assert directory == tmp_path / "store" / "tiny--model" / VERSION
    assert directory.stat().st_ino == inode
    assert resolve_version(tmp_path / "store", "tiny/model", LATEST_NAME) == VERSION
    manifest = ArtifactManifest.read(directory)
    assert manifest.labels == ("NO", "YES")
    assert manifest.built_with["recipe"] == RECIPE.digest()


@pytest.mark.parametrize("replace", [False, True])
def test_a_version_that_is_there_is_replaced_only_when_asked(tmp_path: Path, replace: bool) -> None:
    store = tmp_path / "store"
    publish(stage(tmp_path / "one", b"first"), store, replace=False)
    directory = publish(stage(tmp_path / "two", b"second"), store, replace=replace)
    expected = b"second" if replace else b"first"
    assert (directory / "graphs" / "cpu-fp32.onnx").read_bytes() == expected
    ArtifactManifest.read(directory)


def test_what_was_damaged_after_assembly_is_never_published(tmp_path: Path) -> None:
    staged = stage(tmp_path / "work")
    (staged / "graphs" / "cpu-fp32.onnx").write_bytes(b"a grape")
    with pytest.raises(DigestMismatch):
        publish(staged, tmp_path / "store", replace=False)
    assert not (tmp_path / "store").exists()


def seal_in(store: Path, passed: PassedGraph) -> None:
    """The last steps of a build, in a workspace of its own."""
    identity = Identity(
        id="tiny/model", version=VERSION, source=Source(ref="here", revision="1"), recipe_digest=""
    )
    with workspace(store) as place:
        tiny_tokenizer(place.directory("weights"))
        staged = place.directory("artifact")
        tokenizer = place.directory("weights") / "tokenizer.json"
        assemble(identity, FACTS, [passed], tokenizer, staged)
        publish(staged, store, replace=False)


def test_a_failure_inside_seal_leaves_no_version(tmp_path: Path) -> None:
    store = tmp_path / "store"
    gone = PassedGraph(CPU_FP32, tmp_path / "graph.onnx", EXACT)
    with pytest.raises(FileNotFoundError):
        seal_in(store, gone)
    assert [path.name for path in store.iterdir()] == [BUILDING_NAME]
    assert [path.suffix for path in (store / BUILDING_NAME).iterdir()] == [".log"]

    gone.graph.write_bytes(b"there after all")
    seal_in(store, gone)
    assert resolve_version(store, "tiny/model", LATEST_NAME) == VERSION
    assert list((store / BUILDING_NAME).iterdir()) == []


def version(**changed: object) -> str:
    same: dict[str, object] = {
        "revision": "r1",
        "adapter_revision": None,
        "task": "feature-extraction",
        "recipe": RECIPE,
    }
    return artifact_version(**(same | changed))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"revision": "r2"},
        {"adapter_revision": "a1"},
        {"task": "text-classification"},
        {"recipe": Recipe(revision=RECIPE.revision + 1)},
        {"recipe": Recipe(lanes=((CPU_FP32,),))},
    ],
    ids=str,
)
def test_everything_that_shapes_a_build_shapes_its_version(change: dict[str, object]) -> None:
    assert version() == version()
    assert version(**change) != version()


def test_candidate_names_are_unique_and_file_names() -> None:
    candidates: list[CandidateRecipe] = [c for lane in RECIPE.lanes for c in lane]
    assert len({c.name for c in candidates}) == len(candidates)
