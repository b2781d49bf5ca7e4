"""What is measured, in the order of the journey: the original first, what is served last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from build_artifacts.checkpoints.adapter import Adapter, read_adapter
from build_artifacts.checkpoints.metadata import read_metadata
from build_artifacts.checkpoints.models import TorchModel, load_model
from build_artifacts.demo import DEMO_MODELS
from build_artifacts.errors import BuildError, SourceNotFound, UnsafeSource, UnsupportedModel
from build_artifacts.recipes import CPU_INT8_FUSED, FULL, CandidateRecipe, ExportRecipe
from build_artifacts.report.values import BASELINE, ServedVariants, TimingModes
from build_artifacts.search.graphs import CandidateGraphs, build_graph_spec
from build_artifacts.search.preparation import (
    PreparedModel,
    TorchReferenceEngine,
    cached_merge,
    cached_prepare,
)
from build_artifacts.sources.hub import Hub
from build_artifacts.steps.resolve import resolve
from build_artifacts.storage.workspace import StepRunner
from deployments.artifacts.manifest import ArtifactManifest, EngineOptions, ModelSource
from deployments.artifacts.types import Device
from deployments.config import EncoderSettings
from deployments.engines import EncoderEngine, open_engine
from deployments.tuning.opening import open_tuned_engine

# What `torch` and the graphs exported from it take; a host that only serves has none of them.
_NEEDED = ("torch", "transformers", "onnx", "onnxscript")


def rebuild_prepared(
    manifest: ArtifactManifest, steps: StepRunner, sources: Path, hub: Hub, adapter: Path | None
) -> PreparedModel:
    """The original, its adapter merged, from where the manifest says it came from.

    What has to be unpacked goes under `sources`; `adapter` is where the adapter lies, which the
    manifest does not say. Raises BuildError when anything is missing or is not what it was.
    """
    for package in _NEEDED:
        if find_spec(package) is None:
            raise BuildError(
                f"`{package}` is not installed", hint="run `pip install 'hundredfold[build,cpu]'`"
            )
    with steps.run_uncached("resolve", manifest.source.ref) as step:
        checkpoint = resolve(manifest.source.ref, sources, hub)
        _check_revision("the checkpoint", checkpoint.source.revision, manifest.source.revision)
        step.set_outcome(f"revision {checkpoint.source.revision[:20]}")
    if manifest.source.adapter is not None:
        checkpoint = cached_merge(steps, checkpoint, find_adapter(manifest.source, adapter))
    metadata = read_metadata(checkpoint, manifest.tasks)
    return cached_prepare(steps, checkpoint.weights, metadata, None)


def find_adapter(source: ModelSource, given: Path | None) -> Adapter:
    """The adapter of that name and revision: `given`, or one of those of the demo models."""
    known = {model.adapter.name: model.adapter for model in DEMO_MODELS if model.adapter}
    directory = given or known.get(source.adapter or "")
    if directory is None:
        raise SourceNotFound(
            f"where the adapter `{source.adapter}` lies is not recorded",
            hint="pass `--adapter DIR`",
        )
    adapter = read_adapter(directory)
    _check_revision(f"the adapter in {directory}", adapter.revision, source.adapter_revision)
    return adapter


def _check_revision(what: str, found: str, built_from: str | None) -> None:
    if found != built_from:
        raise UnsafeSource(
            f"{what} has changed since the build: "
            f"revision {found[:20]}, not {str(built_from)[:20]}",
            hint="build the model again",
        )


def weights_bytes(directory: Path) -> int:
    """Size of the weights of a checkpoint."""
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


_RECIPES = {recipe.name: recipe for recipe in (*FULL.candidates, FULL.fallback, CPU_INT8_FUSED)}
# What an InferenceSession is made with when nobody asks for anything else.
_DEFAULTS = EngineOptions(spinning=True, arena=True)
_ONNX = CandidateRecipe(
    name="onnx",
    device=Device.CPU,
    precision="fp32",
    source=ExportRecipe(dtype="float32", opset=18),
    options=_DEFAULTS,
)
_USUAL = replace(CPU_INT8_FUSED, name="fused-int8", options=_DEFAULTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One way to run the model."""

    name: str
    what: str
    size_bytes: int
    open: Callable[[EncoderSettings], EncoderEngine]  # raises EngineFailed
    alone: EncoderSettings  # for one pass at a time
    crowd: EncoderSettings  # for most items per second
    is_baseline_path: bool = True
    scores: Mapping[str, float]  # measured at the build; empty where none were


