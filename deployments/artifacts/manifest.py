"""What a sealed artifact says of itself, and the checks it must pass before it is trusted.

`seal` writes beside and renames into place, so a version is either whole or absent. `read` refuses
whatever is not exactly what was sealed: no pickle, no links, no path that leaves the directory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator

from deployments.artifacts.generation_config import GenerationConfig
from deployments.artifacts.store import VERSION, check_file, check_no_extra_files
from deployments.artifacts.types import (
    TASK_HEADS,
    Attention,
    Device,
    EngineName,
    FrozenModel,
    KvCacheDtype,
    ModelHead,
    Precision,
    TaskName,
)
from deployments.errors import (
    ArtifactMissing,
    DigestMismatch,
    ManifestInvalid,
    ManifestTooNew,
    UnknownTask,
)

SCHEMA = 3
MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.json"
REFERENCE_NAME = "reference.npz"
CHAT_TEMPLATE_NAME = "chat_template.jinja"


class Gate(FrozenModel):
    """How near to the fp32 reference a candidate must be."""

    cosine_mean: float = 0.985
    cosine_worst: float = 0.93
    top1_agreement: float = 0.98  # share of decided answers with the same best choice
    # Probability between the reference's two best choices from which an answer counts as decided;
    # below it either is right, and which one comes out is noise in any arithmetic.
    near_tie_margin: float = 0.1
    metric_drop: float = 0.5  # points (hundredths) of the task's metric, where data is given
    # Share of the tokens a decoder's fp32 original is decided about that a graph expects too. Lower
    # than for a single choice: each of hundreds is one of a whole vocabulary.
    next_token_agreement: float = 0.9
    perplexity_increase: float = 0.1  # share by which a decoder's perplexity may be above fp32's


class Parity(FrozenModel):
    """How far a candidate is from the fp32 torch reference, on the build's probe texts.

    Cosines compare an item's whole output. `top1_agreement` is the share of answers (a label, a
    token's label, a span's ends, a masked token) with the same best choice, near-ties left out,
    alone or in company, the worse of the two; None for vectors and single scores.
    `batched_cosine_worst` compares each item computed alone with the same item in a padded batch:
    dynamic int8 ranges span the batch, so company may change digits.
    """

    cosine_mean: float
    cosine_worst: float
    batched_cosine_worst: float
    top1_agreement: float | None = None


class EngineOptions(FrozenModel):
    """How an engine is to run a graph; tuned together with the graph."""

    # ONNX Runtime's own optimisers that make this graph slower.
    disabled_optimizers: tuple[str, ...] = ()
    spinning: bool = False  # engine threads burn their core while they wait for work within a pass
    arena: bool = False  # ONNX Runtime keeps freed CPU memory for the next pass
    providers: tuple[str, ...] = ()  # execution providers instead of the encoder's
    # (items, tokens) shapes a batch is padded up to; each has memory of its own, bound once, and
    # on CUDA is captured as one graph. Empty: any shape, allocated per pass.
    buckets: tuple[tuple[int, int], ...] = ()
    compile: bool = False  # torch only: torch.compile
    # OpenVINO only: what is computed in bf16, where the CPU can, is all that is not int8.
    inference_precision: Literal["fp32", "bf16"] = "fp32"
    attention: Attention = "sdpa"  # of a model that generates, through torch or transformers
    # transformers only. Keys and values are kept on the host; GPUs that one replica spreads the
    # model over (tensor parallelism).
    kv_offload: bool = False
    tensor_parallel_size: int = Field(1, ge=1)


class Candidate(FrozenModel):
    """One graph that passed the gate, and how to run it."""

    name: str = Field(pattern=r"^[a-z0-9-]+$")
    device: Device
    precision: Precision
    engine: EngineName = "onnxruntime"
    kv_cache_dtype: KvCacheDtype | None = (
        None  # of keys and values; None: as the engine computes them
    )
    graph: str
    encoder: str | None = None  # the graph that reads the prompt, where the model has one apart
    options: EngineOptions = EngineOptions()
    parity: Parity
    scores: dict[str, float] = Field(
        default_factory=dict
    )  # task metrics measured at the build, such as {"accuracy": 0.89}
    excluded_nodes: tuple[str, ...] = ()  # nodes left out of quantisation to pass the gate

    @model_validator(mode="after")
    def _leave_placement_to_transformers(self) -> Self:
        if self.engine != "transformers" and (
            self.options.tensor_parallel_size > 1 or self.options.kv_offload
        ):
            raise ValueError(f"{self.engine} has no `tensor_parallel_size` and no `kv_offload`")
        return self


class ModelSource(FrozenModel):
    """Where the weights came from, pinned."""

    ref: str
    revision: str
    adapter: str | None = None
    adapter_revision: str | None = None


class FileDigest(FrozenModel):
    """One file of the artifact."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size: int = Field(ge=0)


