"""Everything on a CPU that one model is worth comparing on, as engines still to be opened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from build_artifacts.console import BuildProgress
from build_artifacts.errors import UnsupportedModel
from build_artifacts.recipes import OPENVINO_INT8, OPENVINO_INT8_SMOOTH, CandidateRecipe
from build_artifacts.report.stages import RebuiltStages, rebuild_prepared
from build_artifacts.report.values import BASELINE, ReportRequest, TimingModes
from build_artifacts.search.gate import spec_of
from build_artifacts.search.graphs import CandidateGraphs
from build_artifacts.search.preparation import PreparedModel
from build_artifacts.sources.hub import HuggingFaceHub
from build_artifacts.storage.workspace import StepRunner, Workspace
from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import Device
from deployments.config import EncoderSettings
from deployments.engines import EncoderEngine, GraphSpec, missing_requirement, open_engine
from deployments.tuning.costs import TuningTarget, read_costs
from deployments.tuning.opening import open_tuned_engine

TORCH = BASELINE
COMMON_RECIPE = "usual"
SEALED = "sealed"
# Beside a sealed candidate of the same recipe, which pads to buckets.
OPENVINO = tuple(
    replace(
        recipe,
        name=f"{recipe.name}-unpadded",
        options=recipe.options.model_copy(update={"buckets": ()}),
    )
    for recipe in (OPENVINO_INT8, OPENVINO_INT8_SMOOTH)
)
OPENVINO_BASELINES = tuple(recipe.name for recipe in OPENVINO)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphCandidate:
    """One way to run the model. A rival's answers are told; ours must pass the gate."""

    name: str
    what: str  # in a few words
    open: Callable[[EncoderSettings], EncoderEngine]  # raises EngineFailed
    must_pass_gate: bool
    shares_out: bool = True  # whether several passes at once make sense


@dataclass(slots=True)
class GraphCandidates:
    """Who takes part, and why others do not."""

    entered: list[GraphCandidate] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)


def collect_candidates(
    request: ReportRequest, manifest: ArtifactManifest, place: Workspace
) -> GraphCandidates:
    """Every contender of an artifact; what is not sealed is made again from its checkpoint.

    The graphs lie in `place`, which has to outlive the engines. Raises BuildError when the
    checkpoint is not found or has changed.
    """
    encoders, steps = TimingModes.of(request), StepRunner(place, BuildProgress.on_stderr())
    hub, sources = HuggingFaceHub(), place.directory("sources")
    prepared = rebuild_prepared(manifest, steps, sources, hub, request.adapter)
    graphs = CandidateGraphs(steps, prepared)
    found = GraphCandidates()
    trail = RebuiltStages(prepared, graphs, encoders)
    for stage in trail.before(None, {}):
        found.entered.append(
            GraphCandidate(
                name=stage.name,
                what=stage.what,
                open=stage.open,
                must_pass_gate=True,
                shares_out=stage.crowd != stage.alone,
            )
        )
    for stage in trail.usual(None):
        found.entered.append(
            GraphCandidate(
                name=COMMON_RECIPE, what=stage.what, open=stage.open, must_pass_gate=False
            )
        )
    found.missing |= trail.unmade
    _add_sealed(found, TuningTarget(request.artifact, manifest, Device.CPU, encoders.alone))
    for recipe in OPENVINO:
        _add_rival(found, recipe, prepared, graphs, encoders.alone)
    return found


def _add_sealed(found: GraphCandidates, placement: TuningTarget) -> None:
    def best(settings: EncoderSettings) -> EncoderEngine:
        return open_tuned_engine(replace(placement, settings=settings))[0]

    served = GraphCandidate(name=SEALED, what="what is served here", open=best, must_pass_gate=True)
    found.entered.append(served)
    costs = read_costs(placement)
    refused = costs.rejected if costs else {}
    for candidate in placement.candidates:
        spec = placement.spec(candidate)
        if reason := refused.get(candidate.name) or missing_requirement(spec, placement.settings):
            found.missing[candidate.name] = reason
            continue
        found.entered.append(
            GraphCandidate(
                name=candidate.name,
                what="a sealed candidate, with the options it was sealed with",
                open=partial(open_engine, spec),
                must_pass_gate=True,
            )
        )


def _add_rival(
    found: GraphCandidates,
    recipe: CandidateRecipe,
    prepared: PreparedModel,
    graphs: CandidateGraphs,
    settings: EncoderSettings,
) -> None:
    try:
        spec = _rival_spec(recipe, prepared, graphs, settings)
    except UnsupportedModel as exc:
        found.missing[recipe.name] = exc.message
        return
    found.entered.append(
        GraphCandidate(
            name=recipe.name,
            what=f"OpenVINO, {type(recipe.quantization).__name__}, opened without buckets and run "
            "at exactly the measured shapes, which flatters it: traffic has many",
            open=partial(open_engine, spec),
            must_pass_gate=False,
        )
    )


def _rival_spec(
    recipe: CandidateRecipe,
    prepared: PreparedModel,
    graphs: CandidateGraphs,
    settings: EncoderSettings,
) -> GraphSpec:
    """How to open the rival, whose graph is made here. Raises UnsupportedModel."""
    if reason := missing_requirement(spec_of(recipe, Path(recipe.name), prepared), settings):
        raise UnsupportedModel(reason, hint="run `pip install 'hundredfold[openvino]'`")
    return spec_of(recipe, graphs.graph(recipe), prepared)
