"""Encoder-decoder checkpoints: supported model types and generation config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from build_artifacts.checkpoints.architectures import (
    WITH_IMAGES,
    TransformersConfig,
    check_unquantized,
    config_errors,
    read_architecture,
)
from build_artifacts.checkpoints.checkpoint import (
    CONFIG_NAME,
    Json,
    corrupt_file_error,
    is_plain_file,
    read_field,
    read_object,
)
from build_artifacts.checkpoints.decoders import (
    GENERATION_CONFIG_NAME,
    UNSUPPORTED_SETTINGS,
    find_generation_config,
    find_unsupported,
    iterate_token_ids,
    read_suppressed_tokens,
    special_tokens,
    suggest_text_generation,
)
from build_artifacts.errors import UnsupportedModel
from deployments.artifacts.generation_config import (
    EncoderDecoderConfig,
    GenerationConfig,
    GenerationDefaults,
)
from deployments.artifacts.manifest import TOKENIZER_NAME
from deployments.artifacts.types import TEXT2TEXT_TASKS
from deployments.errors import ArtifactError
from deployments.tokenization.encodings import open_tokenizer

# Maximum source tokens if the config states no number of positions: the training length of T5.
UNBOUNDED_TOKENS = 512

# Values of `model_type` with a graph builder in `decoders/graphs/`.
SUPPORTED = (
    "bart", "plbart", "mbart", "blenderbot", "marian", "pegasus", "m2m_100", "t5", "mt5",
)  # fmt: skip

# Model types of multilingual models. NLLB has the type `m2m_100`.
MULTILINGUAL = ("mbart", "m2m_100")
# Language tokens such as `en_XX` (mBART), `eng_Latn` (NLLB) and `__en__` (M2M100).
LANGUAGE_TOKEN = re.compile(r"__([a-z]{2,3})__|([a-z]{2}_[A-Z]{2}|[a-z]{3}_[A-Z][a-z]{3})")

# Generation settings whose types transformers does not check.
_FIELD_TYPES: Mapping[str, type] = {
    **dict.fromkeys(
        ("decoder_start_token_id", "forced_bos_token_id", "max_length", "min_length",
         "max_new_tokens", "min_new_tokens", "num_beams", "no_repeat_ngram_size"),
        int,
    ),
    "bad_words_ids": list,
}  # fmt: skip

# Settings without effect. Only decoders sample by the defaults of their checkpoint.
_UNSUPPORTED_SETTINGS: Mapping[str, Json] = {**UNSUPPORTED_SETTINGS, "do_sample": None}

GenerationSettings = Any  # a transformers.GenerationConfig; mypy skips the library


def check_encoder_decoder(config: TransformersConfig, task: str) -> None:
    """Raise UnsupportedModel, with the reason, for a model that cannot be built for `task`."""
    is_text_only = config.get_text_config() is config
    if not (config.is_encoder_decoder or is_text_only or config.model_type in WITH_IMAGES):
        raise UnsupportedModel(
            f"`{read_architecture(config)}` reads more than text, and its text model cannot be "
            "built",
            hint=f"the text models of these types can: {', '.join(WITH_IMAGES)}",
        )
    if not config.is_encoder_decoder:
        raise UnsupportedModel(
            f"`{task}` requires an encoder-decoder model; `{read_architecture(config)}` is not one",
            hint=suggest_text_generation(config) or f"supported: {', '.join(SUPPORTED)}",
        )
    if config.model_type not in SUPPORTED:
        raise UnsupportedModel(
            f"`{read_architecture(config)}` cannot be built: no graph builder supports the model "
            f"type `{config.model_type}`",
            hint=f"supported: {', '.join(SUPPORTED)}",
        )
    check_unquantized(config)


def load_generation_settings(weights: Path, config: TransformersConfig) -> GenerationSettings:
    """Load transformers' generation config from generation_config.json, else from config.json.

    Raises UnsupportedModel for values of wrong types.
    """
    from transformers import GenerationConfig

    path = find_generation_config(weights)
    for name, kind in _FIELD_TYPES.items():
        read_field(path, name, kind)
    with config_errors(path.name):
        if path.name == GENERATION_CONFIG_NAME:
            return GenerationConfig.from_pretrained(weights)
        # transformers removes generation settings from its config objects, so read them from the
        # file. The config object supplies the token ids that the file omits.
        return GenerationConfig.from_model_config(config.to_dict() | read_object(path))


def read_encoder_decoder_config(
    weights: Path, config: TransformersConfig, max_source_tokens: int
) -> GenerationConfig:
    """Read the KV cache shape, the start and end tokens and the generation defaults.

    Raises UnsupportedModel if the start token or an end token is missing, or for values of wrong
    types.
    """
    generation = load_generation_settings(weights, config)
    heads = _read_decoder_size(config, "attention_heads", "num_heads")
    ends = tuple(iterate_token_ids(generation.eos_token_id))
    if generation.decoder_start_token_id is None or not ends:
        raise UnsupportedModel(
            "the checkpoint defines no start token or no end-of-sequence token of answers",
            hint="set `decoder_start_token_id` and `eos_token_id` in generation_config.json",
        )
    return GenerationConfig(
        layers=_read_decoder_size(config, "layers", "num_decoder_layers"),
        kv_heads=heads,
        head_dim=getattr(config, "d_kv", None) or config.d_model // heads,
        eos_token_ids=ends,
        special_tokens=special_tokens(weights),
        suppressed_token_ids=tuple(read_suppressed_tokens(vars(generation))),
        encoder_decoder=EncoderDecoderConfig(
            max_source_tokens=max_source_tokens,
            decoder_start_token_id=generation.decoder_start_token_id,
            forced_bos_token_id=generation.forced_bos_token_id,
            forced_eos_token_id=next(iterate_token_ids(generation.forced_eos_token_id), None),
            languages=read_languages(weights, config),
        ),
        defaults=_read_defaults(weights, generation),
        task_prefixes=_read_task_prefixes(weights),
    )


def find_unsupported_settings(weights: Path, config: TransformersConfig) -> list[str]:
    """Return the sorted names of the checkpoint's settings that the server does not apply.

    The server reads only the key `prefix` of each task in `task_specific_params`. If a task has
    further keys, the names therefore include this field. (transformers 5 ignores the whole field.)
    Raises the errors of `load_generation_settings`.
    """
    generation = load_generation_settings(weights, config)
    found = find_unsupported(vars(generation), _UNSUPPORTED_SETTINGS)
    if any(settings.keys() - {"prefix"} for settings in _read_task_settings(weights).values()):
        found.append("task_specific_params")
    return sorted(found)


def read_languages(weights: Path, config: TransformersConfig) -> dict[str, int]:
    """Read the ids of the tokenizer's language tokens by language code.

    A multilingual model learns the source language from one language token, which its tokenizer
    adds to each text. The result is empty for model types outside MULTILINGUAL. It is also empty if
    the tokenizer does not add this token, because the model then ignores the source language.
    """
    if config.model_type not in MULTILINGUAL or not is_plain_file(weights / TOKENIZER_NAME):
        return {}
    try:
        tokenizer = open_tokenizer(weights)
    except ArtifactError:  # the build's check of the tokenizer reports this error
        return {}
    languages = {
        match[1] or match[2]: token_id
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token.special and (match := LANGUAGE_TOKEN.fullmatch(token.content))
    }
    added = [token_id for token_id in tokenizer.encode("").ids if token_id in languages.values()]
    return languages if len(added) == 1 else {}


def read_vocabulary_size(config: TransformersConfig) -> int:
    """Return the size of the output vocabulary. The input vocabulary may have another size."""
    own = getattr(config, "decoder_vocab_size", None)
    shared = getattr(config, "share_encoder_decoder_embeddings", True)
    return int(config.vocab_size if own is None or shared else own)


def _read_decoder_size(config: TransformersConfig, name: str, otherwise: str) -> int:
    return int(getattr(config, f"decoder_{name}", None) or getattr(config, otherwise))


def _read_defaults(weights: Path, generation: GenerationSettings) -> GenerationDefaults:
    longest, shortest = generation.max_length, generation.min_length
    length_penalty = generation.length_penalty
    repetition_penalty = generation.repetition_penalty
    try:
        return GenerationDefaults(
            repetition_penalty=1.0 if repetition_penalty is None else repetition_penalty,
            num_beams=generation.num_beams or 1,
            length_penalty=1.0 if length_penalty is None else length_penalty,
            early_stopping=generation.early_stopping or False,
            no_repeat_ngram_size=generation.no_repeat_ngram_size or 0,
            # `min_length` and `max_length` count the start token; `min_new_tokens` and
            # `max_new_tokens` do not.
            min_new_tokens=generation.min_new_tokens or max(0, (shortest or 0) - 1),
            max_new_tokens=generation.max_new_tokens or (longest - 1 if longest else None),
        )
    except ValidationError as exc:
        error = exc.errors()[0]
        raise corrupt_file_error(
            find_generation_config(weights), f"`{error['loc'][0]}`: {error['msg']}"
        ) from exc


def _read_task_prefixes(weights: Path) -> dict[str, str]:
    """Return the text that the model expects before every input, by task.

    A task with several prefixes, such as translation with one per language pair, has no entry.
    """
    value = _read_task_settings(weights)
    prefixes: dict[str, str] = {}
    for task in TEXT2TEXT_TASKS:
        task_prefixes = {
            settings["prefix"]
            for name, settings in value.items()
            if (name == task or name.startswith(f"{task}_")) and settings.get("prefix")
        }
        if len(task_prefixes) == 1:
            prefixes[task.value] = task_prefixes.pop()
    return prefixes


def _read_task_settings(weights: Path) -> dict[str, dict[str, Json]]:
    """Return the objects in `task_specific_params` of config.json by their names."""
    value = read_field(weights / CONFIG_NAME, "task_specific_params", dict) or {}
    return {name: settings for name, settings in value.items() if isinstance(settings, dict)}
