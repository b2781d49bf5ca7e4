"""Recipes of builds: candidates as data. A change to a recipe gives its builds a new version."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Literal, TypeAlias

from deployments.artifacts.manifest import EngineOptions, Gate
from deployments.artifacts.types import Device, Dtype, EngineName, KvCacheDtype, Precision

# Increase this if a code change alters the output of a build step.
RECIPE_REVISION = 17


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
    # Ranges of the neurons of gated layers: constants, or the range of each token. Neurons of a few
    # tokens are far larger than all others there. The layout "pairs" has constants only.
    gated_ranges: Literal["constant", "token"] = "constant"

    def __post_init__(self) -> None:
        if (self.layout, self.gated_ranges) == ("pairs", "token"):
            raise ValueError("the layout `pairs` has no ranges per token")


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
    - "torch": a program of the transformers model in fp16, bf16 or fp32
      (`decoders/torch_export.py`). With experts it is in bf16.
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

    def candidates_for(self, device: Device) -> tuple[CandidateRecipe, ...]:
        """Return the candidates for `device`."""
        return tuple(c for c in self.candidates if c.device is device)

    def digest(self) -> str:
        """Return a digest that differs for different recipes."""
        return compute_digest(self)


def compute_digest(recipe: object) -> str:
    """Return the hex digest of a recipe or of a part of a recipe, with class and field names."""
    text = json.dumps(recipe, sort_keys=True, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()


def short_digest(recipe: object) -> str:
    """Return the first 12 hex digits of `compute_digest`, for the keys of cached steps."""
    return compute_digest(recipe)[:12]


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
