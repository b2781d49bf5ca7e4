"""Build the report of an artifact."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from datetime import UTC, datetime

from build_artifacts.console import BuildProgress
from build_artifacts.errors import BuildError
from build_artifacts.evaluation import EvaluatedModel, Evaluation, load_evaluation
from build_artifacts.report.measure import MeasurementInputs, StageMeasurement
from build_artifacts.report.stages import RebuiltStages, Stage, rebuild_prepared, served_stage
from build_artifacts.report.values import (
    BASELINE,
    Report,
    ReportConditions,
    ReportRequest,
    TimingModes,
    add_speedups,
    serving,
)
from build_artifacts.search.graphs import CandidateGraphs
from build_artifacts.sources.hub import Hub
from build_artifacts.storage.workspace import StepRunner, Workspace, workspace
from deployments.artifacts.manifest import REFERENCE_NAME, ArtifactManifest
from deployments.artifacts.types import Device
from deployments.tuning.costs import Shape, TuningTarget
from deployments.tuning.measure import build_batch, supported_shapes
from deployments.tuning.parity import ReferenceOutputs

LENGTHS = (32, 64, 128, 256, 512)  # tokens
CROWD = Shape(items=32, tokens=128)


def build_report(
    request: ReportRequest,
    manifest: ArtifactManifest,
    conditions: ReportConditions,
    progress: BuildProgress,
    hub: Hub,
) -> Report:
    """Measure every stage of the artifact on this host.

    Stages that cannot be made or run are left out, and the report says why. Raises BuildError for
    evaluation data that cannot be used, and when no stage at all is left.
    """
    evaluation = evaluation_for(request, manifest)
    with workspace(request.store) as place:
        progress.begin()
        try:
            steps = StepRunner(place, progress)
            stages, skipped = _stages(request, manifest, steps, place, hub)
            survey = StageMeasurement(_course(request, manifest, evaluation), steps)
            figures = survey.figures(stages)
        finally:
            progress.end()
    unmeasured = skipped | survey.failed
    if not figures:
        raise BuildError(
            f"no stage of `{manifest.id}` can be measured here: {_told(unmeasured)}",
            hint="see which graphs run here with `hundredfold models verify`",
        )
    return Report(
        id=manifest.id,
        conditions=conditions,
        source=_source(manifest),
        metric=evaluation.metric if evaluation else next(iter(manifest.scores), None),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        command=_command(request, manifest, conditions),
        stages=add_speedups(figures),
        unmeasured=unmeasured,
    )


def _stages(
    request: ReportRequest,
    manifest: ArtifactManifest,
    steps: StepRunner,
    place: Workspace,
    hub: Hub,
) -> tuple[list[Stage], dict[str, str]]:
    """The stages there are, and why others cannot be made."""
    modes = TimingModes.of(request)
    cpu = serving(TuningTarget(request.artifact, manifest, Device.CPU, modes.alone))
    gpu = serving(TuningTarget(request.artifact, manifest, Device.GPU, modes.gpu))
    served = [served_stage(found, modes) for found in (cpu, gpu) if found is not None]
    try:
        prepared = rebuild_prepared(
            manifest, steps, place.directory("sources"), hub, request.adapter
        )
    except BuildError as exc:
        return served, {f"{BASELINE} and what is made from it": f"{exc.message}; {exc.hint}"}
    trail = RebuiltStages(prepared, CandidateGraphs(steps, prepared), modes)
    scores = {} if request.evaluation else manifest.scores
    stages = [*trail.before(cpu, scores), *served, *trail.usual(cpu)]
    return stages, trail.skipped


def _course(
    request: ReportRequest, manifest: ArtifactManifest, evaluation: Evaluation | None
) -> MeasurementInputs:
    reference = ReferenceOutputs.read(request.artifact / REFERENCE_NAME)
    most = manifest.max_tokens
    crowd = CROWD.model_copy(update={"tokens": min(CROWD.tokens, most)})
    return MeasurementInputs(
        reference=reference,
        head=manifest.head,
        gate=manifest.gate,
        evaluation=evaluation,
        alone={
            shape.tokens: build_batch(reference.items, shape)
            for shape in supported_shapes(most, items=(1,), tokens=LENGTHS)
        },
        crowd=build_batch(reference.items, crowd),
        runs=request.runs,
        seconds=request.seconds,
    )


def evaluation_for(request: ReportRequest, manifest: ArtifactManifest) -> Evaluation | None:
    """The labelled data that was asked for, ready for engines. Raises BadEvaluationData."""
    if request.evaluation is None:
        return None
    model = EvaluatedModel(
        directory=request.artifact,
        max_tokens=manifest.max_tokens,
        labels=manifest.labels,
        problem_type=manifest.problem_type,
        prompt=manifest.prompts.get(manifest.default_prompt or "", ""),
        mask_token=manifest.mask_token,
    )
    return load_evaluation(request.evaluation, manifest.tasks[0], model, request.sampling)


def _source(manifest: ArtifactManifest) -> str:
    source = manifest.source
    adapter = f" + adapter {source.adapter}" if source.adapter else ""
    return f"{source.ref}{adapter}, revision {source.revision[:20]}"


def _command(
    request: ReportRequest, manifest: ArtifactManifest, conditions: ReportConditions
) -> str:
    options = conditions.options
    words = ["python", "-m", "build_artifacts", "report", f"{manifest.id}:{manifest.version}"]
    words += ["--runs", str(options.runs), "--threads", str(options.threads)]
    words += ["--seconds", f"{options.seconds:g}"]
    words += ["--eval", str(request.evaluation)] if request.evaluation else []
    words += ["--eval-limit", str(options.limit)] if options.limit else []
    words += ["--adapter", str(request.adapter)] if request.adapter else []
    return shlex.join(words)


def _told(unmeasured: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in unmeasured.items()) or "there is none"
