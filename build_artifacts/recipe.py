"""What is built of every model, as data. Changing anything here gives every build a new version."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Literal, TypeAlias

from deployments.manifest import Device, EngineOptions, Gate

Dtype: TypeAlias = Literal["float32", "float16"]

# Counts changes of the code of the steps that change what they write.
RECIPE_REVISION = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRecipe:
    """How torch becomes an ONNX graph; equal recipes share one export."""

    dtype: Dtype
    opset: int | None = None  # None: the exporter's own choice; 23: one Attention per layer
    fusions: Literal["cpu", "cuda"] | None = None  # ONNX Runtime operators put in at export


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrites:
    """Changes to a graph that leave its answers alone, by their names in `steps/rewrite.py`."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicInt8:
    """Dynamic quantisation: int8 weights, activations measured at run time."""

    # Named, because onnxruntime turns the `Attention` of opset 23 into a broken `QAttention`.
    op_types: tuple[str, ...] = ("MatMul", "Gather")
    # A zero point per channel cost no measurable time. On SST-2 dev, labels of minilm-sst2 agree
    # with fp32 for 98.5 % of sentences instead of 97.4 %; STS-B Spearman of MiniLM is 81.8 instead
    # of 81.9 (fp32: 82.0).
    symmetric_weights: bool = False


