"""Can a checkpoint be built to generate text, and what do its files say of texts and chats?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from build_artifacts.checkpoints.architectures import TransformersConfig, read_architecture
from build_artifacts.checkpoints.checkpoint import (
    CONFIG_NAME,
    Json,
    corrupt_file,
    is_plain_file,
    read_object,
    unreadable_source,
)
from build_artifacts.errors import UnsupportedModel
from deployments.artifacts.generation_config import GenerationConfig, GenerationDefaults
from deployments.artifacts.manifest import CHAT_TEMPLATE_NAME, TOKENIZER_NAME

# What onnxruntime-genai's model builder writes as a graph of attention over keys and values alone
# (it knows others, with images or recurrent layers, whose memory the server does not keep); GPT-2.
SUPPORTED = (
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
    "GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "PhiForCausalLM",
    "Phi3ForCausalLM", "GraniteForCausalLM", "NemotronForCausalLM", "Ernie4_5ForCausalLM",
    "GPT2LMHeadModel",
)  # fmt: skip
# Tokens by which chat templates end a turn. Configs often name the end of a text only.
_TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|end_of_turn|>",
    "<|eom_id|>",
)
GENERATION_CONFIG_NAME = "generation_config.json"
# What that file may say of drawing tokens.
_SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
_TOKENIZER_FILES = ("special_tokens_map.json", "tokenizer_config.json")  # the later one wins


def check_decoder(config: TransformersConfig) -> int | None:
    """Raise UnsupportedModel, naming the architecture and why, for what cannot be built.

    Returns a limit on the tokens of a text that the graph has and the config does not tell.
    """
    architecture = read_architecture(config)
    if architecture not in SUPPORTED:
        raise UnsupportedModel(
            f"`{architecture}` cannot be built for text generation: there is no graph for it whose "
            "memory is the keys and values of attention alone",
            hint=f"these can: {', '.join(SUPPORTED)}",
        )
    if getattr(config, "quantization_config", None):
        raise UnsupportedModel(
            "the checkpoint is quantised already, and nothing could tell how far graphs are from "
            "the original",
            hint="build from the checkpoint that it was made from",
        )
    # Two tables of rotations, of which the graph takes one by the room there is, not by the text.
    rope = getattr(config, "rope_parameters", None) or {}
    is_split = rope.get("rope_type") == "longrope"
    return int(config.original_max_position_embeddings) if is_split else None


def read_generation_config(weights: Path, config: TransformersConfig) -> GenerationConfig:
    """The shape of the memory, and the words. Raises UnsupportedModel, SourceUnreadable."""
    heads = config.num_attention_heads
    special = special_tokens(weights)
    return GenerationConfig(
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        eos_token_ids=_read_eos_token_ids(weights, special),
        special_tokens=special,
        defaults=_read_defaults(weights),
    )


def _read_defaults(weights: Path) -> GenerationDefaults:
    """How tokens are drawn by the checkpoint. Raises UnsupportedModel or SourceUnreadable."""
    value = read_object(weights / GENERATION_CONFIG_NAME)
    return GenerationDefaults(
        **{name: value[name] for name in _SAMPLING_FIELDS if _is_valid_default(name, value)}
    )


def _is_valid_default(name: str, value: dict[str, Json]) -> bool:
    """Whether `name` is said, and no way to say nothing, such as a `top_k` of 0."""
    try:
        GenerationDefaults.model_validate({name: value[name]}, strict=True)
    except (KeyError, ValidationError):
        return False
    return True


def special_tokens(weights: Path) -> dict[str, str]:
    """Tokens by the names that chat templates use, such as {"bos_token": "<s>"}."""
    found = {}
    for file in _TOKENIZER_FILES:
        for name, value in read_object(weights / file).items():
            token = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(token, str):
                found[name] = token
    return found


def read_chat_template(weights: Path) -> str | None:
    """The template that writes a chat as a prompt, None where the checkpoint has none.

    Raises UnsupportedModel or SourceUnreadable.
    """
    path = weights / CHAT_TEMPLATE_NAME
    if is_plain_file(path):
        try:
            return path.read_text(encoding="utf-8")
        except ValueError as exc:
            raise corrupt_file(path, str(exc)) from exc
        except OSError as exc:
            raise unreadable_source(path, str(exc.strerror)) from exc
    value = read_object(weights / "tokenizer_config.json").get("read_chat_template")
    if isinstance(value, list):  # several by name
        value = {entry.get("name"): entry.get("template") for entry in value}.get("default")
    return value if isinstance(value, str) else None


def _read_eos_token_ids(weights: Path, special: dict[str, str]) -> tuple[int, ...]:
    """Every id by which the checkpoint's files let a text, or a turn of a chat, end."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(weights / TOKENIZER_NAME))
    template = read_chat_template(weights) or ""
    names = [special.get("eos_token"), *(turn for turn in _TURN_ENDS if turn in template)]
    tokens = [tokenizer.token_to_id(name) for name in names if name is not None]
    stated = [
        ids
        for name in (GENERATION_CONFIG_NAME, CONFIG_NAME)
        for ids in iterate_token_ids(read_object(weights / name).get("eos_token_id"))
    ]
    found = dict.fromkeys([*stated, *(token for token in tokens if token is not None)])
    if not found:
        raise UnsupportedModel(
            "nothing in the checkpoint says by which token a text ends",
            hint="set `eos_token_id` in generation_config.json, such as 2 or [2, 7]",
        )
    return tuple(found)


def iterate_token_ids(value: Json) -> Iterator[int]:
    """One id, or several, or none."""
    values: list[Any] = value if isinstance(value, list) else [value]
    yield from (value for value in values if isinstance(value, int) and value >= 0)
