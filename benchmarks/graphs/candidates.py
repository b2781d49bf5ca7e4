"""Graphs to benchmark: those of the sealed artifact, and rebuilt baselines, opened on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from build_artifacts.encoders.candidates import CandidateGraphs, build_graph_spec
from build_artifacts.encoders.preparation import PreparedModel
from build_artifacts.errors import UnsupportedModel
from build_artifacts.presets import CPU_INT8_DYNAMIC, OPENVINO_INT8, OPENVINO_INT8_SMOOTH
from build_artifacts.progress import BuildProgress
from build_artifacts.recipes import CandidateRecipe
from build_artifacts.report.rebuild import rebuild_prepared
from build_artifacts.report.stages import RebuiltStages
from build_artifacts.report.values import BASELINE, ReportRequest, TimingModes
from build_artifacts.sources.hub import HuggingFaceHub
from build_artifacts.workspaces.step_runner import StepRunner
from build_artifacts.workspaces.workspace import Workspace
from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import Device
from deployments.config import EncoderSettings
from deployments.engines import EncoderEngine, GraphSpec, missing_requirement, open_engine
from deployments.host.machine import advise_install
from deployments.tuning.costs import TuningTarget, read_costs
from deployments.tuning.opening import open_tuned_engine

TORCH = BASELINE
COMMON_RECIPE = "common-recipe"  # fuse all operators, then quantize to dynamic int8
SEALED = "sealed"
# OpenVINO candidates in artifacts pad inputs to buckets. These baselines use the same recipes
# without buckets.
OPENVINO = tuple(
    replace(
        recipe,
        name=f"{recipe.name}-unpadded",
        options=recipe.options.model_copy(update={"buckets": ()}),
    )
    for recipe in (OPENVINO_INT8, OPENVINO_INT8_SMOOTH)
)
OPENVINO_BASELINES = tuple(recipe.name for recipe in OPENVINO)
# Dynamic int8 computes activation ranges over the whole batch, so outputs depend on the batch. It
# is therefore only a baseline.
DYNAMIC = CPU_INT8_DYNAMIC.name
BASELINES = {
    CPU_INT8_DYNAMIC: "the same rewrites with dynamic int8",
    **{
        recipe: f"OpenVINO, {type(recipe.quantization).__name__}, without buckets and run at "
        "exactly the measured shapes; faster than under traffic of varied shapes"
        for recipe in OPENVINO
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphCandidate:
    """One way to run the model.

    If `must_pass_gate` is False, its outputs may violate the accuracy gate. The results then list
    the violated limits.
    """

    name: str
    what: str  # short description for the report
    open: Callable[[EncoderSettings], EncoderEngine]  # raises EngineFailed
    must_pass_gate: bool
    can_split: bool = True  # whether to measure concurrent passes too


@dataclass(slots=True)
class GraphCandidates:
    """Candidates to measure, and the reasons why others are missing, by name."""

    candidates: list[GraphCandidate] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)


def collect_candidates(
    request: ReportRequest, manifest: ArtifactManifest, workspace: Workspace
) -> GraphCandidates:
    """Collect the candidates of an artifact and the baselines.

    Graphs that the artifact does not contain are rebuilt from its source checkpoint in `workspace`,
    which must outlive the engines. Raises BuildError if the checkpoint is missing or has changed.
    """
    with BuildProgress.on_stderr() as progress:
        return _collect(request, manifest, StepRunner(workspace, progress))


def _collect(
    request: ReportRequest, manifest: ArtifactManifest, steps: StepRunner
) -> GraphCandidates:
    encoders = TimingModes.of(request)
    prepared = rebuild_prepared(manifest, steps, HuggingFaceHub(), request.adapter)
    graphs = CandidateGraphs(steps, prepared)
    collected = GraphCandidates()
    rebuilt = RebuiltStages(prepared, graphs, encoders)
    for stage in rebuilt.build_baselines(None, {}):
        collected.candidates.append(
            GraphCandidate(
                name=stage.name,
                what=stage.what,
                open=stage.open,
                must_pass_gate=True,
                can_split=stage.throughput != stage.single_pass,
            )
        )
    for stage in rebuilt.build_common_recipe(None):
        collected.candidates.append(
            GraphCandidate(
                name=COMMON_RECIPE, what=stage.what, open=stage.open, must_pass_gate=False
            )
        )
    collected.missing |= rebuilt.skipped
    _add_sealed(
        collected, TuningTarget(request.artifact, manifest, Device.CPU, encoders.single_pass)
    )
    for recipe in BASELINES:
        _add_baseline(collected, recipe, prepared, graphs, encoders.single_pass)
    return collected


def _add_sealed(collected: GraphCandidates, target: TuningTarget) -> None:
    def open_served(settings: EncoderSettings) -> EncoderEngine:
        return open_tuned_engine(replace(target, settings=settings)).engine

    collected.candidates.append(
        GraphCandidate(
            name=SEALED, what="the served variants", open=open_served, must_pass_gate=True
        )
    )
    costs = read_costs(target)
    rejected = costs.rejected if costs else {}
    for candidate in target.candidates:
        spec = target.spec(candidate)
        if reason := rejected.get(candidate.name) or missing_requirement(spec, target.settings):
            collected.missing[candidate.name] = reason
            continue
        collected.candidates.append(
            GraphCandidate(
                name=candidate.name,
                what="a sealed candidate with its sealed options",
                open=partial(open_engine, spec),
                must_pass_gate=True,
            )
        )


def _add_baseline(
    collected: GraphCandidates,
    recipe: CandidateRecipe,
    prepared: PreparedModel,
    graphs: CandidateGraphs,
    settings: EncoderSettings,
) -> None:
    try:
        spec = _build_spec(recipe, prepared, graphs, settings)
    except UnsupportedModel as exc:
        collected.missing[recipe.name] = exc.message
        return
    collected.candidates.append(
        GraphCandidate(
            name=recipe.name,
            what=BASELINES[recipe],
            open=partial(open_engine, spec),
            must_pass_gate=False,
        )
    )


def _build_spec(
    recipe: CandidateRecipe,
    prepared: PreparedModel,
    graphs: CandidateGraphs,
    settings: EncoderSettings,
) -> GraphSpec:
    """Build the graph of a baseline. Raises UnsupportedModel if this host cannot run it."""
    if reason := missing_requirement(
        build_graph_spec(recipe, Path(recipe.name), prepared), settings
    ):
        raise UnsupportedModel(reason, hint=advise_install("openvino"))
    return build_graph_spec(recipe, graphs.graph(recipe), prepared)
