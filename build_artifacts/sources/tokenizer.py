"""Creation and correction of tokenizer.json, the only file of a tokenizer that the server reads.

transformers converts `vocab.txt` (BERT) and `vocab.json` with `merges.txt` (RoBERTa). If the
tokenizer class does not read these files, transformers silently creates a vocabulary of five
special tokens. The conversion is therefore valid only if its tokens and ids equal those of the
files.

Tokenizer classes replace settings in tokenizer.json, such as lowercasing, by those in
tokenizer_config.json or by their defaults, and add the tokens that only tokenizer_config.json
states. This module copies these settings and tokens to tokenizer.json. It copies nothing else: the
classes of transformers 5 drop parts of tokenizer.json that models need.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import ByteLevel

from build_artifacts.checkpoints.checkpoint import (
    Checkpoint,
    Json,
    corrupt_file_error,
    hashed_files,
    is_plain_file,
    read_field,
    read_object,
    unreadable_source_error,
)
from build_artifacts.checkpoints.sentences import is_lowercasing
from build_artifacts.errors import SourceNotFound, UnsupportedModel, first_line
from deployments.artifacts.manifest import TOKENIZER_NAME

_WORDS_NAME = "vocab.txt"
_PAIRS_NAME = "vocab.json"
_ADDED_NAME = "added_tokens.json"
_CONFIG_NAME = "tokenizer_config.json"
# Vocabulary formats that require packages outside the dependencies of the build.
_UNREAD = (".model", ".tiktoken", "bpe.codes")
# Settings of a BertNormalizer in tokenizer_config.json: their names in tokenizer.json, and their
# values if the config does not state them.
_BERT_SETTINGS: Mapping[str, tuple[str, bool | None]] = {
    "do_lower_case": ("lowercase", True),
    "strip_accents": ("strip_accents", None),
    "tokenize_chinese_chars": ("handle_chinese_chars", True),
}
# Settings of the special tokens that have a role.
_ROLES = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_SAVE_HINT = "`AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)`"

VocabularyFiles = dict[str, int]  # token -> id


def ensure_fast_tokenizer(checkpoint: Checkpoint, into: Path) -> Checkpoint:
    """Return `checkpoint` if its tokenizer.json needs no change, otherwise a copy under `into`.

    The copy has a new tokenizer.json and links to the other files of `checkpoint`. Raises
    SourceNotFound, SourceUnreadable or UnsupportedModel.
    """
    _check_special_tokens(checkpoint.weights / _CONFIG_NAME)
    own = checkpoint.weights / TOKENIZER_NAME
    tokenizer = write_fast_tokenizer(checkpoint.weights, into / "tokenizer")
    if tokenizer == own:
        tokenizer = correct_settings(checkpoint.weights, into / "tokenizer")
    if tokenizer == own:
        return checkpoint
    twin = into / "checkpoint"
    for name, path in hashed_files(checkpoint.directory):
        if path != own:
            (twin / name).parent.mkdir(parents=True, exist_ok=True)
            (twin / name).symlink_to(path.absolute())
    place = twin / checkpoint.weights.relative_to(checkpoint.directory)
    (place / TOKENIZER_NAME).symlink_to(tokenizer.absolute())
    return replace(checkpoint, directory=twin)


def _check_special_tokens(config: Path) -> None:
    """Raise UnsupportedModel if texts have no special tokens: tokenizer.json cannot state that."""
    if read_object(config).get("split_special_tokens"):
        raise UnsupportedModel(
            f"`{config.name}` states `split_special_tokens`: no text has special tokens, whatever "
            "it contains",
            hint=f"remove `split_special_tokens` from {config.name} if texts contain no names of "
            "special tokens",
        )


def write_fast_tokenizer(weights: Path, into: Path) -> Path:
    """Return the path of the checkpoint's tokenizer.json, or write one to `into`.

    Raises SourceNotFound if there is no vocabulary that can be converted. Raises SourceUnreadable
    or UnsupportedModel for unreadable or corrupt files.
    """
    own = weights / TOKENIZER_NAME
    if is_plain_file(own):
        return own
    check_vocabulary_files(f"`{weights}`", [path.name for path in weights.glob("*")])
    name = _WORDS_NAME if is_plain_file(weights / _WORDS_NAME) else _PAIRS_NAME
    try:
        tokenizer = _convert(weights)
    except Exception as exc:  # tokenizer classes may raise any exception
        raise _no_tokenizer_error(
            f"`{weights}`", f", and `{name}` cannot be converted: {first_line(exc)}"
        ) from exc
    if tokenizer.get_vocab() != _read_vocabulary(weights, name):
        raise _no_tokenizer_error(
            f"`{weights}`", f", and the tokenizer class of this model does not read `{name}`"
        )
    return _write(tokenizer, into)


def check_vocabulary_files(where: str, names: Iterable[str]) -> None:
    """Raise SourceNotFound if no file in `names` is a vocabulary that the build reads."""
    files = sorted({name.rpartition("/")[2] for name in names})
    if {TOKENIZER_NAME, _WORDS_NAME, _PAIRS_NAME}.isdisjoint(files):
        unread = next((name for name in files if name.endswith(_UNREAD)), None)
        raise _no_tokenizer_error(
            where, f", and `{unread}` cannot be converted here" if unread else ""
        )


def _no_tokenizer_error(where: str, why: str) -> SourceNotFound:
    return SourceNotFound(
        f"no `{TOKENIZER_NAME}` in {where}{why}",
        hint=f"create it where transformers supports the tokenizer: {_SAVE_HINT}",
    )


def correct_settings(weights: Path, into: Path) -> Path:
    """Return the path of tokenizer.json, or write a copy with the settings of its class to `into`.

    The copy also has the tokens that only tokenizer_config.json states. If transformers cannot load
    the tokenizer, the settings stay as they are. Raises UnsupportedModel for a corrupt file, for a
    token that cannot get its stated id, and for lowercasing if the file has no setting for it.
    """
    path = weights / TOKENIZER_NAME
    config, tokenizer = read_object(weights / _CONFIG_NAME), _open(path)
    before = tokenizer.to_str()
    _add_stated_tokens(weights / _CONFIG_NAME, tokenizer)
    if not _has_settings_of(config, tokenizer):  # loading transformers takes seconds
        _copy_settings_of_class(weights, tokenizer)
    if tokenizer.to_str() == before:
        return path
    return _write(tokenizer, into)


def _add_stated_tokens(config: Path, tokenizer: Tokenizer) -> None:
    """Add the tokens that `config` states and `tokenizer` does not find in texts.

    Raises UnsupportedModel if a token would get another id than the stated one, or than the one
    that transformers gives it.
    """
    name = "added_tokens_decoder"
    stated = read_field(config, name, dict) or {}
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    try:
        tokens = {int(number): _read_token(fields) for number, fields in stated.items()}
    except (TypeError, ValueError, LookupError) as exc:
        raise corrupt_file_error(config, f"`{name}` does not name tokens by their ids") from exc
    named = known.union(token.content for token in tokens.values())
    if missing := _find_special_names(config, tokenizer) - named:
        tokens |= _read_tokens_of_class(config.parent, missing)
    for number, token in sorted(tokens.items()):
        if token.content in known:
            continue
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        if (own := tokenizer.token_to_id(token.content)) != number:
            raise UnsupportedModel(
                f"the token `{token.content}` of `{config.name}` has the id {number}, and "
                f"`{TOKENIZER_NAME}` would give it the id {own}",
                hint=f"save the tokenizer again where its tokens can be compared: {_SAVE_HINT}",
            )


def _find_special_names(config: Path, tokenizer: Tokenizer) -> set[str]:
    """Return the special tokens of `config`; those with a role only if `tokenizer` lacks them."""
    content, names = read_object(config), set[str]()
    try:
        for field in ("additional_special_tokens", "extra_special_tokens"):
            value = content.get(field) or []
            names.update(map(_read_name, value.values() if isinstance(value, dict) else value))
        for field in _ROLES:
            if (value := content.get(field)) and tokenizer.token_to_id(_read_name(value)) is None:
                names.add(_read_name(value))
    except (TypeError, LookupError) as exc:
        raise corrupt_file_error(config, f"`{field}` does not name tokens") from exc
    return names


def _read_name(entry: Json) -> str:
    name = entry["content"] if isinstance(entry, dict) else entry
    if not isinstance(name, str):
        raise TypeError(f"a token is text, not {name!r}")
    return name


def _read_tokens_of_class(weights: Path, names: set[str]) -> dict[int, AddedToken]:
    """Return the tokens by their ids, as transformers adds them; {} if it cannot load them."""
    loaded = _load_class(weights)
    added = {} if loaded is None else loaded.get_added_tokens_decoder()
    return {number: token for number, token in added.items() if token.content in names}


def _read_token(fields: Mapping[str, Json]) -> AddedToken:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(fields["content"], **{flag: fields[flag] for flag in flags if flag in fields})


def _copy_settings_of_class(weights: Path, tokenizer: Tokenizer) -> None:
    other = _load_class(weights)
    if other is None:
        return
    _copy_settings(other, tokenizer)
    if is_lowercasing(other) and not is_lowercasing(tokenizer):
        raise UnsupportedModel(
            f"`{TOKENIZER_NAME}` does not lowercase texts, and `{_CONFIG_NAME}` states "
            "`do_lower_case`",
            hint=f"save the tokenizer again where its tokens can be compared: {_SAVE_HINT}",
        )


def _has_settings_of(config: Mapping[str, Json], tokenizer: Tokenizer) -> bool:
    """Return whether `tokenizer` already has what its transformers class would take from `config`.

    If so, transformers need not be loaded.
    """
    stated = {name: value for name, value in config.items() if value is not None}
    normalizer, pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
    if isinstance(pre_tokenizer, ByteLevel):
        return bool(pre_tokenizer.add_prefix_space == stated.get("add_prefix_space", False))
    if isinstance(normalizer, BertNormalizer):
        return all(
            getattr(normalizer, own_name) == stated.get(name, default)
            for name, (own_name, default) in _BERT_SETTINGS.items()
        )
    return not stated.get("do_lower_case") or is_lowercasing(tokenizer)


def _copy_settings(source: Tokenizer, target: Tokenizer) -> None:
    """Copy the settings of tokenizer classes where both tokenizers have the same component."""
    names = [own_name for own_name, _ in _BERT_SETTINGS.values()] + ["add_prefix_space"]
    for part in ("normalizer", "pre_tokenizer", "post_processor"):
        source_part, target_part = getattr(source, part), getattr(target, part)
        for name in names if type(source_part) is type(target_part) else ():
            if hasattr(source_part, name):
                setattr(target_part, name, getattr(source_part, name))


def _load_class(weights: Path) -> Tokenizer | None:
    """Return the tokenizer that transformers loads. Report in the build log if it loads none."""
    try:
        return _convert(weights)
    except Exception as exc:  # noqa: BLE001  tokenizer classes may raise any exception
        reason = f"transformers cannot load the tokenizer: {first_line(exc)}"
        print(f"{reason}. {TOKENIZER_NAME} keeps its own settings", flush=True)
        return None


def _convert(weights: Path) -> Tokenizer:
    """Return a `tokenizers.Tokenizer`, built offline and without remote code."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        weights, trust_remote_code=False, local_files_only=True
    )
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} has no fast implementation")
    backend: Tokenizer = tokenizer.backend_tokenizer
    return backend


def _read_vocabulary(weights: Path, name: str) -> VocabularyFiles:
    path = weights / name
    if name == _PAIRS_NAME:
        return read_object(path) | read_object(weights / _ADDED_NAME)
    try:
        with path.open(encoding="utf-8") as lines:
            words = {line.rstrip("\n"): number for number, line in enumerate(lines)}
    except ValueError as exc:
        raise corrupt_file_error(path, str(exc)) from exc
    except OSError as exc:
        raise unreadable_source_error(path, str(exc.strerror)) from exc
    return words | read_object(weights / _ADDED_NAME)


def _write(tokenizer: Tokenizer, into: Path) -> Path:
    """Write tokenizer.json to `into`. Raises OSError; `Tokenizer.save` raises bare Exception."""
    into.mkdir(parents=True, exist_ok=True)
    path = into / TOKENIZER_NAME
    path.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    return path


def _open(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as exc:  # the library raises bare Exception
        raise corrupt_file_error(path, first_line(exc)) from exc
