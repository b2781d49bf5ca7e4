"""What is built of every model, as data. Changing anything here gives every build a new version."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Literal

from deployments.manifest import Device

# Counts changes of the code of the steps that change what they write.
RECIPE_REVISION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRecipe:
    """How torch becomes an ONNX graph; equal recipes share one export."""

    dtype: Literal["float32", "float16"]
    opset: int | None = None  # None: the exporter's own choice
    fusions: Literal["cpu", "cuda"] | None = None  # ONNX Runtime operators put in at export


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Scheme:
    """Dynamic quantisation: int8 weights, activations measured at run time."""

    # Named, because onnxruntime turns the `Attention` of opset 23 into a broken `QAttention`.
    op_types: tuple[str, ...] = ("MatMul", "Gather")
    per_channel: bool = True
    # A zero point per channel cost no measurable time. On SST-2 dev, labels of minilm-sst2 agree
    # with fp32 for 98.5 % of sentences instead of 97.4 %; STS-B Spearman of MiniLM is 81.8 instead
    # of 81.9 (fp32: 82.0).
    symmetric_weights: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateRecipe:
    """One graph to try; it is sealed when it passes the gate."""

    name: str
    device: Device
    precision: Literal["fp32", "fp16", "int8"]
    export: ExportRecipe
    int8: Int8Scheme | None = None
    disabled_optimizers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """How near to the fp32 reference a candidate must be, over the probe texts."""

    cosine_mean: float = 0.985
    cosine_worst: float = 0.93
    top1_agreement: float = 0.98  # classifiers: share of decided probes with the same best label
    # Probability between the reference's two best labels from which a probe counts as decided.
    # Below it either label is right, and which one comes out is noise in any arithmetic.
    decided_gap: float = 0.1


# One `Attention` per layer, which is the fastest int8 graph on the CPUs measured so far.
_SDPA_FP32 = ExportRecipe(dtype="float32", opset=23)
# The CPU kernel of the fused operator is three times slower than Add and LayerNormalization.
_NO_SKIP_FUSION = ("SkipLayerNormFusion",)

CPU_INT8 = CandidateRecipe(
    name="cpu-int8",
    device=Device.CPU,
    precision="int8",
    export=_SDPA_FP32,
    int8=Int8Scheme(),
    disabled_optimizers=_NO_SKIP_FUSION,
)
CPU_FP32 = CandidateRecipe(
    name="cpu-fp32",
    device=Device.CPU,
    precision="fp32",
    export=_SDPA_FP32,
    disabled_optimizers=_NO_SKIP_FUSION,
)
GPU_FP16 = CandidateRecipe(
    name="gpu-fp16",
    device=Device.GPU,
    precision="fp16",
    export=ExportRecipe(dtype="float16", fusions="cuda"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Per lane the graphs to try, best first: the first that passes the gate is sealed."""

    lanes: tuple[tuple[CandidateRecipe, ...], ...] = ((CPU_INT8, CPU_FP32), (GPU_FP16,))
    gate: Gate = Gate()
    revision: int = RECIPE_REVISION

    def digest(self) -> str:
        """Equal for equal recipes only."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


RECIPE = Recipe()


def artifact_version(
    *, revision: str, adapter_revision: str | None, task: str, recipe: Recipe
) -> str:
    """The version a build will have, known before it starts: 12 hex digits."""
    parts = [revision, adapter_revision, task, recipe.digest()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]
