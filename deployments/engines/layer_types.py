"""Types of the layers of decoders: attention with its sliding windows, or recurrent states."""

from __future__ import annotations

from typing import Any

# Model types whose layers all have the sliding window. Their configs have no `layer_types`.
WINDOW_IN_ALL_LAYERS = (
    "mistral",
    "phi3",
    "starcoder2",
    "mixtral",
    "qwen3_moe",
    "ministral3",
    "phimoe",
)
# Values of `layer_types`. transformers renames older values, such as "mamba".
LOCAL_LAYER, GLOBAL_LAYER = "sliding_attention", "full_attention"
RECURRENT_LAYERS = ("linear_attention", "conv")
HYBRID_LAYER = "hybrid"  # both attention and a recurrent state
MLP_LAYER, EXPERTS_LAYER = "mlp", "moe"  # nothing else


def read_windows(config: Any) -> list[int | None]:
    """Return the sliding window of each layer in tokens, None for full attention.

    `config` is a transformers.PretrainedConfig. A field counts only if its class declares it:
    transformers ignores all other fields. GPT-Neo has fields of its own.
    """
    if config.model_type == "gpt_neo":
        return [config.window_size if kind == "local" else None for kind in config.attention_layers]
    window = config.sliding_window if hasattr(type(config), "sliding_window") else None
    return [window if layer == LOCAL_LAYER else None for layer in list_layer_types(config)]


def list_attention_layers(config: Any) -> list[int]:
    """Return the numbers of the layers that have attention."""
    layers = enumerate(list_layer_types(config))
    return [n for n, layer in layers if layer in (LOCAL_LAYER, GLOBAL_LAYER, HYBRID_LAYER)]


def list_layer_types(config: Any) -> list[str]:
    """Return the type of each layer, in the words of the newest configs."""
    if config.model_type in WINDOW_IN_ALL_LAYERS:
        return [LOCAL_LAYER] * config.num_hidden_layers
    # A class declares the field, or the name as one for an older field.
    aliases = getattr(type(config), "attribute_map", {})
    if hasattr(type(config), "layer_types") or "layer_types" in aliases:
        return list(config.layer_types)
    return [GLOBAL_LAYER] * config.num_hidden_layers
