"""Tiny decoders and encoder-decoders, with random weights that make errors visible."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY, POSITIONS = 96, 48
PAD, START, END = 1, 2, 3

_SIZES = dict(
    vocab_size=VOCABULARY,
    d_model=32,
    encoder_layers=2,
    decoder_layers=3,
    encoder_attention_heads=2,
    decoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_ffn_dim=64,
    max_position_embeddings=POSITIONS,
)
_TOKENS = dict(
    pad_token_id=PAD, decoder_start_token_id=START, eos_token_id=END, bos_token_id=None,
    forced_eos_token_id=None, forced_bos_token_id=None,
)  # fmt: skip
_T5_SIZES = dict(
    vocab_size=VOCABULARY,
    d_model=32,
    d_kv=16,
    d_ff=48,
    num_layers=3,
    num_heads=4,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=12,
)
_T5_TOKENS = dict(pad_token_id=PAD, decoder_start_token_id=PAD, eos_token_id=END)


def _bart_like(name: str, model: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        config = getattr(transformers, f"{name}Config")(**_SIZES, **_TOKENS, **options)
        return getattr(transformers, model)(config)

    return make


def _t5_like(name: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        config = getattr(transformers, f"{name}Config")(**_T5_SIZES, **_T5_TOKENS, **options)
        return getattr(transformers, f"{name}ForConditionalGeneration")(config)

    return make


def _decoder(model: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        kind = getattr(transformers, model)
        return kind(kind.config_class(**_DECODER_SIZES | options))

    return make


_DECODER_SIZES = dict(
    vocab_size=VOCABULARY,
    max_position_embeddings=POSITIONS,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    bos_token_id=END,
    eos_token_id=END,
)
DECODERS: Mapping[str, Callable[[], Any]] = {
    "gpt2": _decoder("GPT2LMHeadModel"),
    "gpt2-scaled-by-layer": _decoder("GPT2LMHeadModel", scale_attn_by_inverse_layer_idx=True,
                                     n_inner=40),
    "gpt2-relu-untied": _decoder("GPT2LMHeadModel", activation_function="relu",
                                 tie_word_embeddings=False),
    "opt": _decoder("OPTForCausalLM", ffn_dim=40),
    "opt-post-norm": _decoder("OPTForCausalLM", ffn_dim=40, do_layer_norm_before=False,
                              word_embed_proj_dim=24),
    "gpt_neo": _decoder("GPTNeoForCausalLM", attention_types=[[["local", "global"], 1]],
                        window_size=4),
    "gptj": _decoder("GPTJForCausalLM", rotary_dim=4),
    "bloom": _decoder("BloomForCausalLM"),
    "falcon": _decoder("FalconForCausalLM"),
    "falcon-alibi": _decoder("FalconForCausalLM", alibi=True, parallel_attn=False, bias=True),
    "gpt_bigcode": _decoder("GPTBigCodeForCausalLM"),
    "mpt": _decoder("MptForCausalLM", max_seq_len=POSITIONS),
    "codegen": _decoder("CodeGenForCausalLM", rotary_dim=4),
    "xglm": _decoder("XGLMForCausalLM", ffn_dim=40),
    "biogpt": _decoder("BioGptForCausalLM", intermediate_size=40),
}  # fmt: skip
ENCODER_DECODERS: Mapping[str, Callable[[], Any]] = {
    "bart": _bart_like("Bart", "BartForConditionalGeneration"),
    "bart-scaled": _bart_like("Bart", "BartForConditionalGeneration", scale_embedding=True,
                              activation_function="relu"),
    "plbart": _bart_like("PLBart", "PLBartForConditionalGeneration"),
    "mbart": _bart_like("MBart", "MBartForConditionalGeneration", scale_embedding=True),
    "blenderbot": _bart_like("Blenderbot", "BlenderbotForConditionalGeneration"),
    "marian": _bart_like("Marian", "MarianMTModel", scale_embedding=True,
                         activation_function="swish"),
    "marian-two-vocabularies": _bart_like(
        "Marian", "MarianMTModel", share_encoder_decoder_embeddings=False, decoder_vocab_size=80
    ),
    "pegasus": _bart_like("Pegasus", "PegasusForConditionalGeneration", scale_embedding=True,
                          activation_function="relu"),
    "m2m_100": _bart_like("M2M100", "M2M100ForConditionalGeneration", scale_embedding=True,
                          activation_function="relu"),
    "t5": _t5_like("T5"),
    "t5-gated": _t5_like("T5", feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "t5-gated-silu": _t5_like("T5", feed_forward_proj="gated-silu"),
    "mt5": _t5_like("MT5", tie_word_embeddings=False),
}  # fmt: skip


# Standard deviation of weights by a part of their name. The first part that matches applies.
_SPREADS = {
    "embed_positions": 2.0,
    "wpe": 2.0,
    "relative_attention_bias": 1.0,
    "shared": 0.2,  # larger embeddings would make a tied head predict its input
    "embed_tokens": 0.2,
    "encoder_attn.out_proj": 0.15,
    "EncDecAttention.o": 0.15,
    "Attention.q": 0.08,  # T5 does not scale its scores
    "bias": 0.1,
    "norm": 0.1,
    "ln_": 0.1,
}


def saved(make: Callable[[], Any], into: Path) -> Any:
    """Create a model with random weights and save it to `into`."""
    torch.manual_seed(7)
    model = make().eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "embed_positions" in name and not tensor.requires_grad:
                continue  # computed, not learned
            spread = next((spread for part, spread in _SPREADS.items() if part in name), 0.3)
            tensor.copy_(torch.randn_like(tensor) * spread + _is_scale(name))
        if (bias := getattr(model, "final_logits_bias", None)) is not None:
            bias.copy_(torch.randn_like(bias) * 0.1)
    model.save_pretrained(into)
    return model


def _is_scale(name: str) -> bool:
    """Return whether the parameter is the scale of a norm."""
    return ("norm" in name or "ln_" in name) and name.endswith("weight")