class ArtifactManifest(FrozenModel):
    """The contract between the build and the server. Written once, never edited."""

    schema_version: int = SCHEMA
    id: str
    version: str = Field(pattern=f"^{VERSION.pattern}$")
    tasks: tuple[TaskName, ...] = Field(min_length=1)  # the first is the model's own task
    architecture: str
    max_tokens: int = Field(ge=1)
    output_width: int = Field(ge=1)  # values per output row: embedding size or number of labels
    labels: tuple[str, ...] = ()
    problem_type: Literal["single_label", "multi_label", "regression"] | None = None
    pooling: Literal["mean", "cls", "last"] | None = None
    normalize: bool = False
    prompts: dict[str, str] = Field(default_factory=dict)
    default_prompt: str | None = None
    mask_token: int | None = None  # id of the token a MASKS head answers for
    generation_config: GenerationConfig | None = None  # of a model that generates text
    pruned: str | None = None  # what compaction removed from the checkpoint
    source: ModelSource
    gate: Gate = Gate()
    scores: dict[str, float] = Field(default_factory=dict)  # task metrics of the fp32 reference
    candidates: tuple[Candidate, ...] = Field(min_length=1)
    files: dict[str, FileDigest]
    built_with: dict[str, str]

    @property
    def head(self) -> ModelHead:
        """What the graphs answer."""
        return TASK_HEADS[self.tasks[0]]

    def candidates_for(self, device: Device) -> tuple[Candidate, ...]:
        """The candidates for `device`, the portable default first."""
        return tuple(c for c in self.candidates if c.device is device)

    def candidate_for(self, device: Device) -> Candidate | None:
        """The portable default for `device`."""
        return next(iter(self.candidates_for(device)), None)

    def to_json(self) -> bytes:
        """The bytes of manifest.json."""
        return (self.model_dump_json(indent=2) + "\n").encode()

    @classmethod
    def read(cls, directory: Path) -> ArtifactManifest:
        """The manifest in `directory`, every file checked against its digest.

        Raises ArtifactMissing, ManifestInvalid, ManifestTooNew, UnknownTask, PathOutsideArtifact
        or DigestMismatch; each message names the file.
        """
        manifest = cls._parse(directory / MANIFEST_NAME)
        for name, sealed in manifest.files.items():
            try:
                check_file(directory, name, sealed.sha256, sealed.size)
            except OSError as exc:
                raise DigestMismatch(f"{directory}: `{name}` cannot be read: {exc}") from exc
        graphs = [g for c in manifest.candidates for g in (c.graph, c.encoder) if g is not None]
        for graph in graphs:
            check_no_extra_files(directory, graph, manifest.files)
        needed = [TOKENIZER_NAME, *graphs]
        if unsealed := sorted(set(needed) - set(manifest.files)):
            raise ManifestInvalid(f"{directory}: `{unsealed[0]}` is used but has no digest")
        return manifest

    @classmethod
    def _parse(cls, path: Path) -> ArtifactManifest:
        try:
            raw = json.loads(path.read_bytes())
        except FileNotFoundError as exc:
            raise ArtifactMissing(f"no `{MANIFEST_NAME}` in {path.parent}") from exc
        except (OSError, ValueError, RecursionError) as exc:
            raise ManifestInvalid(f"{path}: {exc}") from exc
        if not isinstance(raw, dict):
            raise ManifestInvalid(f"{path}: not a JSON object")
        schema = raw.get("schema_version")
        if isinstance(schema, int) and schema > SCHEMA:
            raise ManifestTooNew(f"{path}: schema {schema}, this release reads up to {SCHEMA}")
        if isinstance(schema, int) and schema < SCHEMA:
            raise ManifestInvalid(f"{path}: schema {schema} of an older release; build it again")
        tasks = raw.get("tasks")
        for task in tasks if isinstance(tasks, list) else ():
            if task not in list(TaskName):
                raise UnknownTask(f"{path}: this release does not serve the task `{task}`")
        try:
            return cls.model_validate(raw)
        except ValidationError as exc:
            first = exc.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ManifestInvalid(f"{path}: `{where}`: {first['msg']}") from exc
