"""From a candidate's recipe to its graph; what candidates share is made once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from build_artifacts.recipes import (
    CandidateRecipe,
    ExportRecipe,
    GraphRewrites,
    Quantization,
    StaticInt8,
    TorchProgramRecipe,
    digest_of,
)
from build_artifacts.search.preparation import PreparedModel
from build_artifacts.steps.export import export
from build_artifacts.steps.program import save_program
from build_artifacts.steps.quantize import quantize
from build_artifacts.steps.rewrite import largest_difference, rewrite
from build_artifacts.steps.sensitivity import rank_by_sensitivity
from build_artifacts.storage.workspace import StepRunner, megabytes
from deployments.batching.batches import collate
from deployments.tuning.costs import Shape
from deployments.tuning.measure import build_batch

_GRAPH_NAME = "graph.onnx"
_LONG_TOKENS = 1_024
_CHECK_BATCH_ITEMS = 4
_SAME = 1e-3  # of the largest answer: other kernels, other order of sums
_PROGRAM_NAME = "program.safetensors"
_ORDER_NAME = "order.json"


class CandidateGraphs:
    """The graphs of one build."""

    def __init__(self, steps: StepRunner, prepared: PreparedModel) -> None:
        self._steps = steps
        self._prepared = prepared

    def graph(self, recipe: CandidateRecipe, kept: Sequence[str] = ()) -> Path:
        """The file of the candidate, the nodes `kept` left out of quantisation.

        Raises UnsupportedModel when the model cannot be exported that way.
        """
        if isinstance(recipe.source, TorchProgramRecipe):
            return self._program(recipe.source)
        floating = self.floating(recipe)
        if recipe.quantization is None:
            return floating
        return self._quantised(floating, recipe, recipe.quantization, tuple(kept))

    def floating(self, recipe: CandidateRecipe) -> Path:
        """The candidate's graph before quantisation."""
        assert isinstance(recipe.source, ExportRecipe), "programs are not quantised; a bug"
        exported = self._export(recipe.source)
        return self._rewritten(exported, recipe, recipe.rewrites) if recipe.rewrites else exported

    def sensitive_nodes(self, recipe: CandidateRecipe) -> list[str]:
        """Nodes of the candidate's graph that quantisation hurts, the most hurt first."""
        floating = self.floating(recipe)

        def work(into: Path) -> str:
            items = self._prepared.reference.items
            order = rank_by_sensitivity(floating, items, self._prepared.metadata.mask_token)
            (into / _ORDER_NAME).write_text(json.dumps(order), encoding="utf-8")
            return f"{len(order)} products ranked"

        key = f"sensitivity-{_short(recipe.source, recipe.rewrites)}"
        detail = f"{recipe.name}: what int8 hurts most"
        found = self._steps.run_cached(key, "rank", detail, work) / _ORDER_NAME
        order: list[str] = json.loads(found.read_bytes())
        return order

    def _program(self, source: TorchProgramRecipe) -> Path:
        def work(into: Path) -> str:
            path = into / _PROGRAM_NAME
            save_program(self._prepared.model(source.dtype), self._prepared.metadata, path)
            return megabytes(path)

        detail = f"{source.dtype} torch program"
        return (
            self._steps.run_cached(f"program-{source.dtype}", "export", detail, work)
            / _PROGRAM_NAME
        )

    def _export(self, source: ExportRecipe) -> Path:
        def work(into: Path) -> str:
            model = self._prepared.model(source.dtype)
            return megabytes(export(model, self._prepared.metadata, source, into / _GRAPH_NAME))

        fused = f", fused for {source.fusions}" if source.fusions else ""
        opset = f", opset {source.opset}" if source.opset else ""
        detail = f"{source.dtype} graph{opset}{fused}"
        return (
            self._steps.run_cached(f"export-{_short(source)}", "export", detail, work) / _GRAPH_NAME
        )

    def _rewritten(self, exported: Path, recipe: CandidateRecipe, rewrites: GraphRewrites) -> Path:
        def work(into: Path) -> str:
            rewritten = into / _GRAPH_NAME
            places = rewrite(exported, rewrites, rewritten)
            difference = self._difference(exported, rewritten) if places else 0.0
            if not difference <= _SAME:  # NaN is not the same either
                shutil.copyfile(exported, rewritten)
                return f"would change the answers by {difference:.1e}: left as exported"
            return f"{places} places"

        key = f"rewrite-{_short(recipe.source, rewrites)}"
        detail = f"{recipe.name}: {', '.join(rewrites.names)}"
        return self._steps.run_cached(key, "rewrite", detail, work) / _GRAPH_NAME

    def _difference(self, before: Path, after: Path) -> float:
        """How far the answers of two graphs are apart, as a share of the largest."""
        metadata, items = self._prepared.metadata, self._prepared.reference.items
        # Alone at a length beyond any window of local attention, and in padded company.
        long = build_batch(items, Shape(items=1, tokens=min(metadata.max_tokens, _LONG_TOKENS)))
        batches = [long, collate(items[:_CHECK_BATCH_ITEMS])]
        return largest_difference(before, after, batches, metadata.mask_token)

    def _quantised(
        self, floating: Path, recipe: CandidateRecipe, scheme: Quantization, kept: tuple[str, ...]
    ) -> Path:
        def work(into: Path) -> str:
            graph = into / _GRAPH_NAME
            quantize(
                floating, scheme, graph, items=self._prepared.reference.items, excluded_nodes=kept
            )
            return megabytes(graph)

        key = f"int8-{_short(recipe.source, recipe.rewrites, scheme, kept)}"
        how = f", calibrated by {scheme.calibration}" if isinstance(scheme, StaticInt8) else ""
        left = f", {len(kept)} products kept" if kept else ""
        detail = f"{recipe.name}: {type(scheme).__name__}{how}{left}"
        return self._steps.run_cached(key, "quantise", detail, work) / _GRAPH_NAME


def with_other_calibrations(recipe: CandidateRecipe) -> list[CandidateRecipe]:
    """The recipe with each of its other calibrations."""
    scheme = recipe.quantization
    if not isinstance(scheme, StaticInt8):
        return []
    return [
        replace(recipe, quantization=replace(scheme, calibration=calibration))
        for calibration in recipe.other_calibrations
    ]


def _short(*parts: object) -> str:
    return digest_of(parts)[:12]
