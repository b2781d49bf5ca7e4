"""Reports of artifacts with a missing or changed checkpoint; no test exports a graph."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from build_artifacts.__main__ import main
from build_artifacts.checkpoints.adapter import read_adapter
from build_artifacts.encoders.preparation import PreparedModel
from build_artifacts.errors import BuildError, UnsafeSource
from build_artifacts.pipeline import BuildResult
from build_artifacts.progress import BuildProgress
from build_artifacts.report.build import build_report
from build_artifacts.report.output import format_stages, report_path
from build_artifacts.report.rebuild import rebuild_prepared
from build_artifacts.report.values import GPU_SETTINGS, Report, ReportRequest, read_conditions
from build_artifacts.sources.hub import HuggingFaceHub
from build_artifacts.workspaces.step_runner import StepRunner
from build_artifacts.workspaces.workspace import Workspace
from deployments.artifacts.manifest import MANIFEST_NAME, ArtifactManifest
from deployments.artifacts.types import Device, TaskName
from deployments.config import EncoderSettings
from deployments.tuning.host import read_host
from tests.support.adapters import tiny_adapter

if TYPE_CHECKING:
    import torch

JsonObject = dict[str, Any]

ON_THE_CPU = EncoderSettings()


def copy_artifact(build: BuildResult, store: Path, **source: str) -> Path:
    """Copy the artifact to another store and change fields of its source."""
    artifact = store / build.directory.parent.name / build.directory.name
    shutil.copytree(build.directory, artifact)
    edit(artifact, lambda manifest: {**manifest, "source": {**manifest["source"], **source}})
    return artifact


def edit(artifact: Path, change: Callable[[JsonObject], JsonObject]) -> None:
    path = artifact / MANIFEST_NAME
    path.write_text(json.dumps(change(json.loads(path.read_bytes()))), encoding="utf-8")


def edit_candidates(artifact: Path, change: Callable[[list[JsonObject]], list[JsonObject]]) -> None:
    edit(artifact, lambda manifest: {**manifest, "candidates": change(manifest["candidates"])})


def measure_report(artifact: Path, store: Path, *, gpu: EncoderSettings = GPU_SETTINGS) -> Report:
    request = ReportRequest(artifact=artifact, store=store, runs=5, threads=1, seconds=2, gpu=gpu)
    manifest = ArtifactManifest.read(artifact)
    conditions = read_conditions(request, manifest)
    return build_report(
        request, manifest, conditions, BuildProgress(io.StringIO()), HuggingFaceHub()
    )


def test_report_without_checkpoint_measures_sealed_stages(
    tmp_path: Path, pruned_build: BuildResult
) -> None:
    artifact = copy_artifact(pruned_build, tmp_path, ref=str(tmp_path / "gone"))
    edit_candidates(artifact, lambda own: [*own, {**own[0], "name": "gpu-int8", "device": "gpu"}])
    report = measure_report(artifact, tmp_path, gpu=ON_THE_CPU)
    assert [stage.name for stage in report.stages] == ["int8", "gpu-int8"]
    assert all(stage.speedup is None for stage in report.stages)
    ((label, reason),) = report.unmeasured.items()
    assert label == "torch and the stages built from it"
    assert f"`{tmp_path / 'gone'}` is not a directory" in reason
    assert report.conditions.gpu is not None
    assert report.conditions.served["gpu-1"] == ("gpu-int8",)
    assert report.conditions.served["cpu-1"][0].startswith("cpu-int8")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ({"revision": "f" * 64}, "the checkpoint has changed since the build"),
        ({"adapter": "nowhere"}, "the directory of the adapter `nowhere` is not recorded"),
    ],
)
def test_changed_checkpoint_or_adapter_is_not_a_baseline(
    tmp_path: Path, pruned_build: BuildResult, source: dict[str, str], reason: str
) -> None:
    report = measure_report(copy_artifact(pruned_build, tmp_path, **source), tmp_path)
    assert [stage.name for stage in report.stages] == ["int8"]
    assert reason in next(iter(report.unmeasured.values()))


def test_report_leaves_no_work_files(tmp_path: Path, pruned_build: BuildResult) -> None:
    artifact = copy_artifact(pruned_build, tmp_path, ref=str(tmp_path / "gone"))
    measure_report(artifact, tmp_path)
    assert list((tmp_path / ".building").iterdir()) == []


def test_report_without_stages_raises_reasons(tmp_path: Path, pruned_build: BuildResult) -> None:
    artifact = copy_artifact(pruned_build, tmp_path, ref=str(tmp_path / "gone"))
    edit_candidates(artifact, lambda own: [{**own[0], "device": "gpu"}])
    with pytest.raises(
        BuildError, match="can be measured here: torch and the stages built from it"
    ):
        measure_report(artifact, tmp_path)


def test_damaged_or_forced_report_is_measured_again(
    tmp_path: Path, pruned_build: BuildResult, capfd: pytest.CaptureFixture[str]
) -> None:
    artifact = copy_artifact(pruned_build, tmp_path, ref=str(tmp_path / "gone"))
    name = f"{pruned_build.manifest.id}@{pruned_build.manifest.version}"
    command = ["report", name, "--store", str(tmp_path), "--runs", "5", "--seconds", "1"]
    path = report_path(artifact, read_host(Device.CPU))

    assert main(command) == 0
    assert "not measured: torch and the stages built from it: " in capfd.readouterr().out
    path.write_bytes(b"{")
    assert main(command) == 0
    assert f"measuring again: {path} cannot be used: " in capfd.readouterr().err

    # A stored report without unmeasured stages is reused.
    whole = Report.model_validate_json(path.read_bytes()).model_copy(update={"unmeasured": {}})
    path.write_bytes(whole.to_json())
    assert main(command) == 0
    assert path.read_bytes() == whole.to_json()
    assert capfd.readouterr().out == format_stages(whole) + "\n"
    assert main([*command, "--force"]) == 0
    assert path.read_bytes() != whole.to_json()


def rebuild(manifest: ArtifactManifest, root: Path, adapter: Path | None) -> PreparedModel:
    steps = StepRunner(Workspace(root), BuildProgress(io.StringIO()))
    return rebuild_prepared(manifest, steps, HuggingFaceHub(), adapter)


def test_rebuild_prepared_merges_adapter(
    tmp_path: Path, pruned_build: BuildResult, pruned_source: Path
) -> None:
    import torch

    adapter = tiny_adapter(tmp_path / "mood", pruned_source, labels=("SAD", "GLAD", "MAD"))
    source = pruned_build.manifest.source.model_copy(
        update={"adapter": "mood", "adapter_revision": read_adapter(adapter).revision}
    )
    manifest = pruned_build.manifest.model_copy(
        update={"tasks": (TaskName.TEXT_CLASSIFICATION,), "source": source}
    )
    prepared = rebuild(manifest, tmp_path / "work", adapter)
    assert prepared.metadata.labels == ("SAD", "GLAD", "MAD")
    ids = torch.from_numpy(prepared.reference.items[1].ids.astype("int64"))[None]
    with torch.inference_mode():
        merged = prepared.model("float32")(ids).logits[0].numpy()
        original = peft_model(pruned_source, adapter)(ids).logits[0].numpy()
    assert merged == pytest.approx(original, abs=1e-4)
    assert prepared.reference.outputs[1] == pytest.approx(original, abs=1e-4)

    changed = tiny_adapter(tmp_path / "other", pruned_source, labels=("SAD", "GLAD"))
    with pytest.raises(UnsafeSource, match="has changed since the build"):
        rebuild(manifest, tmp_path / "again", changed)


def peft_model(base: Path, adapter: Path) -> torch.nn.Module:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
    return PeftModel.from_pretrained(plain, str(adapter)).eval()
