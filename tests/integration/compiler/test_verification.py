"""The commands `verify` (file digests, then parity of the sealed candidates) and `ls`."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import onnx
import pytest
from onnx import numpy_helper

from build_artifacts.__main__ import main
from build_artifacts.pipeline import BuildResult
from build_artifacts.verification import verify_candidates
from deployments.artifacts.manifest import MANIFEST_NAME, REFERENCE_NAME, ArtifactManifest
from deployments.errors import ArtifactError, DigestMismatch
from tests.support.artifacts import replace_sealed_file, seal_tiny


@pytest.fixture
def artifact(tmp_path: Path, embedding_build: BuildResult) -> Path:
    """A copy of a built artifact in a separate store."""
    store = tmp_path / "store"
    shutil.copytree(embedding_build.directory.parents[1], store)
    return store / embedding_build.directory.relative_to(embedding_build.directory.parents[1])


def verify(artifact: Path, model: str = "local/embedder") -> int:
    return main(["verify", model, "--store", str(artifact.parents[1])])


def with_reversed_weights(graph: Path) -> bytes:
    """Return the graph with all matrices reversed."""
    model = onnx.load(graph)
    for weight in model.graph.initializer:
        values = numpy_helper.to_array(weight)
        if len(weight.dims) > 1:
            weight.CopyFrom(numpy_helper.from_array(values[::-1].copy(), weight.name))
    return bytes(model.SerializeToString())


def update_first_candidate(artifact: Path, **changes: object) -> None:
    """Change fields of the first candidate in the manifest."""
    manifest = json.loads((artifact / MANIFEST_NAME).read_bytes())
    manifest["candidates"][0] |= changes
    (artifact / MANIFEST_NAME).write_text(json.dumps(manifest), encoding="utf-8")


def test_verify_reproduces_sealed_parity(
    artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = list(verify_candidates(artifact))
    manifest = ArtifactManifest.read(artifact)
    assert [checked.candidate for checked in results] == list(manifest.candidates)
    for checked in results:
        assert checked.result is not None
        assert checked.result.passed
        assert checked.result.parity is not None
        mean = checked.candidate.parity.cosine_mean
        assert checked.result.parity.cosine_mean == pytest.approx(mean, abs=1e-5)
    assert verify(artifact) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(manifest.candidates)
    assert all(": passed, cosine " in line and "(sealed with " in line for line in lines)


def test_flipped_byte_is_rejected_before_any_run(
    artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = artifact / ArtifactManifest.read(artifact).candidates[-1].graph
    content = bytearray(graph.read_bytes())
    content[len(content) // 2] ^= 1
    graph.write_bytes(content)
    with pytest.raises(DigestMismatch, match=r"differs from the sealed file \(sha256\)"):
        next(verify_candidates(artifact))
    assert verify(artifact) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert "(sha256)" in captured.err
    assert "\n\nhint: " in captured.err


def test_verify_rejects_graph_with_other_weights(
    artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = ArtifactManifest.read(artifact).candidates[0]
    replace_sealed_file(artifact, changed.graph, with_reversed_weights(artifact / changed.graph))
    assert verify(artifact) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{changed.name}: FAILED, mean cosine ")
    assert all(": passed" in line for line in lines[1:]), "one failure does not hide the others"


def test_verify_rejects_invalid_reference(
    artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_sealed_file(artifact, REFERENCE_NAME, b"not an archive")
    with pytest.raises(ArtifactError, match="not a file of reference outputs"):
        list(verify_candidates(artifact))
    assert verify(artifact) == 1
    assert "error: " in capsys.readouterr().err


def test_verify_skips_candidate_with_missing_engine(
    artifact: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    name = ArtifactManifest.read(artifact).candidates[0].name
    update_first_candidate(artifact, engine="openvino")
    assert verify(artifact) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == f"{name}: not checked, the package `openvino` is not installed"


def test_verify_accepts_version(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (artifact.parent / "latest").unlink()
    assert verify(artifact) == 1
    assert "is not built" in capsys.readouterr().err
    assert verify(artifact, f"local/embedder@{artifact.name}") == 0
    assert verify(artifact, "local/embedder@000000000000") == 1
    assert "no version `000000000000`" in capsys.readouterr().err


def test_verify_requires_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seal_tiny(tmp_path, "tiny/model")
    assert main(["verify", "tiny/model", "--store", str(tmp_path)]) == 1
    assert "reference.npz" in capsys.readouterr().err
