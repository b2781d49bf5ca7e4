"""A sealed artifact is checked again: file by file, then answer by answer."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import onnx
import pytest
from onnx import numpy_helper

from build_artifacts.__main__ import main
from build_artifacts.inspection import verify_candidates
from build_artifacts.pipeline import BuildResult
from deployments.artifacts.manifest import MANIFEST_NAME, REFERENCE_NAME, ArtifactManifest
from deployments.errors import ArtifactError, DigestMismatch
from tests.support.artifacts import replace_sealed_file, seal_tiny


@pytest.fixture
def sealed(tmp_path: Path, embedding_build: BuildResult) -> Path:
    """A copy of a built artifact, in a store of its own."""
    store = tmp_path / "store"
    shutil.copytree(embedding_build.directory.parents[1], store)
    return store / embedding_build.directory.relative_to(embedding_build.directory.parents[1])


def verify(sealed: Path, model: str = "local/embedder") -> int:
    return main(["verify", model, "--store", str(sealed.parents[1])])


def shaken(graph: Path) -> bytes:
    """The graph with other weights."""
    model = onnx.load(graph)
    for weight in model.graph.initializer:
        values = numpy_helper.to_array(weight)
        if len(weight.dims) > 1:
            weight.CopyFrom(numpy_helper.from_array(values[::-1].copy(), weight.name))
    return bytes(model.SerializeToString())


def rewritten(sealed: Path, **changes: object) -> None:
    """Change the manifest's first candidate."""
    manifest = json.loads((sealed / MANIFEST_NAME).read_bytes())
    manifest["candidates"][0] |= changes
    (sealed / MANIFEST_NAME).write_text(json.dumps(manifest), encoding="utf-8")


def test_what_was_sealed_passes_with_the_figures_it_was_sealed_with(
    sealed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = list(verify_candidates(sealed))
    manifest = ArtifactManifest.read(sealed)
    assert [checked.candidate for checked in found] == list(manifest.candidates)
    for checked in found:
        assert checked.result is not None
        assert checked.result.passed
        assert checked.result.parity is not None
        mean = checked.candidate.parity.cosine_mean
        assert checked.result.parity.cosine_mean == pytest.approx(mean, abs=1e-5)
    assert verify(sealed) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(manifest.candidates)
    assert all(": passed, cosine " in line and "(sealed with " in line for line in lines)


def test_one_flipped_byte_is_found_before_anything_is_run(
    sealed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = sealed / ArtifactManifest.read(sealed).candidates[-1].graph
    content = bytearray(graph.read_bytes())
    content[len(content) // 2] ^= 1
    graph.write_bytes(content)
    with pytest.raises(DigestMismatch, match=r"differs from the sealed file \(sha256\)"):
        next(verify_candidates(sealed))
    assert verify(sealed) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert "(sha256)" in said.err
    assert "\n\nhint: " in said.err


def test_a_graph_resealed_with_other_weights_misses_the_gate(
    sealed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = ArtifactManifest.read(sealed).candidates[0]
    replace_sealed_file(sealed, changed.graph, shaken(sealed / changed.graph))
    assert verify(sealed) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{changed.name}: FAILED, mean cosine ")
    assert all(": passed" in line for line in lines[1:]), "one failure does not hide the others"


def test_a_reference_of_another_model_is_found(
    sealed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_sealed_file(sealed, REFERENCE_NAME, b"not an archive")
    with pytest.raises(ArtifactError, match="not a file of reference outputs"):
        list(verify_candidates(sealed))
    assert verify(sealed) == 1
    assert "error: " in capsys.readouterr().err


def test_a_candidate_whose_engine_is_missing_is_named_and_not_a_failure(
    sealed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    name = ArtifactManifest.read(sealed).candidates[0].name
    rewritten(sealed, engine="openvino")
    assert verify(sealed) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == f"{name}: not checked, the package `openvino` is not installed"


def test_a_version_may_be_named(sealed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (sealed.parent / "latest").unlink()
    assert verify(sealed) == 1
    assert "is not built" in capsys.readouterr().err
    assert verify(sealed, f"local/embedder:{sealed.name}") == 0
    assert verify(sealed, "local/embedder:000000000000") == 1
    assert "no version `000000000000`" in capsys.readouterr().err


def test_an_artifact_sealed_without_its_reference_cannot_be_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seal_tiny(tmp_path, "tiny/model")
    assert main(["verify", "tiny/model", "--store", str(tmp_path)]) == 1
    assert "reference.npz" in capsys.readouterr().err
