"""Entry point that runs onnxruntime-genai's model builder (0.18) with adapted configs.

transformers 5 stores RoPE parameters per layer type for models such as Gemma 3. The builder fails
unless the parameters of global layers and the base frequency of local layers are at the top level.
The builder reads the epsilon of LayerNorm only under RMSNorm's name, `rms_norm_eps`. Without that
name, the builder uses its own default.
"""

from __future__ import annotations

import runpy
from typing import Any

from deployments.background_process import end_with_standard_input

_BUILDER = "onnxruntime_genai.models.builder"
_EPSILON, _OTHER_EPSILONS = "rms_norm_eps", ("layer_norm_eps", "norm_eps")
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"


def main() -> None:
    from transformers import AutoConfig

    end_with_standard_input()

    load_config = AutoConfig.from_pretrained

    def load_adapted_config(*args: Any, **kwargs: Any) -> Any:
        config = load_config(*args, **kwargs)
        for name in _OTHER_EPSILONS:
            if hasattr(config, name) and not hasattr(config, _EPSILON):
                vars(config)[_EPSILON] = getattr(config, name)
        rope = getattr(config, "rope_parameters", None) or {}
        if _GLOBAL in rope and _LOCAL in rope:
            # Bypass attribute assignment, which would restore the nested parameters.
            vars(config).update(
                rope_parameters=dict(rope[_GLOBAL]),
                rope_theta=rope[_GLOBAL]["rope_theta"],
                rope_local_base_freq=rope[_LOCAL]["rope_theta"],
            )
        return config

    AutoConfig.from_pretrained = load_adapted_config
    runpy.run_module(_BUILDER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
