"""Tokenizer, chat template and sentence-transformers config that an adapter was trained with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from build_artifacts.checkpoints.adapter import Adapter
from build_artifacts.checkpoints.checkpoint import (
    MODULES_NAME,
    corrupt_file_error,
    hashed_files,
    is_plain_file,
    read_modules,
    read_object,
)
from build_artifacts.checkpoints.decoders import (
    TEMPLATES,
    TOKENIZER_CONFIG_NAME,
    read_chat_templates,
    special_tokens,
)
from build_artifacts.checkpoints.sentences import (
    SENTENCE_CONFIG_NAME,
    TRANSFORMER_CONFIG_NAMES,
)
from build_artifacts.errors import UnsupportedModel
from deployments.artifacts.manifest import TOKENIZER_NAME


def check_adapter_vocabulary(adapter: Adapter, weights: Path) -> None:
    """Raise UnsupportedModel if the adapter's tokenizer.json has other tokens than the base's.

    The base model has no embeddings for tokens that the training of the adapter added. Check
    nothing if one of the two files is missing.
    Raises SourceUnreadable for an unreadable file, UnsupportedModel for a corrupt file.
    """
    own, base = adapter.directory / TOKENIZER_NAME, weights / TOKENIZER_NAME
    if not is_plain_file(own) or not is_plain_file(base):
        return
    different = _read_vocabulary(own).items() ^ _read_vocabulary(base).items()
    if different:
        token, _ = min(different, key=lambda entry: entry[1])
        raise UnsupportedModel(
            f"`{TOKENIZER_NAME}` of the adapter `{adapter.name}` has other tokens than that of the "
            f"model; the first is `{token}`",
            hint="pass the base model of its training; if the training added tokens, merge the "
            f"adapter with peft and build the result; remove `{TOKENIZER_NAME}` from the adapter "
            "only if no text of its training has these tokens",
        )


def _read_vocabulary(path: Path) -> dict[str, int]:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path)).get_vocab()
    except Exception as exc:  # tokenizers raises Exception itself
        raise corrupt_file_error(path, str(exc)) from exc


def copy_chat_format(adapter: Adapter, into: Path) -> None:
    """Replace chat templates and special tokens in the checkpoint `into` by those of the adapter.

    The checkpoint keeps its templates if the adapter has none, and each special token that the
    adapter does not state. Raises the errors of `read_object`.
    """
    if templates := read_chat_templates(adapter.directory):
        for name in TEMPLATES:
            (into / name).unlink(missing_ok=True)
        for name, text in templates.items():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            (into / name).write_text(text, encoding="utf-8")
    if tokens := special_tokens(adapter.directory):
        path = into / TOKENIZER_CONFIG_NAME
        path.write_text(json.dumps(read_object(path) | tokens, indent=2), encoding="utf-8")


def copy_sentence_config(adapter: Adapter, into: Path) -> None:
    """Replace pooling, prompts and length in the checkpoint `into` by those of the adapter.

    The adapter has a modules.json. Raises the errors of `read_modules` and `hashed_files`.
    """
    folders = tuple(f"{module.path}/" for module in read_modules(adapter.directory) if module.path)
    names = (MODULES_NAME, SENTENCE_CONFIG_NAME, *TRANSFORMER_CONFIG_NAMES)
    for name, path in hashed_files(adapter.directory):
        if name in names or name.startswith(folders):
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, into / name)
