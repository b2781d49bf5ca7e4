"""The candidates that builds try, as data. Changing one gives every build a new version."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Literal, TypeAlias

from build_artifacts.errors import BuildError
from deployments.artifacts.manifest import EngineOptions, Gate
from deployments.artifacts.types import Device, KvCacheDtype, Precision

Dtype: TypeAlias = Literal["float32", "float16", "bfloat16"]

# Counts changes of the code of the steps that change what they write.
RECIPE_REVISION = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRecipe:
    """How torch becomes an ONNX graph; equal recipes share one export."""

    dtype: Dtype
    opset: int | None = None  # None: the exporter's own choice; 23: one Attention per layer
    fusions: Literal["cpu", "cuda"] | None = None  # ONNX Runtime operators put in at export


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRewrites:
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


CalibrationMethod: TypeAlias = Literal["minmax", "percentile", "entropy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticInt8:
    """Static quantisation: activation ranges from probe texts, written as Q/DQ pairs."""

    op_types: tuple[str, ...] = ("MatMul",)
    calibration: CalibrationMethod = "minmax"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightOnlyInt8:
    """int8 weights in blocks of `block`, activations rounded per token and block."""

    block: int = 128


@dataclass(frozen=True, slots=True)
class NncfInt8:
    """Static quantisation by NNCF: outliers moved into the weights, biases corrected afterwards.

    The form that OpenVINO runs fastest; ONNX Runtime runs it slowly.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchProgramRecipe:
    """A torch.export program instead of an ONNX graph."""

    dtype: Dtype


Quantization: TypeAlias = DynamicInt8 | StaticInt8 | WeightOnlyInt8 | NncfInt8


_AS_IT_COMES = EngineOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateRecipe:
    """One graph to try: what it is exported as, what is done to it, and how it is run."""

    name: str
    device: Device
    precision: Precision
    source: ExportRecipe | TorchProgramRecipe
    rewrites: GraphRewrites | None = None
    quantization: Quantization | None = None
    engine: Literal["onnxruntime", "openvino", "torch"] = "onnxruntime"
    options: EngineOptions = _AS_IT_COMES
    # Tried in order when the first calibration misses the gate; none of them changes the speed.
    other_calibrations: tuple[CalibrationMethod, ...] = ()


# The CPU kernel of the fused operator is three times slower than Add and LayerNormalization.
NO_SKIP_FUSION = EngineOptions(disabled_optimizers=("SkipLayerNormFusion",))
SDPA = ExportRecipe(dtype="float32", opset=23)
LEAN = GraphRewrites(names=("drop-empty-rows", "packed-heads"))

