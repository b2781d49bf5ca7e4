"""Sentence embeddings of MiniLM in torch: the baseline for the adapters of this package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_MAX_TOKENS = 256  # per text, the `max_seq_length` of MiniLM


def embed(base: Path, texts: Sequence[str], *, batch: int = 64) -> NDArray[np.float32]:
    """Return unit vectors [texts, dimensions]: the mean over tokens, normalized."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModel

    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    tokenizer.enable_truncation(_MAX_TOKENS)
    tokenizer.enable_padding()
    model = AutoModel.from_pretrained(base, use_safetensors=True, local_files_only=True).eval()
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    vectors = np.zeros((len(texts), model.config.hidden_size), np.float32)
    with torch.inference_mode():
        for start in range(0, len(order), batch):
            part = order[start : start + batch]
            encodings = tokenizer.encode_batch([texts[i] for i in part])
            mask = torch.tensor([each.attention_mask for each in encodings])
            hidden = model(
                input_ids=torch.tensor([each.ids for each in encodings]), attention_mask=mask
            ).last_hidden_state
            weights = mask.unsqueeze(-1)
            mean = (hidden * weights).sum(dim=1) / weights.sum(dim=1)
            vectors[part] = torch.nn.functional.normalize(mean).numpy()
    return vectors
