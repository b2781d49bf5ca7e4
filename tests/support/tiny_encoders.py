"""Tiny checkpoints of encoders and their tokenizers, created without a network."""

from __future__ import annotations

import json
import string
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from build_artifacts.checkpoints.models import LOADERS
from deployments.artifacts.types import ModelHead

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = (
    *("the", "a", "of", "and", "to", "in", "is", "it", "you", "that", "was", "for", "on", "with"),
    *("good", "bad", "great", "awful", "lovely", "film", "food", "river", "city", "train", "night"),
)
HIDDEN = 32
_MODULES = "sentence_transformers.models"
_SPARSE_MODULES = "sentence_transformers.sparse_encoder.models"
POSITIONS = 64

# Heads of encoder models.
ENCODER_HEADS = tuple(head for head in ModelHead if head is not ModelHead.NEXT_TOKEN)


def tiny_checkpoint(  # noqa: PLR0913  tests set one or two options each
    directory: Path,
    *,
    model_type: str = "bert",
    head: ModelHead | None = None,
    labels: tuple[str, ...] = (),
    pooling: str = "mean",
    normalize: bool = True,
    layers: int = 2,
) -> Path:
    """Write a random checkpoint of hidden size 32 and its tokenizer. Return `directory`.

    Without `head`, the model is a classifier if `labels` are given, else an embedding model. It has
    64 positions. Its weights are larger than usual, so that outputs of texts differ clearly.
    """
    import torch
    import transformers

    head = head or (ModelHead.LABELS if labels else ModelHead.VECTOR)
    tiny_tokenizer(directory)
    config = transformers.AutoConfig.for_model(model_type, **_sizes(model_type, layers))
    if labels:
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: i for i, label in enumerate(labels)}
    if head is ModelHead.VECTOR:
        write_pooling(directory, pooling=pooling, normalize=normalize)
    if head is ModelHead.SPARSE:
        write_splade(directory)
    torch.manual_seed(0)
    model = getattr(transformers, LOADERS[head]).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0  # as in trained models
        if head is ModelHead.SPARSE:
            model.get_output_embeddings().bias.fill_(-3)  # most weights are 0, as in trained models
    model.save_pretrained(directory)
    return directory


def _sizes(model_type: str, layers: int) -> dict[str, object]:
    vocab = len(_vocabulary())
    if model_type == "distilbert":
        return {"vocab_size": vocab, "dim": HIDDEN, "hidden_dim": 64, "n_layers": layers,
                "n_heads": 2, "max_position_embeddings": POSITIONS}  # fmt: skip
    return {
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "max_position_embeddings": POSITIONS,
        "pad_token_id": 0,
        **_OWN_SIZES.get(model_type, {}),
    }


# Additional config fields that an architecture requires.
_OWN_SIZES: dict[str, dict[str, object]] = {
    "albert": {"embedding_size": 16},
    "electra": {"embedding_size": 16},
    "mpnet": {"pad_token_id": 1},  # position ids start after the padding id, at 2
    # Settings of microsoft/deberta-v3-base, with smaller sizes.
    "deberta-v2": {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 8,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "position_biased_input": False,
        "type_vocab_size": 0,
    },
    "mobilebert": {"embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
    # Every second layer uses local attention to eight neighbors.
    "modernbert": {"local_attention": 8, "global_attn_every_n_layers": 2,
                   "bos_token_id": 2, "cls_token_id": 2, "eos_token_id": 3, "sep_token_id": 3},
    "qwen3": {"num_key_value_heads": 1, "head_dim": 16},
    # As in EmbeddingGemma: attention in both directions, local and global.
    "gemma3_text": {"num_key_value_heads": 1, "head_dim": 16, "use_bidirectional_attention": True,
                    "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "big_bird": {"attention_type": "original_full"},
}  # fmt: skip


def tiny_tokenizer(directory: Path) -> None:
    """Write a lowercasing WordPiece tokenizer with ASCII characters and a few words."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    vocabulary = {token: i for i, token in enumerate(_vocabulary())}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(
        ("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"])
    )
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([*SPECIAL_TOKENS])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": 512,
            "mask_token": "[MASK]",
        },
    )


def _vocabulary() -> list[str]:
    letters = [*string.ascii_lowercase, *string.digits, *string.punctuation]
    return list(dict.fromkeys([*SPECIAL_TOKENS, *WORDS, *letters, *(f"##{c}" for c in letters)]))


def write_pooling(directory: Path, *, pooling: str = "mean", normalize: bool = True) -> None:
    """Write the pooling configuration of sentence-transformers."""
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling")]
    if normalize:
        kinds.append(("2_Normalize", "Normalize"))
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"{_MODULES}.{kind}"}
        for i, (path, kind) in enumerate(kinds)
    ]
    write_json(directory / "modules.json", modules)
    write_json(
        directory / "1_Pooling" / "config.json",
        {
            "word_embedding_dimension": HIDDEN,
            "pooling_mode_cls_token": pooling == "cls",
            "pooling_mode_mean_tokens": pooling == "mean",
            "pooling_mode_max_tokens": pooling == "max",
            "pooling_mode_weightedmean_tokens": pooling == "weightedmean",
            "pooling_mode_lasttoken": pooling == "lasttoken",
        },
    )


def write_splade(
    directory: Path, *, transformer: str = "MLMTransformer", **pooling: object
) -> None:
    """Write the configuration of a sparse encoder of sentence-transformers.

    `pooling` are settings of the module SpladePooling.
    """
    kinds = [("", transformer), ("1_SpladePooling", "SpladePooling")]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"{_SPARSE_MODULES}.{kind}"}
        for i, (path, kind) in enumerate(kinds)
    ]
    write_json(directory / "modules.json", modules)
    write_json(directory / "1_SpladePooling" / "config.json", pooling)


def write_dense(
    directory: Path, name: str, *, output_width: int, input_width: int = HIDDEN, **settings: object
) -> dict[str, NDArray[np.float32]]:
    """Insert a random Dense module of sentence-transformers before Normalize; return its weights.

    `settings` replace fields of the module's config. The default activation is Tanh. `bias=False`
    omits the bias.
    """
    from safetensors.numpy import save_file

    config = {
        "in_features": input_width,
        "out_features": output_width,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    } | settings
    write_json(directory / name / "config.json", config)
    rng = np.random.default_rng(output_width)
    weights = {"linear.weight": rng.normal(0, 0.3, (output_width, input_width)).astype(np.float32)}
    if config["bias"]:
        weights["linear.bias"] = rng.normal(0, 0.3, output_width).astype(np.float32)
    save_file(weights, str(directory / name / "model.safetensors"))
    modules = json.loads((directory / "modules.json").read_text(encoding="utf-8"))
    before = [module for module in modules if not module["type"].endswith(".Normalize")]
    dense = {"idx": len(before), "name": name, "path": name, "type": f"{_MODULES}.Dense"}
    write_json(directory / "modules.json", [*before, dense, *modules[len(before) :]])
    return weights


def write_json(path: Path, value: object) -> None:
    """Write `value` as JSON; create missing directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
