"""onnxruntime-genai's model builder (0.18) as a program, with configs as it reads them.

transformers 5 keeps the rotations of models such as Gemma 3 by kind of layer. The builder expects
those of layers that see all, and the base frequency of the others apart, as configs had them
before, and fails otherwise. What LayerNorm adds to variances it looks for under the name that
RMSNorm has for it, and takes its own number where there is none.
"""

from __future__ import annotations

import runpy
from typing import Any

_BUILDER = "onnxruntime_genai.models.builder"
_EPSILON, _OTHER_EPSILONS = "rms_norm_eps", ("layer_norm_eps", "norm_eps")
_WHOLE, _LOCAL = "full_attention", "sliding_attention"


def main() -> None:
    """Run the builder with this process's arguments."""
    from transformers import AutoConfig

    read = AutoConfig.from_pretrained

    def read_for_builder(*given: Any, **named: Any) -> Any:
        config = read(*given, **named)
        for name in _OTHER_EPSILONS:
            if hasattr(config, name) and not hasattr(config, _EPSILON):
                vars(config)[_EPSILON] = getattr(config, name)
        rotations = getattr(config, "rope_parameters", None) or {}
        if _WHOLE in rotations and _LOCAL in rotations:
            # Past the config's own checks, which would put it back.
            vars(config).update(
                rope_parameters=dict(rotations[_WHOLE]),
                rope_theta=rotations[_WHOLE]["rope_theta"],
                rope_local_base_freq=rotations[_LOCAL]["rope_theta"],
            )
        return config

    AutoConfig.from_pretrained = read_for_builder
    runpy.run_module(_BUILDER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