CPU_FP32 = CandidateRecipe(
    name="cpu-fp32",
    device=Device.CPU,
    precision="fp32",
    source=SDPA,
    rewrites=LEAN,
    options=NO_SKIP_FUSION,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderRecipe:
    """One graph of a model that generates: what onnxruntime-genai's model builder is asked for.

    Or `decoders/written/`, which knows no `options`. With `per_token_int8` either writes fp32, and
    `decoders/per_token_int8.py` makes it int8. The engine "torch" runs a program of transformers'
    own model (`decoders/torch_export.py`), in fp16 or fp32. The engine "transformers" runs that
    model itself (`decoders/checkpoint_export.py`), in fp16, fp32, bf16 or quantized by
    bitsandbytes. `run` has the attention, the place of keys and values, and the number of GPUs.
    """

    name: str
    device: Device
    precision: Precision
    engine: Literal["onnxruntime", "torch", "transformers"] = "onnxruntime"
    per_token_int8: bool = False
    # Keys and values in int8 (`decoders/int8_memory.py`); None: as attention computes them. Where
    # the gate is missed with them, the same is tried without.
    kv_cache_dtype: KvCacheDtype | None = None
    options: tuple[str, ...] = ()  # the builder's own, such as "block_size=16"
    # Tried in order instead of them when the gate is missed; each is more accurate and slower.
    other_options: tuple[tuple[str, ...], ...] = ()
    run: EngineOptions = _AS_IT_COMES


DECODER_FP32 = DecoderRecipe(name="cpu-fp32", device=Device.CPU, precision="fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRecipe:
    """What is tried per device, and what it takes to be sealed.

    `candidates` are in order of preference: the first of a device that passes is the portable
    default of hosts nobody tuned for. `fallback` is sealed when no other graph for the CPU passes.
    """

    candidates: tuple[CandidateRecipe, ...]
    fallback: CandidateRecipe = CPU_FP32
    decoders: tuple[DecoderRecipe, ...] = ()  # instead of `candidates`, of a model that generates
    decoder_fallback: DecoderRecipe = DECODER_FP32
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


def artifact_version(recipe: BuildRecipe, tools: Mapping[str, str], *inputs: str | None) -> str:
    """The version a build will have, known before it starts: 12 hex digits.

    `tools` are the versions of what builds; `inputs` say what it is built from: revisions of
    checkpoint, adapter and evaluation data, and the task.
    """
    parts = [recipe.digest(), dict(tools), inputs]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


_PLAIN = ExportRecipe(dtype="float32", opset=18)

CPU_INT8 = replace(CPU_FP32, name="cpu-int8", precision="int8", quantization=DynamicInt8())
# The winner from 256 tokens on.
CPU_INT8_FLASH = replace(
    CPU_INT8, name="cpu-int8-flash", rewrites=GraphRewrites(names=(*LEAN.names, "flash-when-full"))
)
CPU_INT8_PLAIN = replace(CPU_INT8, name="cpu-int8-plain", source=_PLAIN, rewrites=None)
# The recipe that most people use: fuse everything, then quantise.
CPU_INT8_FUSED = replace(
    CPU_INT8_PLAIN,
    name="cpu-int8-fused",
    source=ExportRecipe(dtype="float32", fusions="cpu"),
    options=EngineOptions(),
)
CPU_INT8_STATIC = replace(
    CPU_INT8,
    name="cpu-int8-static",
    quantization=StaticInt8(),
    other_calibrations=("percentile", "entropy"),
)
CPU_INT8_WEIGHTS = replace(CPU_INT8, name="cpu-int8-weights", quantization=WeightOnlyInt8())
# OpenVINO prepares kernels for every shape it meets, which costs as much as a pass: batches are
# padded up to one of these, and it wins where that padding costs less than it gains.
_FEW_SHAPES = EngineOptions(
    buckets=tuple(
        (items, tokens)
        for items in (1, 2, 4, 8, 16, 32)
        for tokens in (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
    ),
    inference_precision="bf16",
)
OPENVINO_INT8 = replace(
    CPU_INT8,
    name="openvino-int8",
    rewrites=None,
    quantization=StaticInt8(),
    engine="openvino",
    options=_FEW_SHAPES,
)
OPENVINO_INT8_SMOOTH = replace(
    OPENVINO_INT8, name="openvino-int8-smooth", source=_PLAIN, quantization=NncfInt8()
)
OPENVINO_BF16 = replace(OPENVINO_INT8, name="openvino-bf16", precision="bf16", quantization=None)
GPU_FP16 = CandidateRecipe(
    name="gpu-fp16",
    device=Device.GPU,
    precision="fp16",
    source=ExportRecipe(dtype="float16", fusions="cuda"),
)
# Shapes of the GPU encoder: padding is cheap there, launching kernels is not.
_BUCKETS = tuple((items, tokens) for items in (1, 8, 32) for tokens in (32, 128, 512))
# The same graph with memory bound per shape, on CUDA captured as one CUDA graph per shape.
GPU_FP16_BOUND = replace(GPU_FP16, name="gpu-fp16-bound", options=EngineOptions(buckets=_BUCKETS))
GPU_FP16_TENSORRT = replace(
    GPU_FP16,
    name="gpu-fp16-tensorrt",
    source=ExportRecipe(dtype="float16", opset=18),
    options=EngineOptions(
        providers=("TensorrtExecutionProvider", "CUDAExecutionProvider"), buckets=_BUCKETS
    ),
)
GPU_FP16_TORCH = replace(
    GPU_FP16, name="gpu-fp16-torch", source=TorchProgramRecipe(dtype="float16"), engine="torch"
)
GPU_FP16_COMPILED = replace(
    GPU_FP16_TORCH,
    name="gpu-fp16-compiled",
    options=EngineOptions(compile=True, buckets=_BUCKETS),
)

# SmolLM2-135M-Instruct from a Q4_1 file, whose fp32 perplexity is 30.5 here: of next tokens 97 %
# agree by row, with perplexity 31.3 (unsmoothed 94 % and 31.6); in blocks 99.9 %, with 31.0.
DECODER_INT8 = DecoderRecipe(
    name="cpu-int8", device=Device.CPU, precision="int8", per_token_int8=True, kv_cache_dtype="int8"
)
DECODER_INT8_BLOCKS = DecoderRecipe(name="cpu-int8-blocks", device=Device.CPU, precision="int8")
# The same model, rounded a second time: 70 % and 40.4, with `k_quant_mixed` 89 % and 36.0. Larger
# models, and those that were not rounded before, lose less.
DECODER_INT4 = DecoderRecipe(
    name="cpu-int4",
    device=Device.CPU,
    precision="int4",
    kv_cache_dtype="int8",
    other_options=(("algo_config=k_quant_mixed",),),
)
DECODER_FP16 = DecoderRecipe(name="gpu-fp16", device=Device.GPU, precision="fp16")
DECODER_FP16_TORCH = replace(DECODER_FP16, name="gpu-fp16-torch", engine="torch")
# For what programs and graphs cannot do: bitsandbytes' weights, several GPUs, memory on the host.
DECODER_FP16_TRANSFORMERS = replace(
    DECODER_FP16, name="gpu-fp16-transformers", engine="transformers"
)
# Half and a quarter of the memory; what weights multiply stays in fp16.
DECODER_GPU_INT8 = replace(DECODER_FP16, name="gpu-int8", precision="int8")
DECODER_GPU_INT4 = replace(DECODER_FP16, name="gpu-int4", precision="int4")
DECODER_GPU_INT8_BNB = replace(
    DECODER_FP16_TRANSFORMERS, name="gpu-int8-bitsandbytes", precision="int8"
)
DECODER_GPU_NF4_BNB = replace(
    DECODER_FP16_TRANSFORMERS, name="gpu-nf4-bitsandbytes", precision="nf4"
)

# The few that won on the hosts measured so far: a build of a minute.
QUICK = BuildRecipe(
    candidates=(CPU_INT8, CPU_INT8_PLAIN, GPU_FP16),
    decoders=(DECODER_INT8, DECODER_INT8_BLOCKS, DECODER_FP16),
    keep=1,
)
# Everything: minutes, and the fastest graph for the host at hand.
FULL = BuildRecipe(
    candidates=(
        CPU_INT8,
        CPU_INT8_FLASH,
        OPENVINO_INT8,
        CPU_INT8_PLAIN,
        CPU_INT8_STATIC,
        CPU_INT8_FUSED,
        OPENVINO_INT8_SMOOTH,
        OPENVINO_BF16,
        CPU_INT8_WEIGHTS,
        GPU_FP16,
        GPU_FP16_BOUND,
        GPU_FP16_TENSORRT,
        GPU_FP16_TORCH,
        GPU_FP16_COMPILED,
    ),
    decoders=(
        DECODER_INT8,
        DECODER_INT4,
        DECODER_INT8_BLOCKS,
        DECODER_FP16,
        DECODER_FP16_TORCH,
    ),
)


# For GPUs with too little memory for a model in fp16.
LOW_MEMORY = replace(
    FULL,
    decoders=(
        DECODER_INT8,
        DECODER_INT4,
        DECODER_INT8_BLOCKS,
        DECODER_GPU_INT4,
        DECODER_GPU_NF4_BNB,
        DECODER_GPU_INT8,
        DECODER_GPU_INT8_BNB,
    ),
)

# By what the command line calls them.
SEARCH_PRESETS: Mapping[str, BuildRecipe] = {"full": FULL, "quick": QUICK, "low-memory": LOW_MEMORY}


def with_gpu_placement(
    recipe: BuildRecipe, *, tensor_parallel_size: int, kv_offload: bool
) -> BuildRecipe:
    """Replace the GPU candidates of decoders by one for several GPUs or with KV offload.

    Only transformers supports either. Raises BuildError for a recipe that quantizes weights for
    GPUs, because that candidate would not.
    """
    if tensor_parallel_size == 1 and not kv_offload:
        return recipe
    if any(r.device is Device.GPU and r.precision != "fp16" for r in recipe.decoders):
        raise BuildError(
            "`--search low-memory` quantizes weights for one GPU only; it excludes "
            "`--tensor-parallel-size` above 1 and `--offload-kv-cache`, which are built in fp16",
            hint="omit `--search low-memory`, or both other options",
        )
    name = "gpu-fp16"
    if tensor_parallel_size > 1:
        name += f"-x{tensor_parallel_size}"
    if kv_offload:
        name += "-offloaded"
    for_gpu = replace(
        DECODER_FP16_TRANSFORMERS,
        name=name,
        run=EngineOptions(tensor_parallel_size=tensor_parallel_size, kv_offload=kv_offload),
    )
    others = (r for r in recipe.decoders if r.device is not Device.GPU)
    return replace(recipe, decoders=(*others, for_gpu))
