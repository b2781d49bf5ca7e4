"""Stages of story b, "From PyTorch to int8" in docs/stories.md, as models of a store.

The stages are graphs of one checkpoint, with and without pruning.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from build_artifacts.accuracy_gate import AccuracyGate
from build_artifacts.build_devices import has_device
from build_artifacts.demo_variants import CPU_TORCH
from build_artifacts.errors import GateFailed, UnsupportedModel
from build_artifacts.evaluation import ExampleSampling
from build_artifacts.evaluation.squad import SquadQuestion
from build_artifacts.families import read_metadata
from build_artifacts.families.base import BuildBudget, BuildContext
from build_artifacts.families.encoder import EncoderBuild, EncoderFamily
from build_artifacts.presets import CPU_INT8, GPU_FP16, PLAIN_ONNX
from build_artifacts.progress import BuildProgress
from build_artifacts.pruning.prune import Pruning, describe_pruning
from build_artifacts.recipes import CPU_FP32, BuildRecipe, CandidateRecipe
from build_artifacts.report.rebuild import rebuild_checkpoint
from build_artifacts.sources.hub import HuggingFaceHub
from build_artifacts.steps.seal import ArtifactIdentity, write_artifact
from build_artifacts.workspaces.step_runner import StepRunner
from build_artifacts.workspaces.workspace import Workspace
from deployments.artifacts.manifest import ArtifactManifest, Gate
from deployments.artifacts.store import publish
from deployments.artifacts.types import Device

# The accuracy gate uses this sample of the questions. Served answers are scored on all questions.
_SAMPLING = ExampleSampling(limit=100)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecipe:
    """One stage of story b: a candidate of the original or the pruned checkpoint."""

    name: str
    what: str
    recipe: CandidateRecipe
    is_pruned: bool = True


STAGES = (
    StageRecipe(name="baseline", what="PyTorch, fp32", recipe=CPU_TORCH, is_pruned=False),
    StageRecipe(name="pruned", what="PyTorch, fp32", recipe=CPU_TORCH),
    StageRecipe(
        name="onnx", what="exported, as ONNX Runtime opens it by default", recipe=PLAIN_ONNX
    ),
    StageRecipe(name="optimized", what="one operator per attention, lean graph", recipe=CPU_FP32),
    StageRecipe(name="int8", what="smoothed static int8", recipe=CPU_INT8),
    StageRecipe(name="int8, not pruned", what="the same", recipe=CPU_INT8, is_pruned=False),
)
GPU_STAGE = StageRecipe(name="fp16", what="fused FP16 graph, on the GPU", recipe=GPU_FP16)


def list_stages() -> tuple[StageRecipe, ...]:
    """Return the stages that this host can measure."""
    return (*STAGES, GPU_STAGE) if has_device(Device.GPU) else STAGES


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedStage:
    """A stage, such as `onnx` or `int8`, that is published in a store as a model of its own."""

    name: str
    what: str
    model_id: str
    directory: Path  # directory of the artifact
    device: Device
    parameters: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """The model whose stages are built, and how to prune it."""

    manifest: ArtifactManifest
    adapter: Path | None
    pruning: Pruning
    evaluation: Path  # labeled data of the accuracy gate
    max_drop: float  # maximum drop of the metric in a stage, in points (hundredths)


def seal_stages(
    plan: StagePlan, root: Path, store: Path
) -> tuple[list[SealedStage], dict[str, str]]:
    """Publish the stages that pass the accuracy gate.

    Return the published stages, and for each other stage its name and the reason of its failure.
    Artifacts are written to `store`, other files of the builds to `root`. Raises BuildError if a
    model cannot be prepared, for example if the pruned model does not pass the gate.
    """
    sealed: list[SealedStage] = []
    refused: dict[str, str] = {}
    with BuildProgress.on_stderr() as progress:
        builds = {
            is_pruned: _start(plan, Workspace(root / name), progress, is_pruned=is_pruned)
            for is_pruned, name in ((False, "original"), (True, "pruned"))
        }
        for stage in list_stages():
            try:
                sealed.append(_seal(stage, builds[stage.is_pruned], plan, root, store))
            except (GateFailed, UnsupportedModel) as exc:
                refused[stage.name] = exc.message
    return sealed, refused


def write_questions(questions: Sequence[SquadQuestion], path: Path) -> Path:
    """Write questions in the format of SQuAD 1.1."""
    paragraphs = [
        {
            "context": question.context,
            "qas": [
                {
                    "id": str(number),
                    "question": question.question,
                    "answers": [
                        {"text": gold, "answer_start": max(question.context.find(gold), 0)}
                        for gold in question.golds
                    ],
                }
            ],
        }
        for number, question in enumerate(questions)
    ]
    path.write_bytes(orjson.dumps({"data": [{"title": "questions", "paragraphs": paragraphs}]}))
    return path


def _start(
    plan: StagePlan, workspace: Workspace, progress: BuildProgress, *, is_pruned: bool
) -> EncoderBuild:
    """Prepare the original or the pruned model. The two models need separate workspaces."""
    workspace.root.mkdir(parents=True, exist_ok=True)
    steps = StepRunner(workspace, progress)
    checkpoint = rebuild_checkpoint(plan.manifest, steps, HuggingFaceHub(), plan.adapter)
    gate = Gate(metric_drop=plan.max_drop)
    context = BuildContext(
        steps=steps,
        weights=checkpoint.weights,
        metadata=read_metadata(checkpoint, plan.manifest.tasks),
        recipe=BuildRecipe(
            candidates=tuple(dict.fromkeys(stage.recipe for stage in list_stages())), gate=gate
        ),
        budget=BuildBudget(tune_seconds=0.0, evaluation=plan.evaluation, sampling=_SAMPLING),
        pruning=plan.pruning if is_pruned else None,
    )
    return EncoderFamily().start(context)


def _seal(
    stage: StageRecipe,
    build: EncoderBuild,
    plan: StagePlan,
    root: Path,
    store: Path,
) -> SealedStage:
    gate = AccuracyGate(build.context.steps, build)
    candidate = gate.first_accepted(stage.recipe)
    if candidate is None:
        raise gate.failure()
    pruned = describe_pruning(plan.pruning) if stage.is_pruned else None
    source = plan.manifest.source.model_copy(update={"pruning": pruned})
    model_id = f"stages/{stage.name.replace(', ', '-').replace(' ', '-')}"
    version = hashlib.sha256(stage.name.encode()).hexdigest()[:12]
    identity = ArtifactIdentity(model_id, version, source, build.context.recipe.digest())
    staged = root / "staged" / version
    write_artifact(build.package([candidate], identity), staged)
    manifest = ArtifactManifest.read(staged)
    (sealed,) = manifest.candidates
    return SealedStage(
        name=stage.name,
        what=stage.what,
        model_id=model_id,
        directory=publish(staged, store, model_id, version),
        device=sealed.device,
        parameters=build.prepared.compaction.parameters_after,
        size_bytes=manifest.count_bytes(sealed),
    )
