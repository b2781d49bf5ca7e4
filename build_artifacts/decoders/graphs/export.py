"""Export of a checkpoint to the graph layout that the decoder engine feeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from build_artifacts.checkpoints.architectures import load_config
from build_artifacts.checkpoints.checkpoint import CONFIG_NAME, Json, read_object
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
from build_artifacts.decoders.graphs.expert_variants import (
    AFMOE,
    DOTS,
    ERNIE_MOE,
    EXAONE_MOE,
    FLEX_OLMO,
    GLM4_MOE,
    GPT_OSS,
    GRANITE_MOE,
    GRANITE_MOE_SWA,
    HUNYUAN_MOE,
    HY_V3,
    MINIMAX_M2,
    MIXTRAL,
    OLMOE,
    PHI_MOE,
    QWEN2_MOE,
    QWEN3_MOE,
    SOLAR_OPEN,
)
from build_artifacts.decoders.graphs.gemma3n import build_gemma3n
from build_artifacts.decoders.graphs.gemma4 import build_gemma4
from build_artifacts.decoders.graphs.gpt_variants import (
    BIOGPT,
    BLOOM,
    CODEGEN,
    GPT2,
    GPT_BIGCODE,
    GPT_NEO,
    GPT_NEOX,
    GPTJ,
    MPT,
    PERSIMMON,
    XGLM,
    build_falcon,
    build_opt,
)
from build_artifacts.decoders.graphs.kv_inputs import GraphFamily
from build_artifacts.decoders.graphs.latent_variants import (
    DEEPSEEK_V2,
    MINICPM3,
    build_deepseek_v3,
    build_youtu,
)
from build_artifacts.decoders.graphs.llama_variants import (
    APERTUS,
    ARCEE,
    COHERE,
    COHERE2,
    EXAONE4,
    GLM,
    GLM4,
    GRANITE_SWA,
    HELIUM,
    HUNYUAN,
    JAIS2,
    LLAMA,
    MINISTRAL3,
    OLMO,
    OLMO2,
    QWEN3,
    SMOLLM3,
    STABLELM,
    STARCODER2,
    VAULTGEMMA,
    build_hyperclovax,
    build_nanochat,
)
from build_artifacts.decoders.graphs.recurrent_variants import (
    BAMBA,
    FALCON_H1,
    LFM2,
    LFM2_MOE,
    OLMO_HYBRID,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_NEXT,
    build_granite_hybrid,
    build_lfm3,
)
from build_artifacts.decoders.graphs.single_module_layers import build_mamba2, build_nemotron_h
from build_artifacts.decoders.graphs.t5 import build_t5
from build_artifacts.decoders.logits_slicing import GRAPH_NAME
from build_artifacts.errors import UnsupportedModel
from deployments.engines.decoder import PAST_STATES

ENCODER_NAME = "encoder.onnx"

# Graph families by `model_type` of config.json.
DECODERS: Mapping[str, GraphFamily] = {
    "gpt2": GPT2,
    "gpt_neox": GPT_NEOX,
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": build_deepseek_v3,
    "glm4_moe_lite": build_deepseek_v3,
    "minicpm3": MINICPM3,
    "youtu": build_youtu,
    "gemma3n_text": build_gemma3n,
    "gemma4_text": build_gemma4,
    "gemma4_unified_text": build_gemma4,
    "opt": build_opt,
    "gpt_neo": GPT_NEO,
    "gptj": GPTJ,
    "bloom": BLOOM,
    "falcon": build_falcon,
    "gpt_bigcode": GPT_BIGCODE,
    "mpt": MPT,
    "codegen": CODEGEN,
    "xglm": XGLM,
    "biogpt": BIOGPT,
    "smollm3": SMOLLM3,
    "seed_oss": LLAMA,
    "ministral": LLAMA,
    "ministral3": MINISTRAL3,
    "olmo": OLMO,
    "apertus": APERTUS,
    "vaultgemma": VAULTGEMMA,
    "cwm": LLAMA,
    "nanochat": build_nanochat,
    "jais2": JAIS2,
    "persimmon": PERSIMMON,
    "hyperclovax": build_hyperclovax,
    "granite_swa": GRANITE_SWA,
    "granitemoe_swa": GRANITE_MOE_SWA,
    "phimoe": PHI_MOE,
    "exaone_moe": EXAONE_MOE,
    "solar_open": SOLAR_OPEN,
    "minimax_m2": MINIMAX_M2,
    "afmoe": AFMOE,
    "olmo2": OLMO2,
    "olmo3": OLMO2,
    "exaone4": EXAONE4,
    "cohere": COHERE,
    "cohere2": COHERE2,
    "stablelm": STABLELM,
    "starcoder2": STARCODER2,
    "glm": GLM,
    "glm4": GLM4,
    "hunyuan_v1_dense": HUNYUAN,
    "arcee": ARCEE,
    "helium": HELIUM,
    "mixtral": MIXTRAL,
    "qwen2_moe": QWEN2_MOE,
    "qwen3_moe": QWEN3_MOE,
    "olmoe": OLMOE,
    "flex_olmo": FLEX_OLMO,
    "granitemoe": GRANITE_MOE,
    "granitemoeshared": GRANITE_MOE,
    "granitemoehybrid": build_granite_hybrid,
    "ernie4_5_moe": ERNIE_MOE,
    "glm4_moe": GLM4_MOE,
    "dots1": DOTS,
    "hunyuan_v1_moe": HUNYUAN_MOE,
    "hy_v3": HY_V3,
    "mellum": QWEN3_MOE,
    "gpt_oss": GPT_OSS,
    "falcon_h1": FALCON_H1,
    "bamba": BAMBA,
    "nemotron_h": build_nemotron_h,
    "mamba2": build_mamba2,
    "lfm2": LFM2,
    "lfm2_moe": LFM2_MOE,
    "lfm3": build_lfm3,
    "olmo_hybrid": OLMO_HYBRID,
    "qwen3_5_text": QWEN3_5,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5_moe_text": QWEN3_5_MOE,
}
ENCODER_DECODERS: Mapping[str, GraphFamily] = {
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
_FAMILIES: Mapping[str, GraphFamily] = {**DECODERS, **ENCODER_DECODERS}
# Families for which onnxruntime-genai's model builder computes other tables than transformers, or
# none, if RoPE has one of SCALED_ROPE.
SCALED_DECODERS: Mapping[str, GraphFamily] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": QWEN3,
}
SCALED_ROPE = ("linear", "dynamic", "yarn")


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
    kv_heads: int  # 1 without attention, as `head_dim`
    head_dim: int
    vocabulary: int
    kv_values: int  # keys and values of one token in all layers
    state_values: int  # of the recurrent states of one sequence
    eos_token_ids: tuple[int, ...]


def find_graph_family(checkpoint: Path) -> GraphFamily | None:
    """Return the builder of the graphs. Other models are left to onnxruntime-genai's: None."""
    config = read_object(checkpoint / CONFIG_NAME)
    family = _FAMILIES.get(str(config.get("model_type")))
    if family is None and _read_rope_type(config) in SCALED_ROPE:
        return SCALED_DECODERS.get(str(config.get("model_type")))
    return family


