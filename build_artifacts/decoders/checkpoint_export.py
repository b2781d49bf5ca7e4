"""A checkpoint that is sealed as transformers reads it, its weights rounded where that is asked.

For models that one GPU has no room for, and for bitsandbytes' roundings: LLM.int8 (Dettmers et al.
2022, https://arxiv.org/abs/2208.07339) and NF4 (Dettmers et al. 2023,
https://arxiv.org/abs/2305.14314). It is run by deployments/engines/rows_model.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from build_artifacts.checkpoints.facts import ModelFacts
from build_artifacts.checkpoints.models import TorchModel, load_model
from build_artifacts.decoders.torch_export import check_model, check_recipe
from build_artifacts.errors import UnsupportedModel
from build_artifacts.recipe import DecoderRecipe, Dtype
from deployments.manifest import Head, Precision

_DTYPES: Mapping[Precision, Dtype] = {
    **{"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"},
    **dict.fromkeys(("int8", "nf4"), "float16"),
}
_ALL_IN_ONE = "1000TB"  # a file of more is two


def export_checkpoint(weights: Path, facts: ModelFacts, recipe: DecoderRecipe, into: Path) -> None:
    """Write the checkpoint in `weights` to the directory `into`. Raises UnsupportedModel."""
    check_recipe(facts, recipe, _DTYPES)
    if recipe.run.gpus > 1 and _quantisation(recipe.precision) is not None:
        raise UnsupportedModel(
            f"weights that bitsandbytes has rounded cannot be spread over GPUs ({recipe.name})",
            hint="leave out `--gpus`",
        )
    model = load_model(
        weights,
        head=Head.NEXT_TOKEN,
        dtype=_DTYPES[recipe.precision],
        quantisation=_quantisation(recipe.precision),
    )
    check_model(model, facts, recipe.run.attention)
    _check_plan(model, facts, recipe.run.gpus)
    model.save_pretrained(into, max_shard_size=_ALL_IN_ONE)


def _check_plan(model: TorchModel, facts: ModelFacts, gpus: int) -> None:
    """Each GPU must get its share of the heads, or it would have no room for what it computes."""
    from transformers.distributed.tensor_parallel import get_kv_heads_per_rank

    heads = facts.generating.kv_heads
    found = get_kv_heads_per_rank(getattr(model, "_tp_plan", None) or {}, heads, gpus)
    if found is None:
        raise UnsupportedModel(
            f"{heads} heads of keys and values cannot be shared by {gpus} GPUs",
            hint=f"`--gpus` must divide {heads}",
        )
    if found * gpus != heads:
        raise UnsupportedModel(
            f"transformers has no plan of how to share the heads of `{facts.architecture}`",
            hint="leave out `--gpus`",
        )


def _quantisation(precision: Precision) -> Any:
    """What transformers is told to round weights by; None: they are not."""
    import torch
    from transformers import BitsAndBytesConfig

    if precision == "int8":
        # Without outliers apart: which columns those are depends on all rows of a step, and so
        # would an answer on its company. Where they matter the gate is missed.
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    if precision == "nf4":
        return BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16
        )
    return None
