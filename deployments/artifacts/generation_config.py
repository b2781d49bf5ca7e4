"""What generating text with a model needs to know, as its manifest has it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from deployments.artifacts.types import FrozenModel


class EncoderDecoderConfig(FrozenModel):
    """What is special to models with an encoder, which reads the prompt apart from the answer."""

    max_source_tokens: int = Field(ge=1)  # that the encoder reads at most
    decoder_start_token_id: int  # what every answer follows
    forced_bos_token_id: int | None = None  # that every answer begins with
    forced_eos_token_id: int | None = None  # that an answer ends with which reaches its limit
    # Ids of the language tokens by language code, such as {"en_XX": 250004}. Empty for models
    # that take no languages by name.
    languages: dict[str, int] = Field(default_factory=dict)


class GenerationDefaults(FrozenModel):
    """What a checkpoint says of its answers, where a request says nothing.

    How tokens are drawn is told by models without an encoder, how answers are searched for by those
    with one.
    """

    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=1)
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, allow_inf_nan=False)
    num_beams: int = Field(1, ge=1)
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    no_repeat_ngram_size: int = Field(0, ge=0)
    min_new_tokens: int = Field(0, ge=0)
    max_new_tokens: int | None = None


class GenerationConfig(FrozenModel):
    """What generating text with a model needs to know: the shape of its memory, and its words.

    The memory of a layer is two arrays [rows, kv_heads, tokens, head_dim], keys and values.
    """

    layers: int = Field(ge=1)
    heads: int | None = Field(None, ge=1)  # of queries; None: as many as of keys and values
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    eos_token_ids: tuple[int, ...] = Field(min_length=1)  # ids; an answer ends with any of them
    # What the chat template may name, such as {"bos_token": "<s>"}.
    special_tokens: dict[str, str] = Field(default_factory=dict)
    suppressed_token_ids: tuple[int, ...] = ()  # ids that no answer may have
    encoder_decoder: EncoderDecoderConfig | None = None  # of a model with an encoder
    defaults: GenerationDefaults = GenerationDefaults()
    # Text put before a prompt, by task, such as {"summarization": "summarize: "}.
    task_prefixes: dict[str, str] = Field(default_factory=dict)
