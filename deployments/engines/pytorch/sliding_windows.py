"""Sliding windows of the layers of decoders, as transformers applies them."""

from __future__ import annotations

from typing import Any

# Model types whose layers all have the sliding window. Their configs have no `layer_types`.
WINDOW_IN_ALL_LAYERS = ("mistral", "phi3", "starcoder2", "mixtral", "qwen3_moe")
LOCAL_LAYER, GLOBAL_LAYER = "sliding_attention", "full_attention"  # as in `layer_types`


def read_windows(config: Any) -> list[int | None]:
    """Return the sliding window of each layer in tokens, None for full attention.

    `config` is a transformers.PretrainedConfig. A field counts only if its class declares it:
    transformers ignores all other fields.
    """
    kind = type(config)
    window = config.sliding_window if hasattr(kind, "sliding_window") else None
    layers = [GLOBAL_LAYER] * config.num_hidden_layers
    if config.model_type in WINDOW_IN_ALL_LAYERS:
        layers = [LOCAL_LAYER] * config.num_hidden_layers
    elif hasattr(kind, "layer_types"):
        layers = config.layer_types
    return [window if layer == LOCAL_LAYER else None for layer in layers]
