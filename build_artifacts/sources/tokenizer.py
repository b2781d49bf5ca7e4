"""Creation of tokenizer.json from a vocabulary, for checkpoints without one.

The server reads tokenizer.json only. transformers converts `vocab.txt` (BERT) and `vocab.json` with
`merges.txt` (RoBERTa). If the tokenizer class does not read these files, transformers silently
creates a vocabulary of five special tokens. The conversion is therefore valid only if its tokens
and ids equal those of the files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from build_artifacts.checkpoints.checkpoint import (
    Checkpoint,
    corrupt_file,
    hashed_files,
    is_plain_file,
    read_object,
    unreadable_source,
)
from build_artifacts.checkpoints.models import first_line
from build_artifacts.errors import SourceNotFound
from deployments.artifacts.manifest import TOKENIZER_NAME

_WORDS_NAME = "vocab.txt"
_PAIRS_NAME = "vocab.json"
_ADDED_NAME = "added_tokens.json"
# Vocabulary formats that require packages outside the dependencies of the build.
_UNREAD = (".model", ".tiktoken", "bpe.codes")

VocabularyFiles = dict[str, int]  # token -> id


def ensure_fast_tokenizer(checkpoint: Checkpoint, into: Path) -> Checkpoint:
    """Return `checkpoint` if it has a tokenizer.json, otherwise a copy with one under `into`.

    The copy links to the files of `checkpoint`. Raises SourceNotFound, SourceUnreadable or
    UnsupportedModel.
    """
    tokenizer = write_fast_tokenizer(checkpoint.weights, into / "tokenizer")
    _check(tokenizer)
    if tokenizer.parent == checkpoint.weights:
        return checkpoint
    twin = into / "checkpoint"
    for name, path in hashed_files(checkpoint.directory):
        (twin / name).parent.mkdir(parents=True, exist_ok=True)
        (twin / name).symlink_to(path.absolute())
    place = twin / checkpoint.weights.relative_to(checkpoint.directory)
    (place / TOKENIZER_NAME).symlink_to(tokenizer.absolute())
    return replace(checkpoint, directory=twin)


def write_fast_tokenizer(weights: Path, into: Path) -> Path:
    """Return the path of the checkpoint's tokenizer.json, or write one to `into`.

    Raises SourceNotFound if there is no vocabulary that can be converted. Raises SourceUnreadable
    or UnsupportedModel for unreadable or corrupt files.
    """
    own = weights / TOKENIZER_NAME
    if is_plain_file(own):
        return own
    check_vocabulary(str(weights), [path.name for path in weights.glob("*")])
    name = _WORDS_NAME if is_plain_file(weights / _WORDS_NAME) else _PAIRS_NAME
    try:
        tokenizer = _convert(weights)
    except Exception as exc:  # tokenizer classes may raise any exception
        raise _no_tokenizer_error(
            str(weights), f", and `{name}` cannot be converted: {first_line(exc)}"
        ) from exc
    if tokenizer.get_vocab() != _read_vocabulary(weights, name):
        raise _no_tokenizer_error(
            str(weights), f", and the tokenizer class of this model does not read `{name}`"
        )
    into.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(into / TOKENIZER_NAME))
    return into / TOKENIZER_NAME


def check_vocabulary(where: str, names: Iterable[str]) -> None:
    """Raise SourceNotFound if none of these files is a vocabulary that the build reads."""
    files = sorted({name.rpartition("/")[2] for name in names})
    if {TOKENIZER_NAME, _WORDS_NAME, _PAIRS_NAME}.isdisjoint(files):
        unread = next((name for name in files if name.endswith(_UNREAD)), None)
        raise _no_tokenizer_error(
            where, f", and `{unread}` cannot be converted here" if unread else ""
        )


def _no_tokenizer_error(where: str, why: str) -> SourceNotFound:
    return SourceNotFound(
        f"no `{TOKENIZER_NAME}` in {where}{why}",
        hint="create it where transformers supports the tokenizer: "
        "`AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)`",
    )


def _convert(weights: Path) -> Any:
    """Return a `tokenizers.Tokenizer`, built offline and without remote code."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        weights, trust_remote_code=False, local_files_only=True
    )
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} has no fast implementation")
    return tokenizer.backend_tokenizer


def _read_vocabulary(weights: Path, name: str) -> VocabularyFiles:
    path = weights / name
    if name == _PAIRS_NAME:
        return read_object(path) | read_object(weights / _ADDED_NAME)
    try:
        with path.open(encoding="utf-8") as lines:
            words = {line.rstrip("\n"): number for number, line in enumerate(lines)}
    except ValueError as exc:
        raise corrupt_file(path, str(exc)) from exc
    except OSError as exc:
        raise unreadable_source(path, str(exc.strerror)) from exc
    return words | read_object(weights / _ADDED_NAME)


def _check(path: Path) -> None:
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_file(str(path))
    except Exception as exc:  # the library raises bare Exception
        raise corrupt_file(path, first_line(exc)) from exc
