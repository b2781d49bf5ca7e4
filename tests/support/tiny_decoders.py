"""Tiny generative checkpoints with random weights, one of them also as a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.decoder_artifacts import (
    CHATML,
    END,
    MERGES,
    TURN,
    TURN_END,
    write_byte_tokenizer,
)
from tests.support.tiny_encoders import write_json

HIDDEN, LAYERS, ATTENTION_HEADS, KV_HEADS, INNER, POSITIONS = 64, 2, 4, 2, 96, 256


def tiny_llama(directory: Path, *, inner: int = INNER) -> Path:
    """Write a Llama with a byte tokenizer. Its logits differ clearly. Return `directory`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = write_byte_tokenizer(directory / "tokenizer.json")
    write_json(directory / "tokenizer_config.json", tokenizer_config())
    (directory / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=HIDDEN,
        intermediate_size=inner,
        num_hidden_layers=LAYERS,
        num_attention_heads=ATTENTION_HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=POSITIONS,
        bos_token_id=tokenizer.token_to_id(END),
        eos_token_id=tokenizer.token_to_id(TURN_END),
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
        model.lm_head.weight.normal_(std=1.0)
    model.save_pretrained(directory)
    return directory


def tiny_nemotron(directory: Path, rope_type: str) -> Path:
    """Write a Nemotron with the tokenizer of `tiny_llama`. Return `directory`."""
    import torch
    from transformers import LlamaConfig, NemotronConfig, NemotronForCausalLM

    llama = LlamaConfig.from_pretrained(tiny_llama(directory)).to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
             "num_attention_heads", "num_key_value_heads", "max_position_embeddings",
             "bos_token_id", "eos_token_id")  # fmt: skip
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0, "partial_rotary_factor": 1.0}
    torch.manual_seed(0)
    config = NemotronConfig(**{name: llama[name] for name in names}, rope_parameters=rope)
    NemotronForCausalLM(config).save_pretrained(directory)
    return directory


def tiny_gpt2(directory: Path) -> Path:
    """Write a GPT-2 with a byte tokenizer and without a chat template. Return `directory`."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = write_byte_tokenizer(directory / "tokenizer.json")
    write_json(directory / "tokenizer_config.json", tokenizer_config())
    config = GPT2Config(
        vocab_size=tokenizer.get_vocab_size(),
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=ATTENTION_HEADS,
        n_positions=POSITIONS,
        bos_token_id=tokenizer.token_to_id(END),
        eos_token_id=tokenizer.token_to_id(END),
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.0 if "wte" in name else 0.15)
    model.save_pretrained(directory)
    return directory


def tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": TURN,
        "eos_token": TURN_END,
        "pad_token": END,
        "add_bos_token": False,
        "model_max_length": POSITIONS,
    }


# Weight name of a layer in llama.cpp -> name in transformers.
_PARTS = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def write_gguf(
    checkpoint: Path, path: Path, extend: Callable[[Any], None] = lambda writer: None
) -> Path:
    """Write the tiny Llama in `checkpoint` as an fp32 GGUF file. Return `path`.

    `extend` may add fields and tensors to the GGUFWriter.
    """
    from gguf import GGUFWriter, TokenType
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    tensors = load_file(checkpoint / "model.safetensors")
    vocabulary = Tokenizer.from_file(str(checkpoint / "tokenizer.json")).get_vocab()
    words = sorted(vocabulary, key=lambda word: vocabulary[word])
    special = (END, TURN, TURN_END)
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(ATTENTION_HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    kinds = [TokenType.CONTROL if word in special else TokenType.NORMAL for word in words]
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(vocabulary[END])
    writer.add_eos_token_id(vocabulary[TURN_END])
    writer.add_chat_template(CHATML)
    for name, key in _WHOLE.items():
        writer.add_tensor(f"{name}.weight", tensors[f"{key}.weight"])
    for layer in range(LAYERS):
        for name, key in _PARTS.items():
            weights = tensors[f"model.layers.{layer}.{key}.weight"]
            heads = {"attn_q": ATTENTION_HEADS, "attn_k": KV_HEADS}.get(name)
            turned = _interleaved(weights, heads) if heads else weights
            writer.add_tensor(f"blk.{layer}.{name}.weight", turned)
    extend(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _interleaved(weights: np.ndarray, heads: int) -> np.ndarray:
    """Reorder channels. RoPE pairs neighbors in llama.cpp, but the two halves in transformers."""
    size = weights.shape[0] // heads
    halves = weights.reshape(heads, 2, size // 2, weights.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weights.shape))


def tiny_writer(directory: Path, make: Callable[[int, dict[str, int]], object]) -> Path:
    """Write an encoder-decoder model with a byte tokenizer. Return `directory`.

    `make` gets the vocabulary size and the ids of the special tokens by config field.
    """
    import torch
    from tokenizers import processors

    tokenizer = write_byte_tokenizer(directory / "tokenizer.json")
    end = tokenizer.token_to_id(TURN_END)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {TURN_END}", special_tokens=[(TURN_END, end)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", tokenizer_config())
    pad = tokenizer.token_to_id(END)
    ids = {"pad_token_id": pad, "eos_token_id": end, "decoder_start_token_id": pad}
    torch.manual_seed(0)
    model: Any = make(tokenizer.get_vocab_size(), ids)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed_positions" not in name:
                parameter.normal_(std=1.0 if "shared" in name else 0.2)
    model.save_pretrained(directory)
    return directory


def make_t5(vocabulary: int, ids: dict[str, int]) -> object:
    """Create a T5 with task prefixes for summarization and translation."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=vocabulary, d_model=HIDDEN, d_kv=16, d_ff=INNER, num_layers=LAYERS,
        num_heads=ATTENTION_HEADS, **ids,
        task_specific_params={
            "summarization": {"prefix": "summarize: ", "num_beams": 4},
            "translation_en_to_de": {"prefix": "translate English to German: "},
            "translation_en_to_fr": {"prefix": "translate English to French: "},
        },
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def make_marian(vocabulary: int, ids: dict[str, int]) -> object:
    """Create a Marian that uses two beams by default."""
    from transformers import MarianConfig, MarianMTModel

    config = MarianConfig(
        vocab_size=vocabulary, d_model=HIDDEN, encoder_layers=LAYERS, decoder_layers=LAYERS,
        encoder_attention_heads=ATTENTION_HEADS, decoder_attention_heads=ATTENTION_HEADS,
        encoder_ffn_dim=INNER, decoder_ffn_dim=INNER, max_position_embeddings=POSITIONS,
        forced_eos_token_id=None, **ids,
    )  # fmt: skip
    model = MarianMTModel(config)
    model.generation_config.num_beams = 2
    model.generation_config.max_length = 40
    return model
