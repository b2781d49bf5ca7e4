"""Graph builder for decoders whose layers are one module each: Nemotron-H and Mamba 2.

The module of a layer is Mamba 2, attention, an MLP or a mixture of experts.

Modules have the names of Llama's in transformers; the checkpoint's names are translated.
"""

from __future__ import annotations

from pathlib import Path

from build_artifacts.checkpoints.architectures import (
    TransformersConfig,
    read_head_size,
    read_kv_heads,
)
from build_artifacts.decoders.graphs.config_flags import read_activation
from build_artifacts.decoders.graphs.expert_variants import SIGMOIDS_SQUARED
from build_artifacts.decoders.graphs.experts import ExpertLayer
from build_artifacts.decoders.graphs.graph import GraphWriter
from build_artifacts.decoders.graphs.kv_inputs import HeadShape, ModelGraphs, SelfAttentionInputs
from build_artifacts.decoders.graphs.operators import Value
from build_artifacts.decoders.graphs.recurrent_layers import RecurrentLayer, apply_mamba2
from build_artifacts.decoders.graphs.weights import CheckpointWeights
from build_artifacts.errors import UnsupportedModel
from deployments.engines.layer_types import (
    EXPERTS_LAYER,
    MLP_LAYER,
    list_attention_layers,
)

_RENAMES = (
    (".backbone.", "."),
    (".embeddings.", ".embed_tokens."),
    (".embedding.", ".embed_tokens."),  # in older checkpoints of Mamba 2
    (".norm_f.", ".norm."),
    *((f".mixer.{part}_proj.", f".self_attn.{part}_proj.") for part in "qkvo"),
    *((f".mixer.{part}_proj.", f".mlp.{part}_proj.") for part in ("up", "down")),
    (".mixer.gate.", ".mlp.gate."),
    (".mixer.experts.", ".mlp.experts."),
    (".mixer.shared_experts.", ".mlp.shared_expert."),
    (".mixer.", ".mamba."),
)


def build_nemotron_h(config: TransformersConfig, checkpoint: Path) -> ModelGraphs:
    """Build the graph of a Nemotron-H.

    Raises UnsupportedModel for experts that read projections of the hidden states, an unsupported
    activation, head size or routing, or a missing tensor.
    """
    if EXPERTS_LAYER in config.layer_types and config.moe_latent_size is not None:
        raise UnsupportedModel(
            f"`moe_latent_size` of the architecture `{config.model_type}` is "
            f"{config.moe_latent_size}; experts of projected hidden states are not supported",
            hint="Nemotron 3 Nano has other experts",
        )
    # transformers ignores `tie_word_embeddings`.
    return _SingleModuleBuilder(config, checkpoint, is_tied=False).build()


def build_mamba2(config: TransformersConfig, checkpoint: Path) -> ModelGraphs:
    """Build the graph of a Mamba 2, which has no attention.

    Raises UnsupportedModel for limits of time steps, an unsupported activation, or a missing
    tensor.
    """
    is_tied = config.tie_word_embeddings
    return _SingleModuleBuilder(config, checkpoint, is_tied=is_tied).build()


class _SingleModuleBuilder:
    """Builder of the graph of one checkpoint."""

    def __init__(self, config: TransformersConfig, checkpoint: Path, *, is_tied: bool) -> None:
        """`is_tied`: whether the logits are products with the embeddings."""
        self._config, self._is_tied = config, is_tied
        self._graph = GraphWriter(
            "decoder", CheckpointWeights(checkpoint, "model.", renames=_RENAMES)
        )
        self._inputs = SelfAttentionInputs(self._graph)
        self._kv_layers = list_attention_layers(config)
        self._shape: HeadShape | None = None
        if self._kv_layers:
            self._shape = HeadShape(
                config.num_attention_heads,
                read_head_size(config),
                shared_heads=read_kv_heads(config),
            )

    def build(self) -> ModelGraphs:
        graph = self._graph
        hidden = graph.op("Gather", graph.stored("embed_tokens.weight"), self._inputs.ids)
        for number in range(self._config.num_hidden_layers):
            source = self._norm(hidden, f"layers.{number}.norm")
            hidden = graph.op("Add", hidden, self._apply_module(number, source))
        states = self._norm(self._inputs.select_logits_positions(hidden), "norm")
        logits, vocabulary = graph.decoder_head(states, is_tied=self._is_tied)
        graph.output(logits, "logits", "B", "L", vocabulary)
        return ModelGraphs(
            decoder=graph,
            layers=len(self._kv_layers),
            shape=self._shape,
            vocabulary=vocabulary,
        )

    def _apply_module(self, number: int, hidden: Value) -> Value:
        """Apply the only module of a layer, which the config names: [B, T, D] -> [B, T, D]."""
        graph, config, name = self._graph, self._config, f"layers.{number}"
        kind = config.layer_types[number]
        if self._shape is not None and number in self._kv_layers:
            return self._attention(number, hidden, self._shape)
        if kind == MLP_LAYER:
            return self._mlp(f"{name}.mlp", hidden)
        if kind == EXPERTS_LAYER:
            experts = ExpertLayer(graph, config, SIGMOIDS_SQUARED, f"{name}.mlp", number)
            shared = self._mlp(f"{name}.mlp.shared_expert", hidden)
            return graph.op("Add", experts.apply(hidden), shared)
        return apply_mamba2(RecurrentLayer(graph, config, name, number), hidden)

    def _attention(self, number: int, hidden: Value, shape: HeadShape) -> Value:
        """Attend without RoPE."""
        graph, name = self._graph, f"layers.{number}.self_attn"
        modules = [f"{name}.{part}_proj" for part in "qkv"]
        parts = [graph.linear(hidden, modules, label=f"{name}.qkv_proj")]
        attended = self._inputs.attend(self._kv_layers.index(number), parts, shape)
        return graph.linear(attended, [f"{name}.o_proj"])

    def _mlp(self, name: str, hidden: Value) -> Value:
        graph = self._graph
        inner = graph.linear(hidden, [f"{name}.up_proj"])
        activated = graph.activation(inner, read_activation(self._config))
        return graph.linear(activated, [f"{name}.down_proj"])

    def _norm(self, value: Value, module: str) -> Value:
        weight = self._graph.stored(f"{module}.weight")
        return self._graph.rms_norm(value, weight, self._config.layer_norm_epsilon)
