"""Values that tests are made of, built from nothing: no hub, no network."""

from __future__ import annotations

import json
import string
from pathlib import Path

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = (
    *("the", "a", "of", "and", "to", "in", "is", "it", "you", "that", "was", "for", "on", "with"),
    *("good", "bad", "great", "awful", "lovely", "film", "food", "river", "city", "train", "night"),
)
HIDDEN = 32
POSITIONS = 64


def tiny_checkpoint(
    directory: Path,
    *,
    model_type: str = "bert",
    labels: tuple[str, ...] = (),
    pooling: str = "mean",
    normalize: bool = True,
    seed: int = 0,
) -> Path:
    """A random two-layer checkpoint of hidden size 32 with its tokenizer; returns `directory`.

    With `labels` it is a classifier, without them a sentence-transformers embedding model that
    reads 64 positions. Weights are larger than a fresh model's, so that different texts get
    clearly different answers.
    """
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

    directory.mkdir(parents=True, exist_ok=True)
    tiny_tokenizer(directory)
    config = AutoConfig.for_model(model_type, **_sizes(model_type))
    torch.manual_seed(seed)
    if labels:
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: i for i, label in enumerate(labels)}
        model = AutoModelForSequenceClassification.from_config(config)
    else:
        model = AutoModel.from_config(config)
        write_pooling(directory, pooling=pooling, normalize=normalize)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    model.save_pretrained(directory)
    return directory


def _sizes(model_type: str) -> dict[str, int | float]:
    vocab = len(_vocabulary())
    if model_type == "distilbert":
        return {"vocab_size": vocab, "dim": HIDDEN, "hidden_dim": 64, "n_layers": 2, "n_heads": 2,
                "max_position_embeddings": POSITIONS}  # fmt: skip
    sizes: dict[str, int | float] = {
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": POSITIONS,
        "pad_token_id": 0,
    }
    if model_type in ("albert", "electra"):
        sizes["embedding_size"] = 16
    if model_type == "mpnet":
        sizes["pad_token_id"] = 1  # its code counts positions from 2 whatever the file says
    return sizes


def tiny_tokenizer(directory: Path) -> None:
    """A lowercasing WordPiece tokenizer over ASCII and a few words, as tokenizer.json."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    vocabulary = {token: i for i, token in enumerate(_vocabulary())}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(
        ("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"])
    )
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512},
    )


def _vocabulary() -> list[str]:
    letters = [*string.ascii_lowercase, *string.digits, *string.punctuation]
    return list(dict.fromkeys([*SPECIAL_TOKENS, *WORDS, *letters, *(f"##{c}" for c in letters)]))


def write_pooling(directory: Path, *, pooling: str = "mean", normalize: bool = True) -> None:
    """The files by which sentence-transformers says how rows are pooled."""
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling")]
    if normalize:
        kinds.append(("2_Normalize", "Normalize"))
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
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
        },
    )


def write_json(path: Path, value: object) -> None:
    """`value` as a JSON file; directories are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
