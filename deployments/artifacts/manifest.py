"""Manifest of a sealed (published, immutable) artifact, and the checks before its use.

`ArtifactManifest.read` accepts only the sealed files: no changed file, no additional file next to a
graph, no link and no path outside of the directory. `parse` reads the manifest alone, so that a
search for models does not read gigabytes. `verify` then checks the files of a parsed manifest.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from deployments.artifacts.generation_config import GenerationConfig
from deployments.artifacts.migration import PREVIOUS, SCHEMA, upgrade
from deployments.artifacts.pair_template import PairTemplate
from deployments.artifacts.store import VERSION, check_file, check_no_extra_files, name_artifact
from deployments.artifacts.types import (
    Attention,
    Device,
    EngineName,
    FrozenModel,
    KvCacheDtype,
    ModelHead,
    Precision,
    TruncationSide,
)
from deployments.errors import (
    ArtifactMissing,
    DigestMismatch,
    ManifestInvalid,
    ManifestTooNew,
)

MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.json"
REFERENCE_NAME = "reference.npz"
GENERATION_NAME = "generation.json"  # the gate report of a generative model
CHAT_TEMPLATE_NAME = "chat_template.jinja"
# Chat template for requests with tools, if the model has a second template. transformers uses the
# same file names.
TOOL_TEMPLATE_NAME = "additional_chat_templates/tool_use.jinja"


PERPLEXITY = "perplexity"  # key of `scores`, for decoders only


class Gate(FrozenModel):
    """Limits of the accuracy gate: how far a candidate may differ from the fp32 reference."""

    cosine_mean: float = 0.985
    cosine_worst: float = 0.93
    # The next two limits compare each item computed alone with the same item computed in a batch.
    # The first limits the cosine, for decoders and for heads that return vectors or scores. The
    # second limits the share of equal best choices, for other heads. A graph that computes one int8
    # range over the whole batch fails the limit for its head.
    batched_cosine_worst: float = 0.999
    batched_top1_agreement: float = 1.0
    top1_agreement: float = 0.98  # share of equal best choices, near-ties excluded
    # Correlation of the logits, centered per class, for heads that return choices. Without this
    # limit, a graph with constant logits would pass if all probes belong to one class, and so would
    # a graph whose logits have a factor, which changes the probabilities.
    logit_correlation: float = 0.98
    # If the two best choices of an output differ by less probability than this, the output is a
    # near-tie. Rounding decides near-ties in every precision, so the comparison skips them.
    near_tie_margin: float = 0.1
    # Maximum loss on labeled data, in points. A point is 0.01 of the task's metric; for perplexity,
    # it is 1 % of the reference.
    metric_drop: float = 0.3
    # Share of equal next tokens of a decoder, near-ties excluded. The limit is lower than
    # `top1_agreement`, because each of hundreds of tokens is a choice from a whole vocabulary.
    next_token_agreement: float = 0.9
    perplexity_increase: float = 0.1  # maximum, relative to the fp32 perplexity of a decoder


class Parity(FrozenModel):
    """Distance of a candidate to the fp32 torch reference on the probe texts of the build.

    Cosines compare the whole output of an item. For vectors and for several scores, a difference of
    the norms lowers the cosine. For a single score, the concordance correlation over all items
    replaces the cosine; an offset or a factor of the scores lowers it. Agreements are the share of
    outputs (label, token label, span end, masked token) with the same best choice, near-ties
    excluded. `logit_correlation` covers all logits of such outputs, centered per class; a factor
    lowers it. Agreements and `logit_correlation` are None for heads that return vectors or scores.
    Older artifacts have values that no norm, offset or factor lowers.

    `cosine_*` compare the unbatched run with the reference. `top1_agreement` and
    `logit_correlation` compare the unbatched and the batched run with the reference; the lower
    value counts. `batched_*` compare the two runs with each other. The batched run pads items, and
    puts them into batches with long texts and outliers.

    For a decoder, prefill and decode steps are compared with the reference. `cosine_*` cover both.
    `top1_agreement` is the share of equal next tokens, of prefill or of decode steps, whichever is
    lower. `batched_cosine_worst` compares decode steps alone with decode steps in a batch.
    """

    cosine_mean: float
    cosine_worst: float
    batched_cosine_worst: float
    top1_agreement: float | None = None
    batched_top1_agreement: float | None = None  # also None for decoders
    logit_correlation: float | None = None  # also None for decoders and older artifacts


class EngineOptions(FrozenModel):
    """Options of the engine that runs a graph. The build sets them. Tuning may vary `spinning`."""

    # ONNX Runtime optimizers that make this graph slower.
    disabled_optimizers: tuple[str, ...] = ()
    spinning: bool = False  # engine threads busy-wait within a pass
    providers: tuple[str, ...] = ()  # ONNX Runtime only; empty: HardwareSettings.providers
    # Shapes (items, tokens) to which encoders pad batches. ONNX Runtime preallocates buffers for
    # each shape. On CUDA, ONNX Runtime and torch capture a CUDA graph for each shape. Empty: no
    # padding, no preallocated buffers and no captures.
    buckets: tuple[tuple[int, int], ...] = ()
    compile: bool = False  # use torch.compile; for the engines torch and transformers
    # OpenVINO only: precision of all operators that are not int8, if the CPU supports it.
    inference_precision: Literal["fp32", "bf16"] = "fp32"
    # For generative models on the engines torch and transformers; `flash` on transformers only.
    attention: Attention = "sdpa"
    kv_offload: bool = False  # transformers only: KV cache in host memory
    tensor_parallel_size: int = Field(1, ge=1)  # transformers only: GPUs per replica


class Candidate(FrozenModel):
    """One graph that passed the accuracy gate, with its engine and options."""

    name: str = Field(pattern=r"^[a-z0-9-]+$")
    device: Device
    precision: Precision
    engine: EngineName = "onnxruntime"
    kv_cache_dtype: KvCacheDtype | None = None  # None: the precision of the activations
    graph: str
    encoder: str | None = None  # encoder graph of an encoder-decoder model
    options: EngineOptions = EngineOptions()
    parity: Parity
    scores: dict[str, float] = Field(
        default_factory=dict
    )  # task metrics measured at the build, such as {"accuracy": 0.89}
    # MatMuls that the quantization scheme skips. They stay float, or get int8 weights only.
    excluded_nodes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _leave_options_to_transformers(self) -> Self:
        if self.engine != "transformers" and (
            self.options.tensor_parallel_size > 1 or self.options.kv_offload
        ):
            raise ValueError(f"{self.engine} has no `tensor_parallel_size` and no `kv_offload`")
        if self.engine != "transformers" and self.options.attention == "flash":
            raise ValueError(f"{self.engine} has no `flash` attention")
        return self


class PruningSource(FrozenModel):
    """How the build pruned the weights."""

    fraction: float  # removed share of attention heads and of feed-forward channels
    data: str | None = None  # sha256 of the texts that select what is removed; None: probe texts


class ModelSource(FrozenModel):
    """Pinned origin of the weights."""

    ref: str
    revision: str
    adapter: str | None = None
    adapter_revision: str | None = None
    pruning: PruningSource | None = None


class FileDigest(FrozenModel):
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size: int = Field(ge=0)


class ArtifactManifest(FrozenModel):
    """Description of a sealed artifact, written by the build.

    Only a migration to a new schema rewrites it (migration.py).
    """

    schema_version: int = SCHEMA
    id: str
    version: str = Field(pattern=f"^{VERSION.pattern}$")
    tasks: tuple[str, ...] = Field(min_length=1)  # the model's own task first
    architecture: str
    max_tokens: int = Field(ge=1)
    # Side of a long text that is removed if a request states none.
    truncation_side: TruncationSide = "right"
    # Values per output row: embedding size, number of labels, 2 span ends or vocabulary size.
    output_width: int = Field(ge=1)
    # Values per unpooled vector; None: output_width.
    token_width: int | None = Field(default=None, ge=1)
    labels: tuple[str, ...] = ()
    problem_type: Literal["single_label", "multi_label", "regression"] | None = None
    # "splade" pools the scores of the vocabulary at each token, for the SPARSE head. The others are
    # for the VECTOR head.
    pooling: (
        Literal["mean", "cls", "last", "max", "mean_sqrt_len", "weighted_mean", "splade"] | None
    ) = None
    normalize: bool = False
    # Values of a normalized vector that remain if a request sets no `dimensions`; None: all.
    default_dimensions: int | None = Field(default=None, ge=1)
    similarity: Literal["cosine", "dot"] = "cosine"  # how two vectors of the model are compared
    prompts: dict[str, str] = Field(default_factory=dict)
    default_prompt: str | None = None
    # Text of a pair, for decoders that rank texts; None: the tokenizer joins the segments.
    pair_template: PairTemplate | None = None
    mask_token: int | None = None  # id of the mask token, for the MASKS head
    generation_config: GenerationConfig | None = None  # None: not generative
    pruned: str | None = None  # what the build removed, as text
    source: ModelSource
    gate: Gate = Gate()
    scores: dict[str, float] = Field(default_factory=dict)  # task metrics of the fp32 reference
    candidates: tuple[Candidate, ...] = Field(min_length=1)
    files: dict[str, FileDigest]
    built_with: dict[str, str]

    @property
    def head(self) -> ModelHead:
        """The model's head, derived from the fields that the manifest sets.

        The task names do not suffice, because a task may be newer than this module.
        """
        if self.generation_config is not None:
            return ModelHead.NEXT_TOKEN
        if self.mask_token is not None:
            return ModelHead.MASKS
        if self.pooling == "splade":
            return ModelHead.SPARSE
        if self.pooling is not None:
            return ModelHead.VECTOR
        if self.problem_type is not None:
            return ModelHead.LABELS
        return ModelHead.TOKENS if self.labels else ModelHead.SPAN

    def candidates_for(self, device: Device) -> tuple[Candidate, ...]:
        """Return the candidates for `device`, the default first."""
        return tuple(c for c in self.candidates if c.device is device)

    def candidate_for(self, device: Device) -> Candidate | None:
        return next(iter(self.candidates_for(device)), None)

    def count_bytes(self, candidate: Candidate) -> int:
        """Return the bytes of the candidate's graphs and of the files with the graphs' weights."""
        graphs = {candidate.graph, candidate.encoder or candidate.graph}
        prefixes = tuple(f"{graph}{separator}" for graph in graphs for separator in "./")
        return sum(
            sealed.size
            for name, sealed in self.files.items()
            if name in graphs or name.startswith(prefixes)
        )

    def to_json(self) -> bytes:
        return (self.model_dump_json(indent=2) + "\n").encode()

    @classmethod
    def read(cls, directory: Path) -> ArtifactManifest:
        """Parse the manifest in `directory` and check all files, as `verify` does.

        Raises ArtifactMissing, ManifestInvalid, ManifestTooNew, PathOutsideArtifact or
        DigestMismatch; each message names the file.
        """
        manifest = cls.parse(directory)
        manifest.verify(directory)
        return manifest

    def verify(self, directory: Path, names: Collection[str] | None = None) -> None:
        """Check the digests of the files in `names`.

        If `names` is None, check the digests of all files. Then also check that no file was added
        next to a graph, and that the graphs and the tokenizer have digests. Raises ManifestInvalid
        for a needed file without a digest. Raises DigestMismatch for a changed, missing, unreadable
        or added file. Raises PathOutsideArtifact for a path outside of `directory`.
        """
        for name in self.files if names is None else names:
            sealed = self.files.get(name)
            if sealed is None:
                raise _no_digest(directory, name)
            try:
                check_file(directory, name, sealed.sha256, sealed.size)
            except OSError as exc:
                raise DigestMismatch(
                    f"{name_artifact(directory)}: `{name}` cannot be read: {exc.strerror}"
                ) from exc
        if names is not None:
            return
        graphs = [g for c in self.candidates for g in (c.graph, c.encoder) if g is not None]
        for graph in graphs:
            check_no_extra_files(directory, graph, self.files)
        needed = [TOKENIZER_NAME, *graphs]
        if unsealed := sorted(set(needed) - set(self.files)):
            raise _no_digest(directory, unsealed[0])

    @classmethod
    def parse(cls, directory: Path) -> ArtifactManifest:
        """Parse the manifest in `directory` without reading the other files.

        Raises ArtifactMissing if there is no manifest, ManifestTooNew if a newer release wrote the
        manifest, or ManifestInvalid for any other defect.
        """
        name, raw = _name_manifest(directory), _read_json(directory)
        schema = raw.get("schema_version")
        if isinstance(schema, int) and schema > SCHEMA:
            raise ManifestTooNew(f"{name}: schema {schema}; this release supports up to {SCHEMA}")
        if isinstance(schema, int) and schema < PREVIOUS:
            raise ManifestInvalid(
                f"{name}: schema {schema} is from an older release; this release reads schema "
                f"{PREVIOUS} and {SCHEMA}. Build the model again"
            )
        if schema == PREVIOUS:
            raw = upgrade(raw)
        try:
            return cls.model_validate(raw)
        except ValidationError as exc:
            first = exc.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ManifestInvalid(f"{name}: `{where}`: {first['msg']}") from exc


def sealed_ns(version: Path) -> int:
    """Return when a version was sealed, in ns since the epoch; 0 if its manifest is not found."""
    try:
        return (version / MANIFEST_NAME).stat().st_mtime_ns
    except OSError:
        return 0


def has_previous_schema(directory: Path) -> bool:
    """Return whether the stored manifest has the previous schema.

    `ArtifactManifest` does not show this, because `parse` converts to the present schema. Raises
    ArtifactMissing if there is no manifest, or ManifestInvalid if it is not a readable JSON object.
    """
    return bool(_read_json(directory).get("schema_version") == PREVIOUS)


def _read_json(directory: Path) -> dict[str, Any]:
    name = _name_manifest(directory)
    try:
        raw = json.loads((directory / MANIFEST_NAME).read_bytes())
    except FileNotFoundError as exc:
        raise ArtifactMissing(f"{name} is missing") from exc
    except OSError as exc:
        raise ManifestInvalid(f"{name} cannot be read: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:
        raise ManifestInvalid(f"{name}: {exc}") from exc
    if not isinstance(raw, dict):
        raise ManifestInvalid(f"{name}: not a JSON object")
    return raw


def _name_manifest(directory: Path) -> str:
    return f"{name_artifact(directory)}: `{MANIFEST_NAME}`"


def _no_digest(directory: Path, name: str) -> ManifestInvalid:
    return ManifestInvalid(f"{name_artifact(directory)}: `{name}` is used and has no digest")
