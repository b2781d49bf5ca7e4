"""The candidates of builds, and the presets of `hundredfold build --search`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from build_artifacts.recipes import (
    CPU_FP32,
    LEAN,
    BuildRecipe,
    CandidateRecipe,
    DecoderRecipe,
    DynamicInt8,
    ExportRecipe,
    GraphRewrites,
    NncfInt8,
    SmoothedInt8,
    StaticInt8,
    TorchProgramRecipe,
    WeightOnlyInt8,
)
from deployments.artifacts.manifest import EngineOptions, Gate
from deployments.artifacts.types import Device

_PLAIN = ExportRecipe(dtype="float32", opset=18)

# The plain export with the defaults of an onnxruntime InferenceSession: a baseline of comparisons.
PLAIN_ONNX = CandidateRecipe(
    name="onnx",
    device=Device.CPU,
    precision="fp32",
    source=_PLAIN,
    options=EngineOptions(spinning=True),
)
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
# For models whose activations exceed the range of fp16, and for experts.
DECODER_BF16_TORCH = replace(DECODER_FP16_TORCH, name="gpu-bf16-torch", precision="bf16")
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

# The candidates that were fastest on the hosts measured so far, and torch programs for decoders
# without an ONNX graph in FP16. Such a build takes a minute.
QUICK = BuildRecipe(
    candidates=(CPU_INT8, CPU_INT8_WEIGHTS, GPU_FP16),
    decoders=(
        DECODER_INT8,
        DECODER_INT8_BLOCKS,
        DECODER_FP16,
        DECODER_FP16_TORCH,
        DECODER_BF16_TORCH,
    ),
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
        DECODER_BF16_TORCH,
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
