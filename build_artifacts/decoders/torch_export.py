"""Export of decoders to torch: as a traced program, or as a checkpoint for transformers.

Both forms run with an external KV cache (deployments/engines/pytorch/kv_program.py). A program
takes the cache as inputs. For a checkpoint, the engine attaches the cache to the loaded model.
deployments/engines/pytorch/decoder.py describes inputs and outputs of the program.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from build_artifacts.checkpoints.architectures import has_mxfp4_weights
from build_artifacts.checkpoints.metadata import CheckpointMetadata
from build_artifacts.checkpoints.models import TorchModel, load_model
from build_artifacts.errors import UnsupportedModel
from build_artifacts.recipes import DecoderRecipe
from build_artifacts.steps.program import write_traced
from deployments.artifacts.types import DTYPE_NAMES, Attention, Dtype, ModelHead, Precision
from deployments.engines.pytorch.kv_program import KvCacheProgram
from deployments.engines.pytorch.transformers_experts import are_supported

# Precisions of the engine "transformers", and dtypes of the weights before any quantization.
_CHECKPOINT_DTYPES: Mapping[str, Dtype] = {**DTYPE_NAMES, "int8": "float16", "nf4": "float16"}
_MAX_FLASH_CHANNELS = 256  # of a head
_MAX_SHARD_SIZE = "1000TB"  # keeps all weights in one file


def export_checkpoint(
    weights: Path, metadata: CheckpointMetadata, recipe: DecoderRecipe, into: Path
) -> None:
    """Write the checkpoint in `weights`, converted to the recipe's precision, to `into`.

    Raises UnsupportedModel if the model cannot be loaded, or the engine cannot run it as the recipe
    demands.
    """
    check_recipe(metadata, recipe, _CHECKPOINT_DTYPES)
    quantization = _build_quantization_config(recipe.precision)
    if quantization is not None and recipe.run.tensor_parallel_size > 1:
        raise UnsupportedModel(
            f"`{recipe.name}`: tensor parallelism does not support bitsandbytes quantization",
            hint="omit `--tensor-parallel-size`",
        )
    if quantization is not None and metadata.required_generation_config.has_experts:
        raise UnsupportedModel(
            f"`{recipe.name}`: bitsandbytes does not quantize the experts of "
            f"`{metadata.architecture}`, which are most of its weights",
            hint="build `gpu-bf16-torch` with `--search quick`",
        )
    if recipe.precision == "int8" and metadata.required_generation_config.token_latent_values:
        raise UnsupportedModel(
            f"`{recipe.name}`: bitsandbytes in int8 does not support latent attention, which "
            f"`{metadata.architecture}` has",
            hint="build `gpu-bf16-torch` with `--search quick`",
        )
    model = load_model(
        weights,
        head=ModelHead.NEXT_TOKEN,
        dtype=_CHECKPOINT_DTYPES[recipe.precision],
        quantization=quantization,
        is_checked=True,
    )
    check_model(model, metadata, recipe.run.attention)
    _check_tensor_parallel(model, metadata, recipe.run.tensor_parallel_size)
    # The original format of weights in MXFP4 has names that a float checkpoint does not have.
    is_original = not has_mxfp4_weights(weights)
    model.save_pretrained(into, max_shard_size=_MAX_SHARD_SIZE, save_original_format=is_original)


def _check_tensor_parallel(
    model: TorchModel, metadata: CheckpointMetadata, tensor_parallel_size: int
) -> None:
    """Raise UnsupportedModel if the KV cache cannot be split evenly over the GPUs."""
    from transformers.distributed.tensor_parallel import get_kv_heads_per_rank

    config = metadata.required_generation_config
    if tensor_parallel_size > 1 and (
        config.state_values or config.token_kv_values or config.token_latent_values
    ):
        raise UnsupportedModel(
            f"tensor parallelism needs equal KV heads in all layers, unlike those of "
            f"`{metadata.architecture}`",
            hint="omit `--tensor-parallel-size`",
        )
    heads = config.kv_heads
    heads_per_gpu = get_kv_heads_per_rank(
        getattr(model, "_tp_plan", None) or {}, heads, tensor_parallel_size
    )
    if heads_per_gpu is None:
        raise UnsupportedModel(
            f"{heads} KV heads cannot be split over {tensor_parallel_size} GPUs",
            hint=f"`--tensor-parallel-size` must divide {heads}",
        )
    if heads_per_gpu * tensor_parallel_size != heads:
        raise UnsupportedModel(
            f"transformers has no tensor parallel plan for `{metadata.architecture}`",
            hint="omit `--tensor-parallel-size`",
        )


def _build_quantization_config(precision: Precision) -> Any:
    """Return the quantization config for transformers; None without quantization."""
    import torch
    from transformers import BitsAndBytesConfig

    if precision == "int8":
        # Threshold 0 disables outlier columns: their selection depends on all rows of a batch, so
        # outputs would not be batch invariant. The gate rejects models that need outlier columns.
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    if precision == "nf4":
        return BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16
        )
    return None


if TYPE_CHECKING:
    import torch

_MAX_SLOTS = 4_096
# Distinct sizes: the tracer treats equal sizes as one dimension.
_EXAMPLE_SLOTS, _EXAMPLE_TOKENS, _EXAMPLE_LOGITS, _EXAMPLE_CAPACITY = 2, 5, 3, 11


def export_program(
    weights: Path, metadata: CheckpointMetadata, recipe: DecoderRecipe, path: Path
) -> None:
    """Write the traced program of the checkpoint in `weights` to `path`.

    Raises UnsupportedModel if the model cannot be loaded or traced, or the engine cannot run it as
    the recipe demands.
    """
    check_recipe(metadata, recipe, DTYPE_NAMES)
    if (
        recipe.run.tensor_parallel_size > 1
        or recipe.run.kv_offload
        or recipe.run.attention == "flash"
    ):
        raise UnsupportedModel(
            f"`{recipe.name}`: torch programs support no `tensor_parallel_size`, "
            "no `kv_offload` and no `flash` attention",
            hint='set `engine="transformers"` in the recipe',
        )
    if metadata.required_generation_config.state_values:
        raise UnsupportedModel(
            f"`{recipe.name}`: torch programs have no loops, which recurrent layers such as those "
            f"of `{metadata.architecture}` need",
            hint='set `engine="transformers"` in the recipe',
        )
    dtype = DTYPE_NAMES[recipe.precision]
    model = load_model(weights, head=ModelHead.NEXT_TOKEN, dtype=dtype, is_checked=True)
    check_model(model, metadata, recipe.run.attention)
    write_traced(
        lambda: _trace(model, metadata, recipe.run.attention), metadata, path, in_place=True
    )


def check_recipe(
    metadata: CheckpointMetadata, recipe: DecoderRecipe, supported: Collection[str]
) -> None:
    """Raise UnsupportedModel if the recipe's engine does not support the recipe or the model.

    `supported` are the precisions of the engine.
    """
    if metadata.required_generation_config.encoder_decoder is not None:
        raise UnsupportedModel(
            f"`{recipe.name}`: the engine {recipe.engine} does not support models with an encoder",
            hint="use their ONNX graphs",
        )
    if not metadata.required_generation_config.layers:
        raise UnsupportedModel(
            f"`{recipe.name}`: the engine {recipe.engine} needs a layer with attention, which "
            f"`{metadata.architecture}` does not have",
            hint="use its ONNX graphs, which run on the CPU",
        )
    if not _has_exchangeable_attention(metadata.architecture):
        raise UnsupportedModel(
            f"`{recipe.name}`: transformers has no exchangeable attention for "
            f"`{metadata.architecture}`, so the engine {recipe.engine} cannot run it over KV slots",
            hint="use its ONNX graphs, which run on the CPU",
        )
    if recipe.precision == "fp16" and metadata.required_generation_config.has_experts:
        raise UnsupportedModel(
            f"`{recipe.name}`: torch has no fp16 kernel for the experts of "
            f"`{metadata.architecture}`",
            hint='set `precision="bf16"` in the recipe',
        )
    if recipe.precision not in supported or recipe.options or recipe.per_token_int8:
        raise UnsupportedModel(
            f"`{recipe.name}`: the engine {recipe.engine} does not support {recipe.precision}, "
            "options of the model builder, or `per_token_int8`",
            hint=f"supported precisions: {', '.join(supported)}",
        )


def _has_exchangeable_attention(architecture: str) -> bool:
    """Return whether the model looks its attention function up by name.

    Other models compute their attention themselves, and ignore the engine's function and mask.
    """
    import transformers

    module = getattr(transformers, architecture).__module__
    return hasattr(sys.modules[module], "ALL_ATTENTION_FUNCTIONS")


def check_model(model: TorchModel, metadata: CheckpointMetadata, attention: Attention) -> None:
    """Raise UnsupportedModel for RoPE, experts, heads or sinks that torch engines do not support.

    `attention` is the implementation that the engine uses.
    """
    rope = getattr(model.config, "rope_parameters", None) or {}
    kinds = [rope, *(own for own in rope.values() if isinstance(own, dict))]  # by layer type
    # With `alpha`, HunYuan's dynamic type has one table for all lengths. Phi-3.5-MoE selects one of
    # two factors by the longest text of a batch, outside the GPU.
    if any(
        "short_mscale" in each or (each.get("rope_type") == "dynamic" and not each.get("alpha"))
        for each in kinds
    ):
        raise UnsupportedModel(
            f"RoPE of `{metadata.architecture}` depends on the text length; batches mix lengths",
            hint="use its ONNX graphs",
        )
    experts = (module for module in model.modules() if hasattr(module, "has_post_expert_norm"))
    if not all(map(are_supported, experts)):
        raise UnsupportedModel(
            f"torch engines do not compute experts of the form of `{metadata.architecture}`",
            hint="use its ONNX graphs, which run on the CPU",
        )
    if attention != "flash":
        return
    config = metadata.required_generation_config
    if config.token_latent_values or config.head_dim > _MAX_FLASH_CHANNELS:
        raise UnsupportedModel(
            f"`flash_attn` needs keys and values of one size, up to {_MAX_FLASH_CHANNELS} "
            f"channels, unlike those of `{metadata.architecture}`",
            hint="use `--attention sdpa`",
        )
    names = (name for name, _ in model.named_parameters())
    if any(name.endswith(".sinks") for name in names):
        raise UnsupportedModel(
            f"`flash_attn` does not support the attention sinks of `{metadata.architecture}`",
            hint="use `--attention sdpa`",
        )


def _trace(
    model: TorchModel, metadata: CheckpointMetadata, attention: Attention
) -> torch.export.ExportedProgram:
    import torch

    program = KvCacheProgram(model, attention)
    caches = [
        torch.zeros((_EXAMPLE_SLOTS, heads, _EXAMPLE_CAPACITY, size), dtype=model.dtype)
        for heads, size in program.layout.kv_shapes
    ]
    example = {
        "input_ids": torch.ones(_EXAMPLE_SLOTS, _EXAMPLE_TOKENS, dtype=torch.int64),
        "lengths": torch.zeros(_EXAMPLE_SLOTS, dtype=torch.int64),
        "wanted": torch.arange(_EXAMPLE_LOGITS),
        "memory": caches,
    }
    rows = torch.export.Dim("rows", min=1, max=_MAX_SLOTS)
    tokens, logits, capacity = (
        torch.export.Dim(name, min=1, max=metadata.max_tokens)
        for name in ("tokens", "logits", "capacity")
    )
    shapes = {
        "input_ids": {0: rows, 1: tokens},
        "lengths": {0: rows},
        "wanted": {0: logits},
        "memory": [{0: rows, 2: capacity} for _ in caches],
    }

    class Traced(torch.nn.Module):  # type: ignore[misc]  # torch is not typed
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(
            self,
            input_ids: torch.Tensor,
            lengths: torch.Tensor,
            wanted: torch.Tensor,
            memory: Sequence[torch.Tensor],
        ) -> torch.Tensor:
            # Stored programs name their inputs after these parameters, so do not rename them.
            return program(input_ids, lengths, wanted, memory)

    return torch.export.export(
        Traced(),
        (),
        example,
        dynamic_shapes=shapes,
        # By default, torch.export adds guards on strides, which reject some sizes that would work.
        prefer_deferred_runtime_asserts_over_guards=True,
    )
