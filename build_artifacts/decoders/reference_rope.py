"""RoPE tables of a checkpoint, computed by transformers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from build_artifacts.checkpoints.architectures import TransformersConfig, config_errors
from build_artifacts.checkpoints.checkpoint import CONFIG_NAME
from build_artifacts.types import FloatArray

_FUNCTION = "create_sinusoidal_positions"
_MODULES = ("rotary_emb", "pos_emb")  # names of the RoPE module; the second is LFM2-MoE's
# Cosines and sines per position and channel pair, [P, D/2] each.
RopeTables = tuple[FloatArray, FloatArray]


class ReferenceRope:
    """RoPE of a checkpoint, computed by a module of transformers without weights or a function."""

    def __init__(self, weights: Path) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(weights, trust_remote_code=False)
        # The configs of some architectures lack fields that their models need.
        # Only the type of the module is needed, so the weights have no values.
        with config_errors(CONFIG_NAME), torch.device("meta"):
            base = AutoModelForCausalLM.from_config(config, trust_remote_code=False).base_model
        self._config: TransformersConfig = base.config
        # A model without positions has no such module.
        modules = (getattr(base, name, None) for name in _MODULES)
        module: Any = next((each for each in modules if each is not None), None)
        self._module: Any = None if module is None else type(module)(config=base.config)
        # Granite SWA has a module for each base of the angles.
        self._by_base: Mapping[str, Any] = {
            _describe_base(each.config.rope_parameters["rope_theta"]): type(each)(each.config)
            for each in getattr(base, "rotary_embs", ())
        }
        # GPT-J and CodeGen have a function instead, for sines followed by cosines, [P, D].
        self._compute: Any = None
        if module is None:
            self._compute = getattr(sys.modules[type(base).__module__], _FUNCTION, None)
        self._by_kind = module is not None and "layer_type" in signature(module.forward).parameters

    def kind(self, layer: int) -> str | None:
        """Return what selects the RoPE of a layer; None when all layers share it.

        This is the layer type or, with bases by layer, the base, "0.0" without RoPE.
        """
        if self._by_base:
            return _describe_base(self._config.layer_rope_theta[layer])
        return str(self._config.layer_types[layer]) if self._by_kind else None

    def rope_type(self, kind: str | None) -> str:
        """Return the `rope_type` in the config for a kind; "default" if it states none."""
        said: Mapping[str, Any] = getattr(self._config, "rope_parameters", None) or {}
        own = said if kind is None or self._by_base else said.get(kind) or {}
        return str(own.get("rope_type", "default"))

    def compute_tables(self, kind: str | None, positions: NDArray[np.int64]) -> RopeTables:
        """Return cosines and sines at `positions` [P], each [P, half of the rotated width]."""
        import torch

        if self._compute is not None:
            table = self._compute(int(positions.max()) + 1, self._config.rotary_dim).numpy()
            sines, cosines = np.split(table[positions], 2, axis=1)
            return cosines, sines
        how = {"layer_type": kind} if self._by_kind else {}
        module = self._by_base[str(kind)] if self._by_base else self._module
        with torch.inference_mode():
            tables = module(torch.zeros(1), torch.from_numpy(positions)[None], **how)
        if isinstance(tables, torch.Tensor):  # DeepSeek-V2 has complex numbers
            return tables[0].real.numpy(), tables[0].imag.numpy()
        cosines, sines = (_drop_repeats(table[0].numpy()) for table in tables)
        return cosines, sines


def _describe_base(base: float) -> str:
    return str(float(base))


def _drop_repeats(table: FloatArray) -> FloatArray:
    """Return one value per pair of channels.

    Most models repeat the values for the second half of a head, or for the next channel:
    [P, D] -> [P, D/2].
    """
    half = table.shape[-1] // 2
    for once, again in ((table[:, :half], table[:, half:]), (table[:, ::2], table[:, 1::2])):
        if np.array_equal(once, again):
            return once
    return table
