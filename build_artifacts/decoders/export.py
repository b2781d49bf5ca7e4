"""Export of a checkpoint to the graphs of a decoder and, if the model has one, an encoder.

`graphs/` exports model families that onnxruntime-genai's model builder does not support. Each graph
has its weights in one file next to it. A torch program (`torch_export.py`) contains its weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from build_artifacts.checkpoints.metadata import CheckpointMetadata
from build_artifacts.decoders.block_weights import Bits
from build_artifacts.decoders.builder import run_builder
from build_artifacts.decoders.graphs.block_quantize import quantize_blocks
from build_artifacts.decoders.graphs.export import export_model, find_graph_family
from build_artifacts.decoders.logits_slicing import GRAPH_NAME, WEIGHTS_NAME, slice_logits
from build_artifacts.decoders.rope_check import check_head_size, check_rope
from build_artifacts.decoders.torch_export import export_checkpoint, export_program
from build_artifacts.decoders.window_check import check_windows
from build_artifacts.errors import UnsupportedModel
from build_artifacts.graph_files import list_files
from build_artifacts.recipes import DecoderRecipe
from deployments.artifacts.types import Device

# File name of a torch program with its weights, or of the weights of an exported checkpoint.
PROGRAM_NAME = "model.safetensors"
# Bits per weight of graphs from `graphs/`, by precision; None keeps float weights.
_WEIGHT_BITS: Mapping[str, Bits | None] = {"fp32": None, "int8": 8, "int4": 4}
_DecoderSizes = tuple[int, int, int, int]  # layers, KV heads, head size, vocabulary size
_BUILDER_OPTIONS = (
    # Sliding-window layers get full-length KV caches too, so that the caches of all layers have one
    # shape.
    "windowed_kv_cache=false",
    # For GPUs, the builder moves norms of queries and keys into the attention. The CPU provider has
    # no such attention, but hosts without a GPU check GPU graphs with this provider.
    "fuse_qk_norm_gqa=false",
)


def export_decoder(
    weights: Path, metadata: CheckpointMetadata, recipe: DecoderRecipe, into: Path
) -> None:
    """Export the checkpoint `weights` to `into`, as files for the engine of the recipe.

    Raises UnsupportedModel if the exporter does not support the model or the recipe.
    """
    if recipe.engine == "torch":
        export_program(weights, metadata, recipe, into / PROGRAM_NAME)
        return
    if recipe.engine == "transformers":
        export_checkpoint(weights, metadata, recipe, into)
        return
    if find_graph_family(weights) is not None:
        _export_with_graph_builder(weights, metadata, recipe, into)
        return
    with TemporaryDirectory(dir=into) as temporary:
        built = Path(temporary, "made")
        _run_model_builder(weights, recipe, built)
        _check_shape(metadata, _read_shape(built))
        check_head_size(built / GRAPH_NAME, metadata.required_generation_config.head_dim)
        for name in (GRAPH_NAME, WEIGHTS_NAME):
            (built / name).rename(into / name)
    check_rope(into / GRAPH_NAME, weights, metadata)
    check_windows(into / GRAPH_NAME, weights, metadata.architecture)
    slice_logits(into / GRAPH_NAME, metadata.architecture)


def _export_with_graph_builder(
    weights: Path, metadata: CheckpointMetadata, recipe: DecoderRecipe, into: Path
) -> None:
    if recipe.device is Device.GPU:
        raise UnsupportedModel(
            f"`{recipe.name}`: graphs of this model family compute in fp32; ONNX Runtime's "
            "attention on a GPU computes in fp16 only",
            hint="on a GPU, decoders run as torch programs; encoder-decoder models run on the CPU "
            "only",
        )
    if recipe.precision not in _WEIGHT_BITS:
        raise UnsupportedModel(
            f"`{recipe.name}`: this model family has no {recipe.precision} graph",
            hint=f"supported precisions: {', '.join(_WEIGHT_BITS)}",
        )
    if recipe.options:
        raise UnsupportedModel(
            f"`{recipe.name}`: this model family does not support {' '.join(recipe.options)}",
            hint="remove the options of onnxruntime-genai's model builder from the recipe",
        )
    with TemporaryDirectory(dir=into) as temporary:
        written = export_model(weights, Path(temporary))
        _check_shape(
            metadata, (written.layers, written.kv_heads, written.head_dim, written.vocabulary)
        )
        kv_values = written.kv_values, metadata.required_generation_config.token_kv_values
        assert kv_values[1] in (None, kv_values[0]), "bug: the graph has another KV cache"
        assert written.state_values == metadata.required_generation_config.state_values, (
            "bug: the graph has other recurrent states than checkpoints/recurrent_states.py counts"
        )
        _store_graph(written.decoder, into, _WEIGHT_BITS[recipe.precision])
        if written.encoder is not None:
            _store_graph(written.encoder, into, _WEIGHT_BITS[recipe.precision])


def _store_graph(graph: Path, directory: Path, bits: Bits | None) -> None:
    """Move `graph` and its weights to `directory`, or write a quantized copy there."""
    if bits is not None:
        quantize_blocks(graph, directory / graph.name, bits)
        return
    for path in list_files(graph):
        path.rename(directory / path.name)


def _run_model_builder(weights: Path, recipe: DecoderRecipe, into: Path) -> None:
    options = (*_BUILDER_OPTIONS, *recipe.options)
    ran = run_builder(
        weights, into, precision=recipe.precision, device=recipe.device, options=options
    )
    print(ran.log, flush=True)  # The build redirects stdout to its log.
    if ran.failure is not None:
        raise UnsupportedModel(
            f"`{recipe.name}`: onnxruntime-genai's model builder failed: {ran.failure}",
            hint="the build log has the details; use a supported architecture",
        )


def _read_shape(built: Path) -> _DecoderSizes:
    model = json.loads((built / "genai_config.json").read_bytes())["model"]
    decoder = model["decoder"]
    return (
        decoder["num_hidden_layers"],
        decoder["num_key_value_heads"],
        decoder["head_size"],
        model["vocab_size"],
    )


def _check_shape(metadata: CheckpointMetadata, built: _DecoderSizes) -> None:
    """Raise UnsupportedModel if the sizes of the graph differ from those in `metadata`."""
    generation_config = metadata.required_generation_config
    expected = (
        generation_config.layers,
        generation_config.kv_heads,
        generation_config.head_dim,
        metadata.output_width,
    )
    if built != expected:
        raise UnsupportedModel(
            f"layers, KV heads, head size and vocabulary size of `{metadata.architecture}` are "
            f"{built} in the graph, but {expected} in config.json",
            hint="use a model whose layers all have the same shape",
        )
