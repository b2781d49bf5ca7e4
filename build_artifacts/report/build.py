"""Creation of a report from an artifact: collection of stages, measurement and speed-ups.

A stage is one way to run the model: the torch model, or a graph that was exported from it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from datetime import UTC, datetime

from build_artifacts.encoders.candidates import CandidateGraphs
from build_artifacts.errors import BuildError
from build_artifacts.evaluation import EvaluatedModel, Evaluation, load_evaluation
from build_artifacts.progress import BuildProgress
from build_artifacts.report.measure import MeasurementInputs, StageMeasurement
from build_artifacts.report.rebuild import rebuild_prepared
from build_artifacts.report.stages import RebuiltStages, Stage, build_served_stage
from build_artifacts.report.values import (
    BASELINE,
    Report,
    ReportConditions,
    ReportRequest,
    TimingModes,
    add_speedups,
    read_served_variants,
)
from build_artifacts.sources.hub import Hub
from build_artifacts.workspaces.opening import open_temporary_workspace
from build_artifacts.workspaces.step_runner import StepRunner
from deployments.artifacts.manifest import REFERENCE_NAME, ArtifactManifest
from deployments.artifacts.types import Device
from deployments.plan.resolution import SEPARATOR
from deployments.tuning.costs import Shape, TuningTarget
from deployments.tuning.measure import build_batch, supported_shapes
from deployments.tuning.parity import ReferenceOutputs

LENGTHS = (32, 64, 128, 256, 512)  # tokens of one item, for the latency measurement
THROUGHPUT_SHAPE = Shape(items=32, tokens=128)  # batch of the throughput measurement


def build_report(
    request: ReportRequest,
    manifest: ArtifactManifest,
    conditions: ReportConditions,
    progress: BuildProgress,
    hub: Hub,
) -> Report:
    """Measure every stage of the artifact on this host.

    The report names stages that cannot be built or run, with the reason. Raises BuildError for
    invalid evaluation data, and if no stage can be measured.
    """
    evaluation = load_report_evaluation(request, manifest)
    with open_temporary_workspace(request.store) as files:
        progress.begin()
        try:
            steps = StepRunner(files, progress)
            stages, skipped = _build_stages(request, manifest, steps, hub)
            measurement = StageMeasurement(_build_inputs(request, manifest, evaluation), steps)
            results = measurement.measure(stages)
        finally:
            progress.end()
    unmeasured = skipped | measurement.failed
    if not results:
        raise BuildError(
            f"no stage of `{manifest.id}` can be measured here: {_format_unmeasured(unmeasured)}",
            hint="see which graphs run here with `hundredfold models verify`",
        )
    return Report(
        id=manifest.id,
        conditions=conditions,
        source=_format_source(manifest),
        metric=evaluation.metric if evaluation else next(iter(manifest.scores), None),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        command=_format_command(request, manifest, conditions),
        stages=add_speedups(results),
        unmeasured=unmeasured,
    )


def _build_stages(
    request: ReportRequest, manifest: ArtifactManifest, steps: StepRunner, hub: Hub
) -> tuple[list[Stage], dict[str, str]]:
    """Return the stages, and the reasons why other stages cannot be built, by stage name."""
    modes = TimingModes.of(request)
    cpu = read_served_variants(
        TuningTarget(request.artifact, manifest, Device.CPU, modes.single_pass)
    )
    gpu = read_served_variants(TuningTarget(request.artifact, manifest, Device.GPU, modes.gpu))
    served = [build_served_stage(served, modes) for served in (cpu, gpu) if served is not None]
    try:
        prepared = rebuild_prepared(manifest, steps, hub, request.adapter, request.prune_data)
    except BuildError as exc:
        return served, {f"{BASELINE} and the stages built from it": f"{exc.message}; {exc.hint}"}
    rebuilt = RebuiltStages(prepared, CandidateGraphs(steps, prepared), modes)
    scores = {} if request.evaluation else manifest.scores
    stages = [
        *rebuilt.build_baselines(cpu, scores),
        *served,
        *rebuilt.build_common_recipe(cpu),
    ]
    return stages, rebuilt.skipped


def _build_inputs(
    request: ReportRequest, manifest: ArtifactManifest, evaluation: Evaluation | None
) -> MeasurementInputs:
    reference = ReferenceOutputs.read(request.artifact / REFERENCE_NAME)
    tokens = min(THROUGHPUT_SHAPE.tokens, manifest.max_tokens)
    return MeasurementInputs(
        reference=reference,
        head=manifest.head,
        gate=manifest.gate,
        evaluation=evaluation,
        single_items={
            shape.tokens: build_batch(reference.items, shape)
            for shape in supported_shapes(manifest.max_tokens, items=(1,), tokens=LENGTHS)
        },
        full_batch=build_batch(
            reference.items, THROUGHPUT_SHAPE.model_copy(update={"tokens": tokens})
        ),
        runs=request.runs,
        seconds=request.seconds,
    )


def load_report_evaluation(request: ReportRequest, manifest: ArtifactManifest) -> Evaluation | None:
    """Load the labeled data of the request, tokenized; None without such data.

    Raises BadEvaluationData if the data are invalid, BuildError if the task has no evaluation.
    """
    if request.evaluation is None:
        return None
    model = EvaluatedModel.of(request.artifact, manifest)
    return load_evaluation(request.evaluation, manifest.tasks[0], model, request.sampling)


def _format_source(manifest: ArtifactManifest) -> str:
    source = manifest.source
    adapter = f" + adapter {source.adapter}" if source.adapter else ""
    return f"{source.ref}{adapter}, revision {source.revision[:20]}"


def _format_command(
    request: ReportRequest, manifest: ArtifactManifest, conditions: ReportConditions
) -> str:
    options = conditions.options
    words = ["hundredfold", "models", "report", f"{manifest.id}{SEPARATOR}{manifest.version}"]
    words += ["--runs", str(options.runs), "--threads", str(options.threads)]
    words += ["--seconds", f"{options.seconds:g}"]
    words += ["--eval", str(request.evaluation)] if request.evaluation else []
    words += ["--eval-limit", str(options.limit)] if options.limit else []
    words += ["--adapter", str(request.adapter)] if request.adapter else []
    words += ["--prune-data", str(request.prune_data)] if request.prune_data else []
    return shlex.join(words)


def _format_unmeasured(unmeasured: Mapping[str, str]) -> str:
    return (
        "; ".join(f"{name}: {reason}" for name, reason in unmeasured.items())
        or "the artifact has no stage"
    )
