"""What is built of every model, as data. Changing anything here gives every build a new version."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Literal, TypeAlias

from deployments.manifest import Device, EngineOptions, Gate, MemoryType, Precision

Dtype: TypeAlias = Literal["float32", "float16", "bfloat16"]

# Counts changes of the code of the steps that change what they write.
RECIPE_REVISION = 8


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
    precision: Precision
    source: ExportRecipe | TorchProgram
    rewrites: Rewrites | None = None
    quantisation: Quantisation | None = None
    engine: Literal["onnxruntime", "openvino", "torch"] = "onnxruntime"
    options: EngineOptions = _AS_IT_COMES
    # Tried in order when the first calibration misses the gate; none of them changes the speed.
    other_calibrations: tuple[Calibration, ...] = ()


# The CPU kernel of the fused operator is three times slower than Add and LayerNormalization.
NO_SKIP_FUSION = EngineOptions(disabled_optimizers=("SkipLayerNormFusion",))
SDPA = ExportRecipe(dtype="float32", opset=23)
LEAN = Rewrites(names=("drop-empty-rows", "packed-heads"))

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

    Or `decoders/written/`, which knows no `options`. With `rowwise` either writes fp32, and
    `decoders/rowwise.py` makes it int8. With the engine "torch" it is a program of transformers'
    own model instead (`decoders/torch_export.py`), in fp16 or fp32; with "transformers" that model
    itself (`decoders/checkpoint_export.py`), in these, bf16, or rounded by bitsandbytes. `run` says
    what attention they have, where keys and values lie, and how many GPUs share the work.
    """

    name: str
    device: Device
    precision: Precision
    engine: Literal["onnxruntime", "torch", "transformers"] = "onnxruntime"
    rowwise: bool = False
    # Keys and values in int8 (`decoders/int8_memory.py`); None: as attention computes them. Where
    # the gate is missed with them, the same is tried without.
    memory: MemoryType | None = None
    options: tuple[str, ...] = ()  # the builder's own, such as "block_size=16"
    # Tried in order instead of them when the gate is missed; each is more accurate and slower.
    other_options: tuple[tuple[str, ...], ...] = ()
    run: EngineOptions = _AS_IT_COMES


DECODER_FP32 = DecoderRecipe(name="cpu-fp32", device=Device.CPU, precision="fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
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


def artifact_version(recipe: Recipe, tools: Mapping[str, str], *inputs: str | None) -> str:
    """The version a build will have, known before it starts: 12 hex digits.

    `tools` are the versions of what builds; `inputs` say what it is built from: revisions of
    checkpoint, adapter and evaluation data, and the task.
    """
    parts = [recipe.digest(), dict(tools), inputs]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