Calibration: TypeAlias = Literal["minmax", "percentile", "entropy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticInt8:
    """Static quantisation: activation ranges from probe texts, written as Q/DQ pairs."""

    op_types: tuple[str, ...] = ("MatMul",)
    calibration: Calibration = "minmax"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightOnlyInt8:
    """int8 weights in blocks of `block`, activations rounded per token and block."""

    block: int = 128


@dataclass(frozen=True, slots=True)
class SmoothInt8:
    """Static quantisation by NNCF: outliers moved into the weights, biases corrected afterwards.

    The form that OpenVINO runs fastest; ONNX Runtime runs it slowly.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchProgram:
    """A torch.export program instead of an ONNX graph."""

    dtype: Dtype


Quantisation: TypeAlias = DynamicInt8 | StaticInt8 | WeightOnlyInt8 | SmoothInt8


_AS_IT_COMES = EngineOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateRecipe:
    """One graph to try: what it is exported as, what is done to it, and how it is run."""

    name: str
    device: Device
    precision: Literal["fp32", "bf16", "fp16", "int8"]
    source: ExportRecipe | TorchProgram
    rewrites: Rewrites | None = None
    quantisation: Quantisation | None = None
    engine: Literal["onnxruntime", "openvino", "torch"] = "onnxruntime"
    options: EngineOptions = _AS_IT_COMES
    # Tried in order when the first calibration misses the gate; none of them changes the speed.
    other_calibrations: tuple[Calibration, ...] = ()


# The CPU kernel of the fused operator is three times slower than Add and LayerNormalization.
_NO_SKIP_FUSION = EngineOptions(disabled_optimizers=("SkipLayerNormFusion",))
_SDPA = ExportRecipe(dtype="float32", opset=23)
_PLAIN = ExportRecipe(dtype="float32", opset=18)
_LEAN = Rewrites(names=("drop-empty-rows", "packed-heads"))

CPU_FP32 = CandidateRecipe(
    name="cpu-fp32",
    device=Device.CPU,
    precision="fp32",
    source=_SDPA,
    rewrites=_LEAN,
    options=_NO_SKIP_FUSION,
)
CPU_INT8 = CandidateRecipe(
    name="cpu-int8",
    device=Device.CPU,
    precision="int8",
    source=_SDPA,
    rewrites=_LEAN,
    quantisation=DynamicInt8(),
    options=_NO_SKIP_FUSION,
)
# The winner from 256 tokens on.
CPU_INT8_FLASH = CandidateRecipe(
    name="cpu-int8-flash",
    device=Device.CPU,
    precision="int8",
    source=_SDPA,
    rewrites=Rewrites(names=(*_LEAN.names, "flash-when-full")),
    quantisation=DynamicInt8(),
    options=_NO_SKIP_FUSION,
)
CPU_INT8_PLAIN = CandidateRecipe(
    name="cpu-int8-plain",
    device=Device.CPU,
    precision="int8",
    source=_PLAIN,
    quantisation=DynamicInt8(),
    options=_NO_SKIP_FUSION,
)
# The recipe that most people use: fuse everything, then quantise.
CPU_INT8_FUSED = CandidateRecipe(
    name="cpu-int8-fused",
    device=Device.CPU,
    precision="int8",
    source=ExportRecipe(dtype="float32", fusions="cpu"),
    quantisation=DynamicInt8(),
)
CPU_INT8_STATIC = CandidateRecipe(
    name="cpu-int8-static",
    device=Device.CPU,
    precision="int8",
    source=_SDPA,
    rewrites=_LEAN,
    quantisation=StaticInt8(),
    other_calibrations=("percentile", "entropy"),
    options=_NO_SKIP_FUSION,
)
CPU_INT8_WEIGHTS = CandidateRecipe(
    name="cpu-int8-weights",
    device=Device.CPU,
    precision="int8",
    source=_SDPA,
    rewrites=_LEAN,
    quantisation=WeightOnlyInt8(),
    options=_NO_SKIP_FUSION,
)
# OpenVINO prepares kernels for every shape it meets, which costs as much as a pass: batches are
# padded up to one of these, and it wins where that padding costs less than it gains.
_FEW_SHAPES = EngineOptions(
    buckets=tuple(
        (items, tokens)
        for items in (1, 2, 4, 8, 16, 32)
        for tokens in (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
    ),
    float_rest="bf16",
)
OPENVINO_INT8 = CandidateRecipe(
    name="openvino-int8",
    device=Device.CPU,
    precision="int8",
    source=_SDPA,
    quantisation=StaticInt8(),
    engine="openvino",
    options=_FEW_SHAPES,
)
OPENVINO_INT8_SMOOTH = replace(
    OPENVINO_INT8, name="openvino-int8-smooth", source=_PLAIN, quantisation=SmoothInt8()
)
OPENVINO_BF16 = CandidateRecipe(
    name="openvino-bf16",
    device=Device.CPU,
    precision="bf16",
    source=_SDPA,
    engine="openvino",
    options=_FEW_SHAPES,
)
GPU_FP16 = CandidateRecipe(
    name="gpu-fp16",
    device=Device.GPU,
    precision="fp16",
    source=ExportRecipe(dtype="float16", fusions="cuda"),
)
# Shapes of the GPU lane: padding is cheap there, launching kernels is not.
_BUCKETS = tuple((items, tokens) for items in (1, 8, 32) for tokens in (32, 128, 512))
# The same graph with memory bound per shape, on CUDA captured as one CUDA graph per shape.
GPU_FP16_BOUND = replace(GPU_FP16, name="gpu-fp16-bound", options=EngineOptions(buckets=_BUCKETS))
GPU_FP16_TENSORRT = CandidateRecipe(
    name="gpu-fp16-tensorrt",
    device=Device.GPU,
    precision="fp16",
    source=ExportRecipe(dtype="float16", opset=18),
    options=EngineOptions(
        providers=("TensorrtExecutionProvider", "CUDAExecutionProvider"), buckets=_BUCKETS
    ),
)
GPU_FP16_TORCH = CandidateRecipe(
    name="gpu-fp16-torch",
    device=Device.GPU,
    precision="fp16",
    source=TorchProgram(dtype="float16"),
    engine="torch",
)
GPU_FP16_COMPILED = replace(
    GPU_FP16_TORCH,
    name="gpu-fp16-compiled",
    options=EngineOptions(compile=True, buckets=_BUCKETS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What is tried per device, and what it takes to be sealed.

    `candidates` are in order of preference: the first of a device that passes is the portable
    default of hosts nobody tuned for. `fallback` is sealed when no other graph for the CPU passes.
    """

    candidates: tuple[CandidateRecipe, ...]
    fallback: CandidateRecipe = CPU_FP32
    gate: Gate = field(default_factory=Gate)
    keep: int = 3  # graphs per device that may be sealed, the fastest that pass
    revision: int = RECIPE_REVISION

    def of(self, device: Device) -> tuple[CandidateRecipe, ...]:
        """The candidates for `device`."""
        return tuple(c for c in self.candidates if c.device is device)

    def digest(self) -> str:
        """Equal for equal recipes only."""
        return digest_of(self)


def digest_of(recipe: object) -> str:
    """Hex digest of a recipe or a part of one; parts of different types differ."""
    told = json.dumps(recipe, sort_keys=True, default=_plain)
    return hashlib.sha256(told.encode()).hexdigest()


def _plain(value: object) -> object:
    if isinstance(value, EngineOptions | Gate):
        return value.model_dump()
    if is_dataclass(value):
        told = {f.name: getattr(value, f.name) for f in fields(value)}
        return [type(value).__name__, told]
    raise TypeError(f"a recipe cannot hold {value!r}; this is a bug")


# The few that won on the hosts measured so far: a build of a minute.
QUICK = Recipe(candidates=(CPU_INT8, CPU_INT8_FLASH, CPU_INT8_PLAIN, GPU_FP16), keep=2)
# Everything: minutes, and the fastest graph for the host at hand.
FULL = Recipe(
    candidates=(
        CPU_INT8,
        CPU_INT8_FLASH,
        CPU_INT8_PLAIN,
        CPU_INT8_FUSED,
        CPU_INT8_STATIC,
        CPU_INT8_WEIGHTS,
        OPENVINO_INT8,
        OPENVINO_INT8_SMOOTH,
        OPENVINO_BF16,
        GPU_FP16,
        GPU_FP16_BOUND,
        GPU_FP16_TENSORRT,
        GPU_FP16_TORCH,
        GPU_FP16_COMPILED,
    )
)
# By the name that the command line gives them.
SEARCHES: Mapping[str, Recipe] = {"full": FULL, "quick": QUICK}


def artifact_version(recipe: Recipe, tools: Mapping[str, str], *inputs: str | None) -> str:
    """The version a build will have, known before it starts: 12 hex digits.

    `tools` are the versions of what builds; `inputs` say what it is built from: revisions of
    checkpoint, adapter and evaluation data, and the task.
    """
    parts = [recipe.digest(), dict(tools), inputs]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
