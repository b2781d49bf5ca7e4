"""What a sealed artifact says of itself, and the checks it must pass before it is trusted.

A store is a directory:

    <store>/<model id, "/" written "--">/<version>/manifest.json, tokenizer.json, graphs/
    <store>/<model id, ...>/latest                                text: the default version

`seal` writes beside and renames into place, so a version is either whole or absent. `read` refuses
whatever is not exactly what was sealed: no pickle, no links, no path that leaves the directory.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deployments.errors import (
    ArtifactMissing,
    DigestMismatch,
    ManifestInvalid,
    ManifestTooNew,
    PathOutsideArtifact,
    UnknownTask,
)

SCHEMA = 1
MANIFEST_NAME = "manifest.json"
LATEST_NAME = "latest"
TOKENIZER_NAME = "tokenizer.json"

# One optional organisation, then a name; never "..", never a leading dot or dash.
MODEL_ID = re.compile(r"(?:[A-Za-z0-9_][\w.-]*/)?[A-Za-z0-9_][\w.-]*")
VERSION = re.compile(r"[0-9a-f]{12}")


class TaskName(StrEnum):
    """Tasks by their Hugging Face names."""

    FEATURE_EXTRACTION = "feature-extraction"
    SENTENCE_SIMILARITY = "sentence-similarity"
    TEXT_CLASSIFICATION = "text-classification"


class Device(StrEnum):
    """The kind of hardware a candidate graph was made for."""

    CPU = "cpu"
    GPU = "gpu"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Parity(_Frozen):
    """How far a candidate is from the fp32 torch reference, on the build's probe texts.

    Cosines compare output rows. `top1_agreement` is the share of probes with the same best label
    (classifiers only, near-ties left out), alone or in company, the worse of the two.
    `company_cosine_worst` compares each row computed alone with the same row computed in a padded
    batch: dynamic int8 ranges span the batch, so company may change digits.
    """

    cosine_mean: float
    cosine_worst: float
    company_cosine_worst: float
    top1_agreement: float | None = None


class Candidate(_Frozen):
    """One graph that passed the gate."""

    name: str = Field(pattern=r"^[a-z0-9-]+$")
    device: Device
    precision: Literal["fp32", "fp16", "int8"]
    engine: Literal["onnxruntime"] = "onnxruntime"
    graph: str
    # ONNX Runtime's own optimisers that make this graph slower; see `engines/onnx.py`.
    disabled_optimizers: tuple[str, ...] = ()
    parity: Parity


class Source(_Frozen):
    """Where the weights came from, pinned."""

    ref: str
    revision: str
    adapter: str | None = None
    adapter_revision: str | None = None


class SealedFile(_Frozen):
    """One file of the artifact."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size: int = Field(ge=0)


class ArtifactManifest(_Frozen):
    """The contract between the build and the server. Written once, never edited."""

    schema_version: int = SCHEMA
    id: str
    version: str = Field(pattern=f"^{VERSION.pattern}$")
    tasks: tuple[TaskName, ...] = Field(min_length=1)  # the first is the model's own task
    architecture: str
    max_tokens: int = Field(ge=1)
    width: int = Field(ge=1)  # values per output row: embedding size or number of labels
    labels: tuple[str, ...] = ()
    problem: Literal["single_label", "multi_label", "regression"] | None = None
    pooling: Literal["mean", "cls"] | None = None
    normalize: bool = False
    prompts: dict[str, str] = {}
    default_prompt: str | None = None
    source: Source
    candidates: tuple[Candidate, ...] = Field(min_length=1)
    files: dict[str, SealedFile]
    built_with: dict[str, str]

    def candidate_for(self, device: Device) -> Candidate | None:
        """The portable default for `device`: the first candidate listed for it."""
        return next((c for c in self.candidates if c.device is device), None)

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
                _check_file(directory, name, sealed)
            except OSError as exc:
                raise DigestMismatch(f"{directory}: `{name}` cannot be read: {exc}") from exc
        for candidate in manifest.candidates:
            _check_company(directory, candidate.graph, manifest.files)
        needed = [TOKENIZER_NAME, *(c.graph for c in manifest.candidates)]
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


def _check_file(directory: Path, name: str, sealed: SealedFile) -> None:
    path = contained(directory, name)
    if path.is_symlink() or not path.is_file():
        raise DigestMismatch(f"{directory}: `{name}` is missing or not a plain file")
    size = path.stat().st_size
    if size != sealed.size:
        raise DigestMismatch(f"{directory}: `{name}` has {size} bytes, sealed with {sealed.size}")
    if file_sha256(path) != sealed.sha256:
        raise DigestMismatch(f"{directory}: `{name}` is not the file that was sealed (sha256)")


def _check_company(directory: Path, graph: str, files: Mapping[str, SealedFile]) -> None:
    """A graph may read weights from files beside it, so nothing unsealed may lie there."""
    for path in contained(directory, graph).parent.rglob("*"):
        name = path.relative_to(directory).as_posix()
        if not path.is_dir() and name not in files:
            raise DigestMismatch(f"{directory}: `{name}` lies beside a graph and was not sealed")


def contained(directory: Path, name: str) -> Path:
    """`directory / name`, refused with PathOutsideArtifact when it leads elsewhere."""
    pure = PurePosixPath(name)
    inside = not pure.is_absolute() and ".." not in pure.parts and "\\" not in name
    path = directory / pure
    try:
        if inside and path.resolve().is_relative_to(directory.resolve()):
            return path
    except (OSError, RuntimeError, ValueError) as exc:  # links in a circle, a null byte
        raise PathOutsideArtifact(f"{directory}: `{name}` leads nowhere: {exc}") from exc
    raise PathOutsideArtifact(f"{directory}: `{name}` leads out of the artifact")


def file_sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def model_directory(store: Path, model_id: str) -> Path:
    """Where the versions of `model_id` live. Raises ManifestInvalid for an id that is no id."""
    if not MODEL_ID.fullmatch(model_id) or ".." in model_id or "--" in model_id:
        raise ManifestInvalid(f"`{model_id}` is not a model id")
    return store / model_id.replace("/", "--")


def resolve_version(store: Path, model_id: str, version: str) -> str:
    """The version `latest` points to, or `version` itself. Raises ArtifactMissing."""
    directory = model_directory(store, model_id)
    if version == LATEST_NAME:
        try:
            version = (directory / LATEST_NAME).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as exc:
            raise ArtifactMissing(
                f"`{model_id}` is not built; run `python -m build_artifacts build`"
            ) from exc
    if not VERSION.fullmatch(version) or not (directory / version).is_dir():
        raise ArtifactMissing(f"`{model_id}` has no version `{version}` in {store}")
    return version


def point_latest(store: Path, model_id: str, version: str) -> None:
    """Make `version` the one served by default; atomic."""
    directory = model_directory(store, model_id)
    beside = directory / f".{LATEST_NAME}.{os.getpid()}"
    beside.write_text(version + "\n", encoding="utf-8")
    beside.replace(directory / LATEST_NAME)
