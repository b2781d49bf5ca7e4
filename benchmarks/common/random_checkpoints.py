"""Checkpoints with random weights and their tokenizers, written without a network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from typing import Any

from build_artifacts.checkpoints.models import LOADERS
from deployments.artifacts.types import TaskName
from deployments.tasks import find_head

SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_BYTE_PAIR_TOKENS = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>"}
_VOCABULARY = 4_000
LABELS: Mapping[TaskName, tuple[str, ...]] = {
    TaskName.TEXT_CLASSIFICATION: ("NEGATIVE", "POSITIVE"),
    TaskName.ZERO_SHOT_CLASSIFICATION: ("contradiction", "neutral", "entailment"),
    TaskName.TEXT_RANKING: ("LABEL_0",),
    TaskName.TOKEN_CLASSIFICATION: ("O", "B-PER", "I-PER", "B-LOC", "I-LOC"),
}
# (hidden size, layers, attention heads, size of the feed-forward layers)
BertSizes = tuple[int, int, int, int]
TINY_BERT: BertSizes = (32, 2, 2, 64)
MINILM: BertSizes = (384, 6, 12, 1_536)
BERT_LARGE: BertSizes = (1_024, 24, 16, 4_096)

# Arguments of transformers' LlamaConfig.
LlamaSizes = Mapping[str, int]
TINY_LLAMA: LlamaSizes = dict(
    vocab_size=1_024, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
)  # fmt: skip
SMALL_LLAMA: LlamaSizes = {**TINY_LLAMA, "hidden_size": 256, "intermediate_size": 704}
SMOLLM_135M: LlamaSizes = dict(
    vocab_size=49_152, hidden_size=576, intermediate_size=1_536, num_hidden_layers=30,
    num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8_192,
)  # fmt: skip
LLAMA_1B: LlamaSizes = dict(
    vocab_size=128_256, hidden_size=2_048, intermediate_size=8_192, num_hidden_layers=16,
    num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8_192,
)  # fmt: skip

# The name of a class of decoders, and the arguments of its config.
RandomDecoder = tuple[str, Mapping[str, Any]]
_TINY = {**TINY_LLAMA, "head_dim": 16, "tie_word_embeddings": True}
_TINY_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
# Sliding windows in every second layer, and soft caps.
TINY_GEMMA2: RandomDecoder = ("Gemma2ForCausalLM", {**_TINY, "sliding_window": 32})
# Sliding windows, attention sinks, and experts with biases.
TINY_GPT_OSS: RandomDecoder = (
    "GptOssForCausalLM",
    {**_TINY, "sliding_window": 32, "num_local_experts": 8, "num_experts_per_tok": 3},
)
TINY_MOE: RandomDecoder = ("Qwen3MoeForCausalLM", {**_TINY, **_TINY_EXPERTS})
# Recurrent layers before one with attention.
TINY_QWEN3_5: RandomDecoder = ("Qwen3_5ForCausalLM", {
    **_TINY, "num_hidden_layers": 3, "layer_types": ["linear_attention"] * 2 + ["full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
})  # fmt: skip
# Heads of two sizes, and a layer that reads the keys of another one.
TINY_GEMMA4: RandomDecoder = ("Gemma4ForCausalLM", {
    **_TINY, "num_hidden_layers": 3, "layer_types": [
        "sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 32, "global_head_dim": 32, "num_kv_shared_layers": 1,
    "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 1_024,
})  # fmt: skip
# Latent attention, with experts after the first layer.
TINY_DEEPSEEK: RandomDecoder = ("DeepseekV3ForCausalLM", {
    **_TINY, "num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 40,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24, "first_k_dense_replace": 1,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "n_group": 1,
    "topk_group": 1,
})  # fmt: skip
# Four of the 48 layers of Qwen3-30B-A3B.
MOE_LAYERS: RandomDecoder = ("Qwen3MoeForCausalLM", dict(
    vocab_size=151_936, hidden_size=2_048, num_hidden_layers=4, num_attention_heads=32,
    num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
    moe_intermediate_size=768, norm_topk_prob=True, max_position_embeddings=8_192,
    tie_word_embeddings=True,
))  # fmt: skip


def write_bert(directory: Path, sizes: BertSizes, task: TaskName, seed: int) -> Path:
    """Write a BERT with the head of `task`. The model's outputs differ clearly between texts."""
    import torch
    import transformers

    hidden, layers, heads, inner = sizes
    config = transformers.BertConfig(
        vocab_size=_write_wordpiece(directory),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=inner,
        max_position_embeddings=512,
        pad_token_id=0,
    )
    if labels := LABELS.get(task):
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: index for index, label in enumerate(labels)}
    torch.manual_seed(seed)
    model = getattr(transformers, LOADERS[find_head(task)]).from_config(config)
    _draw_weights(model, std=1.2 / sqrt(hidden))
    model.save_pretrained(directory)
    return directory


