"""GPU candidates of decoders: chosen attention, several GPUs, a KV cache in RAM, no programs."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

from build_artifacts.errors import BuildError
from build_artifacts.presets import DECODER_FP16_TRANSFORMERS
from build_artifacts.recipes import BuildRecipe, DecoderRecipe
from deployments.artifacts.manifest import EngineOptions
from deployments.artifacts.types import DTYPE_NAMES, Attention, Device, Precision


def check_encoder_recipe(recipe: BuildRecipe) -> None:
    """Raise BuildError if `recipe` has GPU options of generative models."""
    runs = [each.run for each in recipe.decoders if each.device is Device.GPU]
    options = {
        "--tensor-parallel-size": any(run.tensor_parallel_size > 1 for run in runs),
        "--offload-kv-cache": any(run.kv_offload for run in runs),
        "--attention": any(run.attention != "sdpa" for run in runs),
    }
    for option, is_used in options.items():
        if is_used:
            raise BuildError(
                f"`{option}` is only supported for models that generate text",
                hint=f"omit `{option}`",
            )


def with_gpu_attention(recipe: BuildRecipe, attention: Attention) -> BuildRecipe:
    """Set the attention of the GPU decoder candidates that run on torch or transformers.

    ONNX Runtime graphs keep their attention operator. Raises BuildError if this environment cannot
    run the attention, or if the recipe has no GPU candidate on torch or transformers.
    """
    if attention == "sdpa":
        return recipe
    if attention == "flash" and find_spec("flash_attn") is None:
        raise BuildError(
            "`--attention flash` needs the package `flash_attn`, which is not installed",
            hint="install `flash-attn` on a host with a GPU, or use `--attention sdpa`",
        )
    decoders = tuple(
        dict.fromkeys(
            _with_attention(each, attention) if _has_attention(each) else each
            for each in recipe.decoders
        )
    )
    if decoders == recipe.decoders:
        raise BuildError(
            f"`--attention {attention}` changes nothing: no GPU candidate of this search runs on "
            "torch",
            hint="use `--search full`",
        )
    if recipe.keep == 1:  # such a search keeps the first candidate, others the fastest ones
        decoders = tuple(sorted(decoders, key=lambda each: each.run.attention != attention))
    return replace(recipe, decoders=decoders)


def _has_attention(recipe: DecoderRecipe) -> bool:
    return recipe.device is Device.GPU and recipe.engine in ("torch", "transformers")


def _with_attention(recipe: DecoderRecipe, attention: Attention) -> DecoderRecipe:
    # A torch program contains only operators of torch, and flash attention is in another package,
    # so the checkpoint runs on the engine `transformers`.
    if attention == "flash":
        recipe = without_program(recipe)
    run = recipe.run.model_copy(update={"attention": attention})
    return replace(recipe, name=f"{recipe.name}-{attention}", run=run)


def without_program(recipe: DecoderRecipe) -> DecoderRecipe:
    """Let the engine `transformers` run the checkpoint if `recipe` traces it into a program."""
    if recipe.engine != "torch":
        return recipe
    name = recipe.name.replace("-torch", "-transformers").replace("-compiled", "-transformers")
    run = recipe.run.model_copy(update={"compile": False})
    return replace(recipe, name=name, engine="transformers", run=run)


def with_gpu_placement(
    recipe: BuildRecipe, *, tensor_parallel_size: int, kv_offload: bool
) -> BuildRecipe:
    """Replace the GPU decoder candidates by those for several GPUs or with KV offload.

    Only the engine `transformers` supports these options. Raises BuildError for a recipe that
    quantizes weights for GPUs, because the new candidates have fp16 or bf16 weights.
    """
    if tensor_parallel_size == 1 and not kv_offload:
        return recipe
    if any(r.device is Device.GPU and r.precision not in DTYPE_NAMES for r in recipe.decoders):
        raise BuildError(
            "`--search low-memory` quantizes weights for one GPU only; it excludes "
            "`--tensor-parallel-size` above 1 and `--offload-kv-cache`, which are built in fp16 "
            "or bf16",
            hint="omit `--search low-memory`, or both other options",
        )
    suffix = f"-x{tensor_parallel_size}" if tensor_parallel_size > 1 else ""
    if kv_offload:
        suffix += "-offloaded"
    run = EngineOptions(tensor_parallel_size=tensor_parallel_size, kv_offload=kv_offload)
    precisions: tuple[Precision, ...] = ("fp16", "bf16")
    placed = (
        replace(
            DECODER_FP16_TRANSFORMERS,
            name=f"gpu-{precision}{suffix}",
            precision=precision,
            run=run,
        )
        for precision in precisions
    )
    others = (r for r in recipe.decoders if r.device is not Device.GPU)
    return replace(recipe, decoders=(*others, *placed))
