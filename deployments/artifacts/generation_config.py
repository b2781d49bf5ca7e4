"""Generation settings of a model, stored in its manifest.

The fields of `GenerationDefaults` have the names that transformers uses.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from deployments.artifacts.types import FrozenModel


class EncoderDecoderConfig(FrozenModel):
    """Settings of encoder-decoder models only."""

    max_source_tokens: int = Field(ge=1)  # maximum length of the encoder's input
    decoder_start_token_id: int  # token before every answer
    # First token of every answer. If a request sets the languages, the token of the target language
    # replaces it.
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None  # last token of an answer that reaches its limit
    # Ids of the language tokens by language code, such as {"en_XX": 250004}. Empty if requests
    # cannot set the languages of this model.
    languages: dict[str, int] = Field(default_factory=dict)


class GenerationDefaults(FrozenModel):
    """Defaults of the checkpoint for options that a request omits.

    Decoder-only models set the sampling fields, encoder-decoder models the beam search fields.
    Both set `repetition_penalty`.
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
    """Settings of a generative model: shape of its KV cache, token ids, texts and defaults.

    The KV cache of a layer is two arrays [slots, kv_heads, tokens, head_dim], keys and values. If
    layers differ in these sizes, `head_dim` is the largest, and `token_kv_values` counts all.
    """

    # Number of layers with a KV cache of their own. Without any, `kv_heads` and `head_dim` are 1.
    layers: int = Field(ge=0)
    heads: int | None = Field(None, ge=1)  # query heads; None: equal to kv_heads
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    # Number of keys and values of one token, if the layers differ. None: all layers are equal.
    token_kv_values: int | None = Field(None, ge=1)
    # Number of values of one token in the latent vectors of all layers, which torch engines cache
    # in place of keys and values. None: no latent attention.
    token_latent_values: int | None = Field(None, ge=1)
    eos_token_ids: tuple[int, ...] = Field(min_length=1)  # each of these tokens ends an answer
    # Variables of the chat template, such as {"bos_token": "<s>"}.
    special_tokens: dict[str, str] = Field(default_factory=dict)
    suppressed_token_ids: tuple[int, ...] = ()  # tokens that are never generated
    has_experts: bool = False  # whether layers are mixtures of experts
    # Number of values of the recurrent states of a slot; 0 if no layer has such a state.
    state_values: int = Field(0, ge=0)
    encoder_decoder: EncoderDecoderConfig | None = None  # None: decoder-only
    defaults: GenerationDefaults = GenerationDefaults()
    # Text inserted before the prompt, by task, such as {"summarization": "summarize: "}.
    task_prefixes: dict[str, str] = Field(default_factory=dict)