def _read_rope_type(config: Mapping[str, Json]) -> Json:
    """Return the type of RoPE. As in transformers, the older field `rope_scaling` decides."""
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    return rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None


def check_graph(checkpoint: Path) -> None:
    """Build the graph of a checkpoint without its weights, to find unsupported configs early.

    Raises as `export_model` does, but leaves models of no graph family alone.
    """
    family = find_graph_family(checkpoint)
    if family is not None:
        family(load_config(checkpoint), checkpoint)


def export_model(checkpoint: Path, into: Path) -> ExportedModel:
    """Write the fp32 graphs of the checkpoint to the directory `into`.

    `checkpoint` is a directory with config.json and safetensors. Raises UnsupportedModel if no
    builder supports the model type or its config, or if a tensor is missing.
    """
    family = find_graph_family(checkpoint)
    if family is None:
        model_type = read_object(checkpoint / CONFIG_NAME).get("model_type")
        raise UnsupportedModel(
            f"no graph builder supports the model type `{model_type or 'none'}`",
            hint=f"supported: {', '.join(_FAMILIES)}",
        )
    config = load_config(checkpoint)
    graphs = family(config, checkpoint)
    decoder, encoder = into / GRAPH_NAME, None
    graphs.decoder.save(decoder)
    if graphs.encoder is not None:
        encoder = into / ENCODER_NAME
        graphs.encoder.save(encoder)
    generation = load_generation_settings(checkpoint, config)
    return ExportedModel(
        decoder=decoder,
        encoder=encoder,
        layers=graphs.layers,
        kv_heads=1 if graphs.shape is None else graphs.shape.kv_heads,
        head_dim=1 if graphs.shape is None else graphs.shape.size,
        vocabulary=graphs.vocabulary,
        kv_values=graphs.decoder.count_input_values("past_key_values."),
        state_values=graphs.decoder.count_input_values(PAST_STATES),
        eos_token_ids=tuple(iterate_token_ids(generation.eos_token_id)),
    )
