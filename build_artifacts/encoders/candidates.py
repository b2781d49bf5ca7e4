"""Graphs of the candidates of an encoder. Candidates share exports, rewrites and rankings.

A ranking orders the MatMuls of a graph by their sensitivity to int8.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from build_artifacts.checkpoints.metadata import CheckpointMetadata
from build_artifacts.encoders.preparation import PreparedModel
from build_artifacts.graph_files import format_size, list_files
from build_artifacts.recipes import (
    CandidateRecipe,
    ExportRecipe,
    GraphRewrites,
    Quantization,
    SmoothedInt8,
    StaticInt8,
    TorchProgramRecipe,
    short_digest,
)
from build_artifacts.steps.export import export
from build_artifacts.steps.program import save_program
from build_artifacts.steps.quantize import quantize
from build_artifacts.steps.rewrite import largest_difference, rewrite
from build_artifacts.steps.sensitivity import rank_by_sensitivity
from build_artifacts.workspaces.step_runner import StepRunner
from deployments.artifacts.manifest import EngineOptions
from deployments.artifacts.types import Device, ModelHead
from deployments.batching.batch_policy import collate
from deployments.engines import GraphSpec
from deployments.engines.base import limit_pass_tokens
from deployments.tuning.costs import Shape
from deployments.tuning.measure import build_batch

_GRAPH_NAME = "graph.onnx"
_LONG_TOKENS = 1_024
_CHECK_BATCH_ITEMS = 4
_MAX_VOCABULARY_ITEMS = 8  # items per bucket on a GPU, if outputs have a value per vocabulary entry
# Maximum change of an output by rewrites, as a share of the largest output. Small changes are
# normal, because a rewritten graph runs other kernels, which sum in another order.
_MAX_REWRITE_DIFFERENCE = 1e-3
_PROGRAM_NAME = "program.safetensors"
_RANKING_NAME = "ranking.json"


class CandidateGraphs:
    """Graphs of one build: exports, rewrites and quantized graphs, each built once."""

    def __init__(self, steps: StepRunner, prepared: PreparedModel) -> None:
        self._steps = steps
        self._prepared = prepared

    def graph(self, recipe: CandidateRecipe, excluded_nodes: Sequence[str] = ()) -> Path:
        """Build the graph of `recipe`.

        `excluded_nodes` stay outside its quantization scheme; see `quantize`.
        Raises UnsupportedModel if the model cannot be exported or quantized by this recipe.
        """
        if isinstance(recipe.source, TorchProgramRecipe):
            return self._program(recipe.source)
        float_graph = self.float_graph(recipe)
        if recipe.quantization is None:
            return float_graph
        return self._quantize(float_graph, recipe, recipe.quantization, tuple(excluded_nodes))

    def float_graph(self, recipe: CandidateRecipe) -> Path:
        """Build the float graph of a candidate, before any quantization."""
        if not isinstance(recipe.source, ExportRecipe):
            raise AssertionError("bug: a torch program is quantized")
        exported = self._export(recipe.source)
        return self._rewrite(exported, recipe, recipe.rewrites) if recipe.rewrites else exported

    def sensitive_nodes(self, recipe: CandidateRecipe) -> list[str]:
        """Return the names of the MatMuls with weights, the most sensitive to int8 first."""
        float_graph = self.float_graph(recipe)

        def work(into: Path) -> str:
            items = self._prepared.reference.items
            ranked = rank_by_sensitivity(float_graph, items, self._prepared.metadata.mask_token)
            (into / _RANKING_NAME).write_text(json.dumps(ranked), encoding="utf-8")
            return f"{len(ranked)} MatMuls ranked"

        key = f"sensitivity-{short_digest((recipe.source, recipe.rewrites))}"
        detail = f"{recipe.name}: MatMuls by sensitivity to int8"
        done = self._steps.run_cached(key, "rank", detail, work)
        ranked: list[str] = json.loads((done / _RANKING_NAME).read_bytes())
        return ranked

    def _program(self, source: TorchProgramRecipe) -> Path:
        def work(into: Path) -> str:
            path = into / _PROGRAM_NAME
            save_program(self._prepared.model(source.dtype), self._prepared.metadata, path)
            return format_size(path)

        detail = f"{source.dtype} torch program"
        return (
            self._steps.run_cached(f"program-{source.dtype}", "export", detail, work)
            / _PROGRAM_NAME
        )

    def _export(self, source: ExportRecipe) -> Path:
        def work(into: Path) -> str:
            model = self._prepared.model(source.dtype)
            graph = export(model, self._prepared.metadata, source, into / _GRAPH_NAME)
            return format_size(*list_files(graph))

        fused = f", fused for {source.fusions}" if source.fusions else ""
        opset = f", opset {source.opset}" if source.opset else ""
        detail = f"{source.dtype} graph{opset}{fused}"
        return (
            self._steps.run_cached(f"export-{short_digest((source,))}", "export", detail, work)
            / _GRAPH_NAME
        )

    def _rewrite(self, exported: Path, recipe: CandidateRecipe, rewrites: GraphRewrites) -> Path:
        def work(into: Path) -> str:
            rewritten = into / _GRAPH_NAME
            matches = rewrite(exported, rewrites, rewritten)
            difference = self._difference(exported, rewritten) if matches else 0.0
            if not difference <= _MAX_REWRITE_DIFFERENCE:  # NaN is a difference too
                for file in list_files(exported):
                    shutil.copyfile(file, into / file.name)
                return f"discarded, the outputs would change by {difference:.1e}"
            return f"{matches} matches"

        key = f"rewrite-{short_digest((recipe.source, rewrites))}"
        detail = f"{recipe.name}: {', '.join(rewrites.names)}"
        return self._steps.run_cached(key, "rewrite", detail, work) / _GRAPH_NAME

    def _difference(self, before: Path, after: Path) -> float:
        """Return the largest output difference of two graphs, as a share of the largest output."""
        metadata, items = self._prepared.metadata, self._prepared.reference.items
        # Compare one item that is longer than any local attention window, and a padded batch.
        long = build_batch(items, Shape(items=1, tokens=min(metadata.max_tokens, _LONG_TOKENS)))
        batches = [long, collate(items[:_CHECK_BATCH_ITEMS])]
        return largest_difference(before, after, batches, metadata.mask_token)

    def _quantize(
        self,
        float_graph: Path,
        recipe: CandidateRecipe,
        scheme: Quantization,
        excluded_nodes: tuple[str, ...],
    ) -> Path:
        def work(into: Path) -> str:
            graph, items = into / _GRAPH_NAME, self._prepared.reference.items
            quantize(float_graph, scheme, graph, items=items, excluded_nodes=excluded_nodes)
            return format_size(*list_files(graph))

        key = f"int8-{short_digest((recipe.source, recipe.rewrites, scheme, excluded_nodes))}"
        details = [f"{recipe.name}: {type(scheme).__name__}"]
        details += [f"calibrated by {scheme.calibration}"] if isinstance(scheme, StaticInt8) else []
        if isinstance(scheme, SmoothedInt8) and scheme.gated_ranges == "token":
            details.append("a range per token in gated layers")
        details += [f"{len(excluded_nodes)} MatMuls excluded"] if excluded_nodes else []
        detail = ", ".join(details)
        return self._steps.run_cached(key, "quantize", detail, work) / _GRAPH_NAME


def build_graph_spec(recipe: CandidateRecipe, graph: Path, prepared: PreparedModel) -> GraphSpec:
    """Describe how to open the graph of a candidate that is not sealed yet."""
    metadata = prepared.metadata
    return GraphSpec(
        path=graph,
        device=recipe.device,
        precision=recipe.precision,
        engine=recipe.engine,
        options=_fit_buckets(recipe, metadata),
        head=metadata.head,
        mask_token=metadata.mask_token,
        max_pass_tokens=limit_pass_tokens(metadata.head, metadata.output_width, recipe.device),
        host_folder=graph.parent,  # stores compiled files: a build opens a graph several times
    )


def _fit_buckets(recipe: CandidateRecipe, metadata: CheckpointMetadata) -> EngineOptions:
    """Limit the buckets (padded batch shapes) of a recipe to the model's maximum length.

    On a GPU, also limit the items for a fill-mask model or a sparse encoder, and the padded tokens
    for a sparse encoder.
    """
    max_items = max_pass_tokens = math.inf
    if recipe.device is Device.GPU and metadata.head in (ModelHead.MASKS, ModelHead.SPARSE):
        # Each bucket keeps its output in memory. The output of such a model has one row per item,
        # with a value per vocabulary entry: a megabyte for XLM-RoBERTa.
        max_items = _MAX_VOCABULARY_ITEMS
        # Smaller batches are padded to a bucket, whose pass then computes scores of all its tokens.
        max_pass_tokens = (
            limit_pass_tokens(metadata.head, metadata.output_width, recipe.device) or math.inf
        )
    shapes = [(items, min(tokens, metadata.max_tokens)) for items, tokens in recipe.options.buckets]
    fitting = [
        (items, tokens)
        for items, tokens in shapes
        if items <= max_items and items * tokens <= max_pass_tokens
    ]
    return recipe.options.model_copy(update={"buckets": tuple(dict.fromkeys(fitting))})


def with_other_calibrations(recipe: CandidateRecipe) -> list[CandidateRecipe]:
    """Return copies of the recipe that choose the ranges of activations in other ways.

    Static int8 has its `other_calibrations`, smoothed int8 the range of each token for the neurons
    of gated layers.
    """
    scheme = recipe.quantization
    if isinstance(scheme, SmoothedInt8) and scheme.layout == "operators":
        return [replace(recipe, quantization=replace(scheme, gated_ranges="token"))]
    if not isinstance(scheme, StaticInt8):
        return []
    return [
        replace(recipe, quantization=replace(scheme, calibration=calibration))
        for calibration in recipe.other_calibrations
    ]
