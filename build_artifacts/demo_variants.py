"""Variants of the question-answering demo model: three sizes, each from PyTorch to int8.

The Demo view of the server's web page compares the variants. The two smaller sizes are pruned
without training; their ids state the pruned percentage. The alias `latest` of each size names its
int8 version. The aliases in VARIANTS name the slower versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from build_artifacts.demo import DemoModel, build_demo_model, find_demo_model
from build_artifacts.pipeline import BuildRequest, BuildResult, build
from build_artifacts.presets import PLAIN_ONNX
from build_artifacts.progress import BuildProgress
from build_artifacts.pruning.prune import Pruning
from build_artifacts.recipes import CPU_FP32, CandidateRecipe, TorchProgramRecipe
from deployments.artifacts.manifest import Gate
from deployments.artifacts.types import Device
from deployments.plan.changes import set_alias

CPU_TORCH = CandidateRecipe(
    name="cpu-torch",
    device=Device.CPU,
    precision="fp32",
    source=TorchProgramRecipe(dtype="float32"),
    engine="torch",
)
# Recipes by alias, slowest first. The int8 version needs no further alias: it is `latest`.
VARIANTS: Mapping[str, CandidateRecipe] = {
    "torch": CPU_TORCH,  # the baseline
    "onnx": PLAIN_ONNX,  # plain export with the defaults of ONNX Runtime
    "fp32": CPU_FP32,  # rewritten graph with one operator per attention
}
_MODEL = find_demo_model("hundredfold/minilm-squad")
_MAX_DROP = 5.0  # points that a pruned model may lose; the smallest model loses 4.0


def _prune(fraction: float) -> DemoModel:
    """Return the model with `fraction` of its heads and feed-forward channels pruned.

    The evaluation data of the accuracy gate also determines which heads and channels to prune.
    """
    return replace(
        _MODEL,
        id=f"{_MODEL.id}-pruned-{fraction * 100:.0f}",
        pruning=Pruning(fraction=fraction, data=_MODEL.evaluation),
        gate=Gate(metric_drop=_MAX_DROP),
    )


SIZES = (_MODEL, _prune(0.2), _prune(0.4))


def build_demo_variants(
    store: Path, progress: BuildProgress, *, with_gpu: bool
) -> Iterator[BuildResult]:
    """Build each size in all variants that `store` lacks, and yield every version.

    Also set the alias of each variant. Raises BuildError if a build fails.
    """
    for model in SIZES:
        yield build_demo_model(model, store, progress, with_gpu=with_gpu)
        for alias in VARIANTS:
            progress.message(f"building {model.id}@{alias}")
            built = build(plan_variant(model, alias, store), progress)
            set_alias(store, model.id, alias, built.manifest.version)
            yield built


def plan_variant(model: DemoModel, alias: str, store: Path) -> BuildRequest:
    """Return the request for one variant. Its build fails if the gate rejects the candidate."""
    request, candidate = model.request(store), VARIANTS[alias]
    return replace(
        request,
        recipe=replace(request.recipe, candidates=(candidate,), fallback=candidate),
        budget=replace(request.budget, tune_seconds=0.0),
        is_latest=False,
    )
