"""Candidates of builds, as data. A change to a recipe gives its builds a new version."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Literal, TypeAlias

from deployments.artifacts.manifest import EngineOptions, Gate
from deployments.artifacts.types import Device, EngineName, KvCacheDtype, Precision

Dtype: TypeAlias = Literal["float32", "float16", "bfloat16"]

# Increase this if a code change alters the output of a build step.
RECIPE_REVISION = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRecipe:
    """Export from torch to ONNX; equal recipes share one export."""

    dtype: Dtype
    opset: int | None = None  # None: the exporter's default; 23: one Attention node per layer
    fusions: Literal["cpu", "cuda"] | None = None  # provider whose fused operators the export uses


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRewrites:
    """Graph changes that preserve the output, by their names in `steps/rewrite.py`."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicInt8:
    """Dynamic quantization: int8 weights, activation ranges measured at run time.

    A range covers all texts of a batch, so the output for a text depends on the other texts.
    """

    # By default, onnxruntime also quantizes the `Attention` of opset 23, to a broken `QAttention`.
    op_types: tuple[str, ...] = ("MatMul", "Gather")
    # Asymmetric weights, with a zero point per channel, cost no measurable time. On SST-2 dev, they
    # raise the label agreement of minilm-sst2 with fp32 from 97.4 % to 98.5 %. STS-B Spearman of
    # MiniLM is 81.8, compared with 81.9 for symmetric weights and 82.0 for fp32.
    symmetric_weights: bool = False