def write_llama(directory: Path, sizes: LlamaSizes, seed: int) -> Path:
    tied = {**sizes, "tie_word_embeddings": True}
    return write_decoder(directory, ("LlamaForCausalLM", tied), seed)


def write_decoder(directory: Path, decoder: RandomDecoder, seed: int) -> Path:
    """Write a decoder. Large models keep the initial weights of transformers, which saves time."""
    import torch
    import transformers

    ids = _write_byte_pairs(directory)
    torch.manual_seed(seed)
    name, values = decoder
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**values, **ids))
    if values["hidden_size"] <= SMALL_LLAMA["hidden_size"]:
        _draw_weights(model, std=1.2 / sqrt(values["hidden_size"]))
    model.save_pretrained(directory)
    return directory


def write_gpt2(directory: Path, seed: int) -> Path:
    import torch
    import transformers

    ids = _write_byte_pairs(directory)
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=1_024, n_embd=64, n_layer=2, n_head=4, n_positions=512, **ids
    )
    model = transformers.GPT2LMHeadModel(config)
    _draw_weights(model, std=0.15)
    model.save_pretrained(directory)
    return directory


def write_bart(directory: Path, seed: int) -> Path:
    """Write a tiny BART model with random weights, as an example of an encoder-decoder model."""
    import torch
    import transformers

    ids = _write_byte_pairs(directory)
    torch.manual_seed(seed)
    config = transformers.BartConfig(
        vocab_size=1_024, d_model=64, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=96,
        decoder_ffn_dim=96, max_position_embeddings=512, forced_eos_token_id=None,
        decoder_start_token_id=ids["eos_token_id"], **ids,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration(config)
    _draw_weights(model, std=0.15)
    model.save_pretrained(directory)
    return directory


def _draw_weights(model: Any, std: float) -> None:
    """Draw all matrices from a normal distribution with standard deviation `std`.

    Callers choose `std` so large that logits differ by more than FP16 rounding.
    """
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=std)


def _write_wordpiece(directory: Path) -> int:
    """Write a WordPiece tokenizer trained on the probe texts; return its vocabulary size."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    from build_artifacts.encoders.probes import PROBES

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=_VOCABULARY, special_tokens=SPECIAL_TOKENS, show_progress=False
    )
    tokenizer.train_from_iterator(PROBES, trainer)
    ends = [(token, SPECIAL_TOKENS.index(token)) for token in ("[SEP]", "[CLS]")]
    tokenizer.post_processor = processors.BertProcessing(*ends)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    _write_tokenizer_config(directory, {**names, "mask_token": "[MASK]", "pad_token": "[PAD]"})
    return int(tokenizer.get_vocab_size())


def _write_byte_pairs(directory: Path) -> dict[str, int]:
    """Write a byte-level BPE tokenizer. Return the ids of its special tokens by config field."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from build_artifacts.encoders.probes import PROBES

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1_000,
        special_tokens=list(_BYTE_PAIR_TOKENS.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(PROBES, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_tokenizer_config(directory, _BYTE_PAIR_TOKENS)
    return {f"{name}_id": index for index, name in enumerate(_BYTE_PAIR_TOKENS)}


def _write_tokenizer_config(directory: Path, tokens: Mapping[str, str]) -> None:
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, **tokens}
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(content), encoding="utf-8")
