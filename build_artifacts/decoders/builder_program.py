"""Entry point that runs onnxruntime-genai's model builder (0.18) with adapted configs.

The builder reads configs differently from transformers 5. The program adapts three kinds of fields,
and the builder itself in one place, the scaling of RoPE:

- RoPE: transformers 5 stores the parameters per layer type for models such as Gemma 3. The builder
  requires the parameters of global layers and the base frequency of local layers at the top level.
- LayerNorm: the builder reads the epsilon only under RMSNorm's name, `rms_norm_eps`. Without that
  name, the builder uses its own default.
- Sliding windows: the builder applies a window only to the layers that `layer_types` names. Configs
  of Mistral, for example, lack this field.
"""

from __future__ import annotations

import runpy
from typing import Any

from deployments.engines.layer_types import (
    GLOBAL_LAYER,
    LOCAL_LAYER,
    WINDOW_IN_ALL_LAYERS,
)
from deployments.host.background_process import end_with_standard_input

_BUILDER = "onnxruntime_genai.models.builder"
_EPSILON, _OTHER_EPSILONS = "rms_norm_eps", ("layer_norm_eps", "norm_eps")


def main() -> None:
    from transformers import AutoConfig

    end_with_standard_input()

    load_config = AutoConfig.from_pretrained

    def load_adapted_config(*args: Any, **kwargs: Any) -> Any:
        config = load_config(*args, **kwargs)
        for name in _OTHER_EPSILONS:
            if hasattr(config, name) and not hasattr(config, _EPSILON):
                vars(config)[_EPSILON] = getattr(config, name)
        kind = getattr(config, "model_type", None)
        if kind in WINDOW_IN_ALL_LAYERS and config.sliding_window is not None:
            vars(config)["layer_types"] = [LOCAL_LAYER] * config.num_hidden_layers
        rope = getattr(config, "rope_parameters", None) or {}
        if GLOBAL_LAYER in rope and LOCAL_LAYER in rope:
            # Bypass attribute assignment, which would restore the nested parameters.
            vars(config).update(
                rope_parameters=dict(rope[GLOBAL_LAYER]),
                rope_theta=rope[GLOBAL_LAYER]["rope_theta"],
                rope_local_base_freq=rope[LOCAL_LAYER]["rope_theta"],
            )
        return config

    AutoConfig.from_pretrained = load_adapted_config
    _keep_local_rope_unscaled()
    runpy.run_module(_BUILDER, run_name="__main__", alter_sys=True)


def _keep_local_rope_unscaled() -> None:
    """Scale the RoPE of Gemma 3's global layers only, for which its checkpoints state a scaling."""
    import onnxruntime_genai.models  # noqa: F401 - makes its modules importable by these names
    from builders.base import Model

    make_caches = Model.make_rotary_embedding_caches

    def make_adapted_caches(self: Any, **names: Any) -> Any:
        if names.get("cos_cache_name") == "cos_cache_local":
            self.rope_attrs["rescale_factors"] = 1
        return make_caches(self, **names)

    Model.make_rotary_embedding_caches = make_adapted_caches


if __name__ == "__main__":
    main()