CalibrationMethod: TypeAlias = Literal["minmax", "percentile", "entropy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticInt8:
    """Static quantization: activation ranges from probe texts, stored as Q/DQ pairs."""

    op_types: tuple[str, ...] = ("MatMul",)
    calibration: CalibrationMethod = "minmax"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightOnlyInt8:
    """int8 weights in blocks of `block` values; activations are quantized per token and block."""

    block: int = 128


@dataclass(frozen=True, slots=True)
class NncfInt8:
    """Static quantization by NNCF: moves outliers into the weights, then corrects the biases.

    OpenVINO runs this form fastest; ONNX Runtime runs it slowly.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SmoothedInt8:
    """Static quantization of a graph whose activations are smoothed first (`smoothing/`).

    The output of a text does not depend on the batch.
    """

    # "operators": ONNX Runtime's MatMulIntegerToFloat. "pairs": QuantizeLinear, DequantizeLinear
    # and MatMul, which OpenVINO requires and which take ONNX Runtime 4 to 9 % longer.
    layout: Literal["operators", "pairs"] = "operators"


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchProgramRecipe:
    """A torch.export program instead of an ONNX graph."""

    dtype: Dtype


Quantization: TypeAlias = DynamicInt8 | StaticInt8 | SmoothedInt8 | WeightOnlyInt8 | NncfInt8

_DEFAULT_OPTIONS = EngineOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateRecipe:
    """One candidate graph: its export, rewrites, quantization and engine."""

    name: str
    device: Device
    precision: Precision
    source: ExportRecipe | TorchProgramRecipe
    rewrites: GraphRewrites | None = None
    quantization: Quantization | None = None
    engine: EngineName = "onnxruntime"
    options: EngineOptions = _DEFAULT_OPTIONS
    # Fallbacks in order if the first calibration fails the gate; the speed is the same.
    other_calibrations: tuple[CalibrationMethod, ...] = ()


# On CPUs, SkipLayerNormalization is three times slower than Add and LayerNormalization.
NO_SKIP_FUSION = EngineOptions(disabled_optimizers=("SkipLayerNormFusion",))
SDPA = ExportRecipe(dtype="float32", opset=23)
LEAN = GraphRewrites(names=("drop-empty-rows", "packed-heads", "matmul-pooling", "direct-mask"))

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
    """One candidate of a generative model.

    `engine` selects the export:

    - "onnxruntime": a graph from onnxruntime-genai's model builder or from `decoders/graphs/`. Only
      the model builder supports `options`. With `per_token_int8`, the graph is exported in fp32 and
      quantized by `decoders/per_token_int8.py`.
    - "torch": a program of the transformers model in fp16 or fp32 (`decoders/torch_export.py`).
    - "transformers": the checkpoint in fp16, bf16 or fp32, or quantized by bitsandbytes.

    On the last two engines, `run` sets attention, KV cache, tensor parallelism and torch.compile.
    """

    name: str
    device: Device
    precision: Precision
    engine: Literal["onnxruntime", "torch", "transformers"] = "onnxruntime"
    per_token_int8: bool = False
    # None: dtype of the attention. If the gate rejects a candidate with an int8 KV cache, with all
    # its `other_options` too, the build tries the last of these options again with None.
    kv_cache_dtype: KvCacheDtype | None = None
    options: tuple[str, ...] = ()  # options of the model builder, such as "block_size=16"
    # Fallbacks for `options` in order if the gate fails; each is more accurate, but may be slower.
    other_options: tuple[tuple[str, ...], ...] = ()
    run: EngineOptions = _DEFAULT_OPTIONS


DECODER_FP32 = DecoderRecipe(name="cpu-fp32", device=Device.CPU, precision="fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRecipe:
    """Candidates per device and the limits of the accuracy gate.

    Candidates are in order of preference. A build that measures their speed puts the fastest first.
    The first accepted candidate of a device is the default of untuned hosts. If no CPU candidate
    passes the gate, the build tries `fallback`, or `decoder_fallback` for a generative model.
    """

    candidates: tuple[CandidateRecipe, ...]
    fallback: CandidateRecipe = CPU_FP32
    decoders: tuple[DecoderRecipe, ...] = ()  # for generative models, instead of `candidates`
    decoder_fallback: DecoderRecipe = DECODER_FP32
    gate: Gate = field(default_factory=Gate)
    keep: int = 3  # maximum number of sealed graphs per device: the first that the gate accepts
    revision: int = RECIPE_REVISION

    def of(self, device: Device) -> tuple[CandidateRecipe, ...]:
        """Return the candidates for `device`."""
        return tuple(c for c in self.candidates if c.device is device)

    def digest(self) -> str:
        """Return a digest that differs for different recipes."""
        return compute_digest(self)


def compute_digest(recipe: object) -> str:
    """Return the hex digest of a recipe or of a part of a recipe, with class and field names."""
    text = json.dumps(recipe, sort_keys=True, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: object) -> object:
    if isinstance(value, EngineOptions | Gate):
        return value.model_dump()
    if is_dataclass(value):
        values = {f.name: getattr(value, f.name) for f in fields(value)}
        return [type(value).__name__, values]
    raise AssertionError(f"bug: {value!r} in a recipe")


def artifact_version(recipe: BuildRecipe, tools: Mapping[str, str], *inputs: str | None) -> str:
    """Compute the version of a build before it starts: 12 hex digits.

    `tools` are the versions of the build libraries. `inputs` are all other facts that change the
    artifact: revisions of checkpoint and adapter, task, evaluation data, pruning.
    """
    parts = [recipe.digest(), dict(tools), inputs]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


_PLAIN = ExportRecipe(dtype="float32", opset=18)

CPU_INT8 = replace(CPU_FP32, name="cpu-int8", precision="int8", quantization=SmoothedInt8())
# Fastest candidate for batches without padding whose texts have 256 tokens or more.
CPU_INT8_FLASH = replace(
    CPU_INT8, name="cpu-int8-flash", rewrites=GraphRewrites(names=(*LEAN.names, "flash-when-full"))
)
CPU_INT8_DYNAMIC = replace(CPU_INT8, name="cpu-int8-dynamic", quantization=DynamicInt8())
CPU_INT8_PLAIN = replace(CPU_INT8_DYNAMIC, name="cpu-int8-plain", source=_PLAIN, rewrites=None)
# The usual recipe of other projects for ONNX Runtime: all fusions for the CPU provider, including
# SkipLayerNormalization, then dynamic quantization.
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
# OpenVINO compiles kernels for every new shape, which takes as long as a forward pass. Batches are
# therefore padded to one of these shapes. On a CPU with bf16 instructions, operators that are not
# int8 run in bf16: a MiniLM without int8 takes 0.5 to 0.6 times as long in bf16 as in fp32.
_OPENVINO_OPTIONS = EngineOptions(
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
    quantization=SmoothedInt8(layout="pairs"),
    engine="openvino",
    options=_OPENVINO_OPTIONS,
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
# Shapes of CUDA graphs. A batch above 4,096 tokens runs without a CUDA graph, because padding would
# cost more time than the graph saves. The largest shape is captured first, because the smaller
# shapes then reuse the memory of its intermediate results.
_BUCKETS = tuple(
    (items, tokens)
    for tokens in (512, 256, 128, 64, 32)
    for items in (128, 64, 32, 16, 8, 4, 2, 1)
    if items * tokens <= 4_096
)
# Shapes of CUDA graphs of compiled candidates: few, because each takes half a minute or longer.
_COMPILED_BUCKETS = tuple((items, tokens) for items in (1, 8, 32) for tokens in (32, 128, 512))
# The graph of GPU_FP16 with IO binding per shape. CUDA captures one CUDA graph per shape.
GPU_FP16_BOUND = replace(GPU_FP16, name="gpu-fp16-bound", options=EngineOptions(buckets=_BUCKETS))
GPU_FP16_TENSORRT = replace(
    GPU_FP16,
    name="gpu-fp16-tensorrt",
    source=ExportRecipe(dtype="float16", opset=18),
    options=EngineOptions(
        providers=("TensorrtExecutionProvider", "CUDAExecutionProvider"), buckets=_COMPILED_BUCKETS
    ),
)
GPU_FP16_TORCH = replace(
    GPU_FP16_BOUND,
    name="gpu-fp16-torch",
    source=TorchProgramRecipe(dtype="float16"),
    engine="torch",
)
GPU_FP16_COMPILED = replace(
    GPU_FP16_TORCH,
    name="gpu-fp16-compiled",
    options=EngineOptions(compile=True, buckets=_COMPILED_BUCKETS),
)

# Measured with SmolLM2-135M-Instruct from a Q4_1 file (fp32 perplexity 30.5). int8 per token: 97 %
# of next tokens agree with fp32, perplexity 31.3. Without smoothing: 94 % and 31.6. int8 in blocks:
# 99.9 % and 31.0.
DECODER_INT8 = DecoderRecipe(
    name="cpu-int8", device=Device.CPU, precision="int8", per_token_int8=True, kv_cache_dtype="int8"
)
DECODER_INT8_BLOCKS = DecoderRecipe(name="cpu-int8-blocks", device=Device.CPU, precision="int8")
# Measured with the same Q4_1 file, whose weights are thus quantized twice: 70 % of next tokens
# agree with fp32, perplexity 40.4. With `k_quant_mixed`: 89 % and 36.0. Larger models and
# unquantized checkpoints lose less.
DECODER_INT4 = DecoderRecipe(
    name="cpu-int4",
    device=Device.CPU,
    precision="int4",
    kv_cache_dtype="int8",
    other_options=(("algo_config=k_quant_mixed",),),
)
DECODER_FP16 = DecoderRecipe(name="gpu-fp16", device=Device.GPU, precision="fp16")
DECODER_FP16_TORCH = replace(DECODER_FP16, name="gpu-fp16-torch", engine="torch")
# DECODER_FP16_TORCH with decode steps compiled by torch.compile, which merges kernels. The build
# seals this candidate only if it is the fastest: compilation takes a minute at each start.
DECODER_FP16_COMPILED = replace(
    DECODER_FP16_TORCH, name="gpu-fp16-compiled", run=EngineOptions(compile=True)
)
# Only the engine `transformers` supports bitsandbytes weights, several GPUs and KV offload.
DECODER_FP16_TRANSFORMERS = replace(
    DECODER_FP16, name="gpu-fp16-transformers", engine="transformers"
)
# int8 takes half of the weight memory of fp16, int4 a quarter. Activations stay in fp16.
DECODER_GPU_INT8 = replace(DECODER_FP16, name="gpu-int8", precision="int8")
DECODER_GPU_INT4 = replace(DECODER_FP16, name="gpu-int4", precision="int4")
DECODER_GPU_INT8_BNB = replace(
    DECODER_FP16_TRANSFORMERS, name="gpu-int8-bitsandbytes", precision="int8"
)
DECODER_GPU_NF4_BNB = replace(
    DECODER_FP16_TRANSFORMERS, name="gpu-nf4-bitsandbytes", precision="nf4"
)

# The candidates that were fastest on the hosts measured so far. Such a build takes a minute.
QUICK = BuildRecipe(
    candidates=(CPU_INT8, CPU_INT8_WEIGHTS, GPU_FP16),
    decoders=(DECODER_INT8, DECODER_INT8_BLOCKS, DECODER_FP16),
    keep=1,
)
# All candidates except those of the special recipes below. Such a build takes minutes.
FULL = BuildRecipe(
    candidates=(
        CPU_INT8,
        CPU_INT8_FLASH,
        OPENVINO_INT8,
        CPU_INT8_STATIC,
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
        DECODER_FP16_COMPILED,
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

# Dynamic int8 as in other toolkits, for comparisons. Outputs depend on the batch, so the limits of
# this gate for batched texts are lower. Decoders have no candidates with dynamic int8.
DYNAMIC = replace(
    QUICK,
    candidates=(CPU_INT8_DYNAMIC, CPU_INT8_PLAIN, CPU_INT8_FUSED, GPU_FP16),
    decoders=(),
    gate=Gate(batched_cosine_worst=0.93, batched_top1_agreement=0.9),
)

# Recipes by their names on the command line.
SEARCH_PRESETS: Mapping[str, BuildRecipe] = {
    "full": FULL,
    "quick": QUICK,
    "low-memory": LOW_MEMORY,
    "dynamic": DYNAMIC,
}
