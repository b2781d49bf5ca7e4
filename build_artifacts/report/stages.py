"""Stages of a report: the original model, the graphs exported from it, the served graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from build_artifacts.checkpoints.checkpoint import (
    SAFETENSORS_INDEX_NAME,
    SAFETENSORS_NAME,
    hashed_files,
    read_object,
)
from build_artifacts.checkpoints.models import TorchModel, load_model
from build_artifacts.encoders.candidates import CandidateGraphs, build_graph_spec
from build_artifacts.encoders.preparation import PreparedModel
from build_artifacts.encoders.reference_engine import TorchReferenceEngine
from build_artifacts.errors import UnsupportedModel
from build_artifacts.graph_files import list_files
from build_artifacts.presets import CPU_INT8_FUSED, DYNAMIC, FULL, PLAIN_ONNX
from build_artifacts.recipes import CandidateRecipe, ExportRecipe
from build_artifacts.report.values import BASELINE, ServedVariants, TimingModes
from deployments.artifacts.manifest import Parity
from deployments.artifacts.types import Device
from deployments.config import EncoderSettings
from deployments.engines import EncoderEngine, open_engine
from deployments.tuning.opening import open_tuned_engine


def sum_weight_bytes(directory: Path) -> int:
    """Return the bytes of the weights. Shards beside a whole file are not counted: none is read."""
    sizes = {
        name: path.stat().st_size
        for name, path in hashed_files(directory)
        if name.endswith(".safetensors")
    }
    if SAFETENSORS_NAME in sizes:
        shards = read_object(directory / SAFETENSORS_INDEX_NAME).get("weight_map", {})
        for shard in set(shards.values()):
            sizes.pop(shard, None)
    return sum(sizes.values())


_RECIPES = {
    recipe.name: recipe for recipe in (*FULL.candidates, FULL.fallback, *DYNAMIC.candidates)
}
_COMMON = replace(CPU_INT8_FUSED, name="fused-int8", options=PLAIN_ONNX.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One way to run the model: its name, size, engine and settings."""

    name: str
    what: str
    size_bytes: int
    open: Callable[[EncoderSettings], EncoderEngine]  # opens the engine; raises EngineFailed
    single_pass: EncoderSettings  # settings for the lowest latency of one pass
    throughput: EncoderSettings  # settings for the most items per second
    is_baseline_path: bool = True  # False: measured for comparison only
    scores: Mapping[str, float]  # metrics that the build measured, by name; may be empty
    parities: tuple[Parity, ...] = ()  # one per graph of the artifact; empty for stages built again


def build_served_stage(served: ServedVariants, modes: TimingModes) -> Stage:
    """Build the stage of the variants that an encoder deployment on this host serves."""
    target, candidate = served.target, served.candidates[0]
    on_gpu = target.device is Device.GPU
    names = ", ".join(variant.name for variant in served.variants)
    return Stage(
        name=f"gpu-{candidate.precision}" if on_gpu else candidate.precision,
        what=f"served{' on the GPU' if on_gpu else ''}: {names}",
        size_bytes=served.size_bytes,
        open=lambda settings: open_tuned_engine(replace(target, settings=settings)).engine,
        single_pass=target.settings,
        throughput=target.settings if on_gpu else modes.throughput,
        scores=candidate.scores,
        parities=tuple(sealed.parity for sealed in served.candidates),
    )


class RebuiltStages:
    """Stages built again from the checkpoint. `skipped` maps failed stages to the reason."""

    def __init__(
        self, prepared: PreparedModel, graphs: CandidateGraphs, modes: TimingModes
    ) -> None:
        self._prepared = prepared
        self._graphs = graphs
        self._modes = modes
        self.skipped: dict[str, str] = {}

    def build_baselines(
        self, served: ServedVariants | None, scores: Mapping[str, float]
    ) -> Iterator[Stage]:
        """Yield the stages before the served graph: original model, pruned model, float graphs.

        The pruned model is a stage if compaction removes heads or channels. The first float graph
        is the plain export. The second is the fp32 graph from which the served CPU graph was made.
        It is missing if no CPU graph is served, or if the served CPU graph is fp32. `scores` are
        the metrics of the original model.
        """
        metadata, compaction = self._prepared.metadata, self._prepared.compaction
        original = (self._prepared.original or self._prepared).weights
        size = sum_weight_bytes(original)

        def load_original() -> TorchModel:
            return load_model(original, head=metadata.loaded_head, dtype="float32")

        yield self._torch_stage(
            BASELINE, "the original in fp32, eager", size, load_original, scores
        )
        if not compaction.is_empty:
            pruned_size = size * compaction.parameters_after // compaction.parameters_before
            what = f"the same, {compaction.describe()}"
            yield self._torch_stage(
                "pruned", what, pruned_size, lambda: self._prepared.model("float32"), {}
            )
        yield from self._graph_stage(PLAIN_ONNX, "exported, as onnxruntime opens it by default")
        if served is not None:
            yield from self._optimized_stage(served)

    def build_common_recipe(self, served: ServedVariants | None) -> Iterator[Stage]:
        """Yield a stage of the int8 recipe that other projects commonly use, for comparison.

        The recipe fuses operators and then quantizes the graph dynamically. Yield nothing if the
        host serves only this graph, because it already has a stage.
        """
        names = [candidate.name for candidate in served.candidates] if served else []
        if names != [CPU_INT8_FUSED.name]:
            what = "the common recipe: fused, then quantized"
            yield from self._graph_stage(_COMMON, what, is_baseline_path=False)

    def _optimized_stage(self, served: ServedVariants) -> Iterator[Stage]:
        candidate, variant = served.candidates[0], served.variants[0]
        recipe = _RECIPES.get(candidate.name)
        if recipe is None or not isinstance(recipe.source, ExportRecipe):
            self.skipped["optimized"] = f"this release has no recipe for a graph `{candidate.name}`"
            return
        if recipe.quantization is None and recipe.precision == "fp32":
            return  # the served graph is the float graph
        float_recipe = replace(
            recipe,
            name="optimized",
            precision="fp32",
            quantization=None,
            options=variant.options(candidate.options),
        )
        yield from self._graph_stage(float_recipe, f"the fp32 graph behind {candidate.name}")

    def _torch_stage(
        self,
        name: str,
        what: str,
        size_bytes: int,
        load: Callable[[], TorchModel],
        scores: Mapping[str, float],
    ) -> Stage:
        def open_torch(settings: EncoderSettings) -> EncoderEngine:
            return TorchReferenceEngine(load(), self._prepared.metadata, settings.intra_op_threads)

        # No concurrent passes, because they would share the single thread pool of torch.
        settings = self._modes.single_pass
        return Stage(
            name=name,
            what=what,
            size_bytes=size_bytes,
            open=open_torch,
            single_pass=settings,
            throughput=settings,
            scores=scores,
        )

    def _graph_stage(
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
            size_bytes=sum(file.stat().st_size for file in list_files(graph)),
            open=lambda settings: open_engine(spec, settings),
            single_pass=self._modes.single_pass,
            throughput=self._modes.throughput,
            is_baseline_path=is_baseline_path,
            scores={},
        )
