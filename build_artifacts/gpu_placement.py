"""GPU candidates of decoders for several GPUs or with the KV cache in host memory."""

from __future__ import annotations

from dataclasses import replace

from build_artifacts.errors import BuildError
from build_artifacts.recipes import DECODER_FP16_TRANSFORMERS, BuildRecipe
from deployments.artifacts.manifest import EngineOptions
from deployments.artifacts.types import Device


def with_gpu_placement(
    recipe: BuildRecipe, *, tensor_parallel_size: int, kv_offload: bool
) -> BuildRecipe:
    """Replace the GPU candidates of decoders by one for several GPUs or with KV offload.

    Only transformers supports either. Raises BuildError for a recipe that quantizes weights for
    GPUs, because that candidate would not.
    """
    if tensor_parallel_size == 1 and not kv_offload:
        return recipe
    if any(r.device is Device.GPU and r.precision != "fp16" for r in recipe.decoders):
        raise BuildError(
            "`--search low-memory` quantizes weights for one GPU only; it excludes "
            "`--tensor-parallel-size` above 1 and `--offload-kv-cache`, which are built in fp16",
            hint="omit `--search low-memory`, or both other options",
        )
    name = "gpu-fp16"
    if tensor_parallel_size > 1:
        name += f"-x{tensor_parallel_size}"
    if kv_offload:
        name += "-offloaded"
    gpu_candidate = replace(
        DECODER_FP16_TRANSFORMERS,
        name=name,
        run=EngineOptions(tensor_parallel_size=tensor_parallel_size, kv_offload=kv_offload),
    )
    others = (r for r in recipe.decoders if r.device is not Device.GPU)
    return replace(recipe, decoders=(*others, gpu_candidate))
