"""Export of a checkpoint to the graph layout that the decoder engine feeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from build_artifacts.checkpoints.architectures import load_config
from build_artifacts.checkpoints.checkpoint import CONFIG_NAME, read_object
from build_artifacts.checkpoints.decoders import iterate_token_ids
from build_artifacts.checkpoints.encoder_decoders import load_generation_settings
from build_artifacts.decoders.graphs.bart import (
    BART,
    BLENDERBOT,
    M2M_100,
    MARIAN,
    MBART,
    PEGASUS,
)
from build_artifacts.decoders.graphs.gpt2 import build_gpt2
from build_artifacts.decoders.graphs.kv_inputs import GraphFamily
from build_artifacts.decoders.graphs.t5 import build_t5
from build_artifacts.errors import UnsupportedModel

DECODER_NAME = "decoder.onnx"
ENCODER_NAME = "encoder.onnx"

# Graph family by `model_type` of config.json.
GRAPH_FAMILIES: Mapping[str, GraphFamily] = {
    "gpt2": build_gpt2,
    "bart": BART,
    "plbart": BART,
    "mbart": MBART,
    "blenderbot": BLENDERBOT,
    "marian": MARIAN,
    "pegasus": PEGASUS,
    "m2m_100": M2M_100,
    "t5": build_t5,
    "mt5": build_t5,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedModel:
    """Graph files of one model and the shapes that an engine needs.

    deployments/engines/onnx/decoder.py describes the inputs of `decoder`. With an `encoder`, the
    decoder has two further inputs:

        cross.{layer}.{key,value}  [B, kv_heads, C, head_dim]
        cross_mask                 [B, C], 1 for the tokens of a source, left-aligned

    C is the padded length of the sources. The encoder computes the cross tensors, with S instead of
    C tokens, from input_ids and attention_mask [B, S].
    """

    decoder: Path
    encoder: Path | None
    layers: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    eos_token_ids: tuple[int, ...]


def is_supported_family(checkpoint: Path) -> bool:
    return _model_type(checkpoint) in GRAPH_FAMILIES


def export_model(checkpoint: Path, into: Path) -> ExportedModel:
    """Write the fp32 graphs of the checkpoint to the directory `into`.

    `checkpoint` is a directory with config.json and safetensors. Raises UnsupportedModel if no
    builder supports the model type or its config, or if a tensor is missing.
    """
    model_type = _model_type(checkpoint)
    if model_type not in GRAPH_FAMILIES:
        raise UnsupportedModel(
            f"no graph builder supports the model type `{model_type or 'none'}`",
            hint=f"supported: {', '.join(GRAPH_FAMILIES)}",
        )
    config = load_config(checkpoint)
    graphs = GRAPH_FAMILIES[model_type](config, checkpoint)
    decoder, encoder = into / DECODER_NAME, None
    graphs.decoder.save(decoder)
    if graphs.encoder is not None:
        encoder = into / ENCODER_NAME
        graphs.encoder.save(encoder)
    generation = load_generation_settings(checkpoint, config)
    return ExportedModel(
        decoder=decoder,
        encoder=encoder,
        layers=graphs.layers,
        kv_heads=graphs.shape.heads,
        head_dim=graphs.shape.size,
        vocabulary=graphs.vocabulary,
        eos_token_ids=tuple(iterate_token_ids(generation.eos_token_id)),
    )


def _model_type(checkpoint: Path) -> str:
    return str(read_object(checkpoint / CONFIG_NAME).get("model_type", ""))
