"""Decoder checkpoints: supported architectures, generation config and chat template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from build_artifacts.checkpoints.architectures import (
    TransformersConfig,
    check_unquantized,
    has_experts,
    has_latent_attention,
    read_architecture,
    read_head_size,
    read_kv_heads,
)
from build_artifacts.checkpoints.checkpoint import (
    CONFIG_NAME,
    Json,
    corrupt_file_error,
    is_plain_file,
    read_object,
    unreadable_source_error,
)
from build_artifacts.checkpoints.recurrent_states import (
    can_have_mlp_layers,
    can_lack_attention,
    count_state_values,
    has_hybrid_layers,
    has_known_states,
)
from build_artifacts.errors import UnsupportedModel
from deployments.artifacts.generation_config import GenerationConfig, GenerationDefaults
from deployments.artifacts.manifest import (
    CHAT_TEMPLATE_NAME,
    TOKENIZER_NAME,
    TOOL_TEMPLATE_NAME,
)
from deployments.artifacts.types import TaskName
from deployments.engines.layer_types import (
    EXPERTS_LAYER,
    GLOBAL_LAYER,
    HYBRID_LAYER,
    LOCAL_LAYER,
    MLP_LAYER,
    RECURRENT_LAYERS,
    list_attention_layers,
)
from deployments.generation.harmony import TURN_ENDS as HARMONY_ENDS
from deployments.generation.harmony import is_harmony

# Architectures that onnxruntime-genai's model builder exports with attention in all layers. It also
# exports others, with states that the engine does not have.
_MODEL_BUILDER = (
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
    "GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "PhiForCausalLM",
    "Phi3ForCausalLM", "GraniteForCausalLM", "NemotronForCausalLM", "Ernie4_5ForCausalLM",
)  # fmt: skip
# Architectures that `decoders/graphs/` exports.
GRAPH_BUILDERS = (
    "GPT2LMHeadModel", "OPTForCausalLM", "GPTNeoForCausalLM", "GPTJForCausalLM", "BloomForCausalLM",
    "FalconForCausalLM", "GPTBigCodeForCausalLM", "MptForCausalLM", "CodeGenForCausalLM",
    "XGLMForCausalLM", "BioGptForCausalLM", "GPTNeoXForCausalLM", "SmolLM3ForCausalLM",
    "SeedOssForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM", "Exaone4ForCausalLM",
    "CohereForCausalLM", "Cohere2ForCausalLM", "StableLmForCausalLM", "Starcoder2ForCausalLM",
    "GlmForCausalLM", "Glm4ForCausalLM", "HunYuanDenseV1ForCausalLM", "ArceeForCausalLM",
    "HeliumForCausalLM", "MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM",
    "OlmoeForCausalLM", "FlexOlmoForCausalLM", "GraniteMoeForCausalLM",
    "GraniteMoeSharedForCausalLM", "GraniteMoeHybridForCausalLM", "Ernie4_5_MoeForCausalLM",
    "Glm4MoeForCausalLM", "Dots1ForCausalLM", "HunYuanMoEV1ForCausalLM", "GptOssForCausalLM",
    "Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM",
    "Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM",
    "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM",
    "MiniCPM3ForCausalLM", "YoutuForCausalLM", "Ministral3ForCausalLM",
    "MinistralForCausalLM", "OlmoForCausalLM", "ApertusForCausalLM", "VaultGemmaForCausalLM",
    "CwmForCausalLM", "NanoChatForCausalLM", "Jais2ForCausalLM", "PersimmonForCausalLM",
    "HyperCLOVAXForCausalLM", "GraniteSWAForCausalLM", "GraniteMoeSWAForCausalLM",
    "PhimoeForCausalLM", "ExaoneMoeForCausalLM", "SolarOpenForCausalLM", "MiniMaxM2ForCausalLM",
    "AfmoeForCausalLM", "Qwen3NextForCausalLM", "FalconH1ForCausalLM", "BambaForCausalLM",
    "NemotronHForCausalLM", "MellumForCausalLM", "HYV3ForCausalLM", "Lfm3ForCausalLM",
    "OlmoHybridForCausalLM", "Mamba2ForCausalLM", "Gemma3nForCausalLM",
)  # fmt: skip
SUPPORTED = (*_MODEL_BUILDER, *GRAPH_BUILDERS)
# Model types whose layers differ in heads, or share KV caches.
_UNEQUAL_LAYERS = ("gemma3n_text", "gemma4_text", "gemma4_unified_text")
# Tokens that end a turn in chat templates. Configs often omit them from `eos_token_id`.
_TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|end_of_turn|>",
    "<|eom_id|>",
    "<turn|>",
    "<|tool_response>",  # of Gemma 4, which begins the result of its call
)
GENERATION_CONFIG_NAME = "generation_config.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
# Fields of a generation config that become sampling defaults.
_SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
# Settings that change answers in transformers but not on the server, with their neutral values, for
# every model that generates text.
UNSUPPORTED_SETTINGS: Mapping[str, Json] = {
    **dict.fromkeys(
        ("begin_suppress_tokens", "constraints", "diversity_penalty",
         "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "force_words_ids",
         "penalty_alpha", "sequence_bias", "stop_strings"),
    ),
    **dict.fromkeys(
        ("encoder_repetition_penalty", "guidance_scale", "num_beam_groups", "num_return_sequences"),
        1,
    ),
}  # fmt: skip
# The same, for models without an encoder.
_DECODER_SETTINGS: Mapping[str, Json] = {
    **UNSUPPORTED_SETTINGS,
    **dict.fromkeys(
        ("epsilon_cutoff", "eta_cutoff", "forced_bos_token_id", "forced_eos_token_id", "min_length",
         "min_new_tokens", "no_repeat_ngram_size"),
    ),
    "num_beams": 1,
}  # fmt: skip
# Names of chat templates in tokenizer_config.json, by the file name of the template.
TEMPLATES: Mapping[str, str] = {CHAT_TEMPLATE_NAME: "default", TOOL_TEMPLATE_NAME: "tool_use"}
_TOKENIZER_FILES = (
    "special_tokens_map.json",
    TOKENIZER_CONFIG_NAME,
)  # later files override earlier ones


def check_decoder(config: TransformersConfig) -> None:
    """Raise UnsupportedModel, with the reason, for a model that cannot be built as a decoder."""
    architecture = read_architecture(config)
    if architecture not in SUPPORTED:
        raise UnsupportedModel(
            f"`{architecture}` cannot be built for text generation: no exporter supports it",
            hint=f"supported: {', '.join(SUPPORTED)}",
        )
    known = {LOCAL_LAYER, GLOBAL_LAYER, *(RECURRENT_LAYERS if has_known_states(config) else ())}
    if has_hybrid_layers(config):
        known.add(HYBRID_LAYER)
    if can_have_mlp_layers(config):
        known |= {MLP_LAYER, EXPERTS_LAYER}
    other = set(getattr(config, "layer_types", None) or ()) - known
    if other:
        raise UnsupportedModel(
            f"`{architecture}` has layers of the type `{min(other)}`, which cannot be built",
            hint="use a model of this architecture with attention in all layers",
        )
    if not list_attention_layers(config) and not can_lack_attention(config):
        raise UnsupportedModel(
            f"`{architecture}` has no layer with attention, so it cannot be built",
            hint="use a model of this architecture with attention in some layers",
        )
    check_unquantized(config)


def suggest_text_generation(config: TransformersConfig) -> str | None:
    """Return the hint to build for text generation, or None if the architecture is unsupported."""
    is_supported = read_architecture(config) in SUPPORTED
    return f"pass `--task {TaskName.TEXT_GENERATION}`" if is_supported else None


def read_generation_config(weights: Path, config: TransformersConfig) -> GenerationConfig:
    """Read the KV cache shape, end tokens, suppressed tokens and sampling defaults.

    Raises UnsupportedModel without an end token, and the errors of `read_object`.
    """
    shapes = _list_kv_shapes(config)
    kv_heads, head_dim = max(shapes, key=lambda shape: shape[1], default=(1, 1))
    values = 2 * sum(each_heads * size for each_heads, size in shapes)
    suppressed = read_suppressed_tokens(read_object(find_generation_config(weights)))
    special = special_tokens(weights)
    return GenerationConfig(
        layers=len(shapes),
        heads=config.num_attention_heads if shapes else None,
        kv_heads=kv_heads,
        head_dim=head_dim,
        token_kv_values=values if config.model_type in _UNEQUAL_LAYERS else None,
        token_latent_values=_count_latent_values(config),
        eos_token_ids=_read_eos_token_ids(weights, special, config.vocab_size),
        special_tokens=special,
        suppressed_token_ids=tuple(each for each in suppressed if each < config.vocab_size),
        defaults=_read_defaults(weights),
        has_experts=has_experts(config),
        state_values=count_state_values(config),
    )


def _list_kv_shapes(config: TransformersConfig) -> list[tuple[int, int]]:
    """Return KV heads and values per head of each layer that has a KV cache of its own."""
    layers = list_attention_layers(config)
    if config.model_type in _UNEQUAL_LAYERS:
        own = layers[: len(layers) - config.num_kv_shared_layers]  # the others read earlier caches
        if config.model_type == "gemma3n_text":
            return [(config.num_key_value_heads, config.head_dim)] * len(own)
        each = (config.per_layer_config[layer] for layer in own)
        return [(layer.num_key_value_heads, layer.head_dim) for layer in each]
    return [(read_kv_heads(config), read_head_size(config))] * len(layers)


def _count_latent_values(config: TransformersConfig) -> int | None:
    """Return the values of one token in the latent vectors of all layers, with those for RoPE."""
    if not has_latent_attention(config):
        return None
    return int(config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim))


def _read_defaults(weights: Path) -> GenerationDefaults:
    """Read the valid sampling defaults. Raises the errors of `read_object`."""
    value = read_object(find_generation_config(weights))
    return GenerationDefaults(
        **{name: value[name] for name in _SAMPLING_FIELDS if _is_valid_default(name, value)}
    )


def read_suppressed_tokens(settings: Mapping[str, Json]) -> Iterator[int]:
    """Yield the tokens that no answer may contain, from a generation config."""
    yield from iterate_token_ids(settings.get("suppress_tokens"))
    for words in _read_bad_words(settings):
        if len(words) == 1:  # a longer entry forbids a sequence
            yield from iterate_token_ids(words)


def find_decoder_settings(weights: Path) -> list[str]:
    """Return the sorted names of a decoder's settings that the server does not apply.

    Raises the errors of `read_object`.
    """
    settings = read_object(find_generation_config(weights))
    return sorted(find_unsupported(settings, _DECODER_SETTINGS))


def find_unsupported(settings: Mapping[str, Json], neutral: Mapping[str, Json]) -> list[str]:
    """Return the names in `neutral`, and `bad_words_ids`, whose values change answers."""
    found = [
        name
        for name, ineffective in neutral.items()
        if (value := settings.get(name)) and value != ineffective
    ]
    if any(len(words) > 1 for words in _read_bad_words(settings)):
        found.append("bad_words_ids")
    return found


def _read_bad_words(settings: Mapping[str, Json]) -> list[list[Json]]:
    value = settings.get("bad_words_ids")
    return [words for words in value if isinstance(words, list)] if isinstance(value, list) else []


def find_generation_config(weights: Path) -> Path:
    """Return the path of generation_config.json, else of config.json, as transformers does.

    Older versions of transformers saved the settings in config.json. Raises SourceUnreadable if
    generation_config.json exists but cannot be read.
    """
    path = weights / GENERATION_CONFIG_NAME
    return path if is_plain_file(path) else weights / CONFIG_NAME


def _is_valid_default(name: str, value: dict[str, Json]) -> bool:
    """Return whether the config `value` has a valid sampling default `name`.

    A `top_k` of 0, for example, is invalid here. In a config it disables the setting, as if the
    field were missing.
    """
    try:
        GenerationDefaults.model_validate({name: value[name]}, strict=True)
    except (KeyError, ValidationError):
        return False
    return True


def special_tokens(weights: Path) -> dict[str, str]:
    """Read special tokens by their names in chat templates, such as {"bos_token": "<s>"}."""
    tokens = {}
    for file in _TOKENIZER_FILES:
        for name, value in read_object(weights / file).items():
            token = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(token, str):
                tokens[name] = token
    return tokens


def read_chat_templates(weights: Path) -> dict[str, str]:
    """Return the chat templates by their file names, the keys of TEMPLATES, without empty ones.

    Raises UnsupportedModel for a corrupt file and SourceUnreadable for an unreadable file.
    """
    files = {name: _read_template(weights / name) for name in TEMPLATES}
    # Files override the config. An empty file counts as none.
    return _drop_empty(files) or _drop_empty(_read_config_templates(weights))


def _drop_empty(templates: Mapping[str, Json]) -> dict[str, str]:
    return {
        name: text for name, text in templates.items() if isinstance(text, str) and text.strip()
    }


def _read_config_templates(weights: Path) -> dict[str, Json]:
    config = weights / TOKENIZER_CONFIG_NAME
    value = read_object(config).get("chat_template")
    if value is None:  # a checkpoint with image inputs may have a file of its own
        value = read_object(weights / "chat_template.json").get("chat_template")
    if not isinstance(value, list):
        return {CHAT_TEMPLATE_NAME: value}
    if not all(isinstance(entry, dict) for entry in value):
        raise corrupt_file_error(config, "`chat_template` is not a text or a list of objects")
    by_key = {str(entry.get("name")): entry.get("template") for entry in value}
    return {name: by_key.get(key) for name, key in TEMPLATES.items()}


def _read_template(path: Path) -> str | None:
    if not is_plain_file(path):
        return None
    try:
        return path.read_text(encoding="utf-8")
    except ValueError as exc:
        raise corrupt_file_error(path, str(exc)) from exc
    except OSError as exc:
        raise unreadable_source_error(path, str(exc.strerror)) from exc


def _read_eos_token_ids(weights: Path, special: dict[str, str], vocab_size: int) -> tuple[int, ...]:
    """Return all token ids that end a text or a chat turn.

    Ids beyond the vocabulary are left out, if any other remains: a config of a smaller vocabulary
    may still have the default of its architecture.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(weights / TOKENIZER_NAME))
    templates = "".join(read_chat_templates(weights).values())
    # In GPT-OSS's format, <|end|> ends one of several messages of a turn.
    turns = [turn for turn in _TURN_ENDS if turn in templates]
    names = [special.get("eos_token"), *(HARMONY_ENDS if is_harmony(templates) else turns)]
    tokens = [tokenizer.token_to_id(name) for name in names if name is not None]
    stated = [
        ids
        for name in (GENERATION_CONFIG_NAME, CONFIG_NAME)
        for ids in iterate_token_ids(read_object(weights / name).get("eos_token_id"))
    ]
    token_ids = dict.fromkeys([*stated, *(token for token in tokens if token is not None)])
    if not token_ids:
        raise UnsupportedModel(
            "the checkpoint defines no end-of-sequence token",
            hint="set `eos_token_id` in generation_config.json, such as 2 or [2, 7]",
        )
    return tuple(each for each in token_ids if each < vocab_size) or tuple(token_ids)


def iterate_token_ids(value: Json) -> Iterator[int]:
    """Yield the token ids in a config value: a list, a single id or null."""
    values: list[Any] = value if isinstance(value, list) else [value]
    yield from (value for value in values if isinstance(value, int) and value >= 0)