def served_stage(serving: ServedVariants, modes: TimingModes) -> Stage:
    """What an encoder of this host serves with."""
    placement, candidate = serving.placement, serving.candidates[0]
    on_gpu = placement.device is Device.GPU
    names = ", ".join(variant.name for variant in serving.variants)
    return Stage(
        name=f"gpu-{candidate.precision}" if on_gpu else candidate.precision,
        what=f"served{' on the GPU' if on_gpu else ''}: {names}",
        size_bytes=serving.size_bytes,
        open=lambda settings: open_tuned_engine(replace(placement, settings=settings))[0],
        alone=placement.settings,
        crowd=placement.settings if on_gpu else modes.crowd,
        scores=candidate.scores,
    )


class RebuiltStages:
    """The stages that are made from the checkpoint again. `skipped` names those that cannot be."""

    def __init__(
        self, prepared: PreparedModel, graphs: CandidateGraphs, modes: TimingModes
    ) -> None:
        self._prepared = prepared
        self._graphs = graphs
        self._modes = modes
        self.skipped: dict[str, str] = {}

    def before(self, served: ServedVariants | None, scores: Mapping[str, float]) -> Iterator[Stage]:
        """From the original, whose own `scores` are known, to the float form of what is served."""
        size = weights_bytes(self._prepared.weights)
        metadata, compaction = self._prepared.metadata, self._prepared.compaction

        def original() -> TorchModel:
            return load_model(self._prepared.weights, head=metadata.head, dtype="float32")

        yield self._eager(BASELINE, "the original in fp32, eager", size, original, scores)
        if not compaction.is_empty:
            left = size * compaction.parameters_after // compaction.parameters_before
            what = f"the same, {compaction.describe()}"
            yield self._eager("pruned", what, left, lambda: self._prepared.model("float32"), {})
        yield from self._graph(_ONNX, "exported, as onnxruntime opens it by default")
        if served is not None:
            yield from self._optimised(served)

    def usual(self, served: ServedVariants | None) -> Iterator[Stage]:
        """For comparison, what most people would do instead."""
        names = [candidate.name for candidate in served.candidates] if served else []
        if names != [CPU_INT8_FUSED.name]:
            what = "the usual recipe: fused, then quantised"
            yield from self._graph(_USUAL, what, is_baseline_path=False)

    def _optimised(self, served: ServedVariants) -> Iterator[Stage]:
        candidate, variant = served.candidates[0], served.variants[0]
        recipe = _RECIPES.get(candidate.name)
        if recipe is None or not isinstance(recipe.source, ExportRecipe):
            self.skipped["optimised"] = f"this release has no recipe for a graph `{candidate.name}`"
            return
        if recipe.quantization is None and recipe.precision == "fp32":
            return  # what is served
        floating = replace(
            recipe,
            name="optimised",
            precision="fp32",
            quantization=None,
            options=variant.options(candidate.options),
        )
        yield from self._graph(floating, f"the fp32 graph behind {candidate.name}")

    def _eager(
        self,
        name: str,
        what: str,
        size_bytes: int,
        model: Callable[[], TorchModel],
        scores: Mapping[str, float],
    ) -> Stage:
        def opened(settings: EncoderSettings) -> EncoderEngine:
            return TorchReferenceEngine(model(), self._prepared.metadata, settings.intra_op_threads)

        # Passes at once would share torch's one pool of threads.
        alone = self._modes.alone
        return Stage(
            name=name,
            what=what,
            size_bytes=size_bytes,
            open=opened,
            alone=alone,
            crowd=alone,
            scores=scores,
        )

    def _graph(
        self, recipe: CandidateRecipe, what: str, *, is_baseline_path: bool = True
    ) -> Iterator[Stage]:
        try:
            graph: Path = self._graphs.graph(recipe)
        except UnsupportedModel as exc:
            self.skipped[recipe.name] = exc.message
            return
        spec = build_graph_spec(recipe, graph, self._prepared)
        yield Stage(
            name=recipe.name,
            what=what,
            size_bytes=graph.stat().st_size,
            open=lambda settings: open_engine(spec, settings),
            alone=self._modes.alone,
            crowd=self._modes.crowd,
            is_baseline_path=is_baseline_path,
            scores={},
        )
