"""Graph builder for GPT-2: learned positions, transposed projections, pre-norm, tied head."""

from __future__ import annotations

from pathlib import Path

from build_artifacts.checkpoints.architectures import TransformersConfig
from build_artifacts.decoders.graphs.graph import GraphWriter
from build_artifacts.decoders.graphs.kv_inputs import HeadShape, ModelGraphs, SelfAttentionInputs
from build_artifacts.decoders.graphs.operators import Value
from build_artifacts.decoders.graphs.weights import CheckpointWeights
from build_artifacts.errors import UnsupportedModel


def build_gpt2(config: TransformersConfig, checkpoint: Path) -> ModelGraphs:
    """Build the graph of a GPT-2.

    Raises UnsupportedModel for cross-attention, an unsupported activation or head size, or a
    missing tensor.
    """
    if config.add_cross_attention:
        raise UnsupportedModel(
            "this GPT-2 has cross-attention, but the checkpoint has no encoder",
            hint="use a GPT-2 without `add_cross_attention`",
        )
    weights = CheckpointWeights(checkpoint, base="transformer.")
    graph = GraphWriter("decoder", weights)
    inputs = SelfAttentionInputs(graph)
    words = graph.op("Gather", graph.stored("wte.weight"), inputs.ids)
    hidden = graph.op(
        "Add", words, graph.op("Gather", graph.stored("wpe.weight"), inputs.positions())
    )
    for layer in range(config.n_layer):
        hidden = _layer(graph, inputs, layer, hidden, config)
    normed = graph.layer_norm(
        inputs.select_logits_positions(hidden), "ln_f", config.layer_norm_epsilon
    )
    logits, vocabulary = graph.head(normed, ["lm_head.weight", "wte.weight"])
    graph.output(logits, "logits", "B", "L", vocabulary)
    return ModelGraphs(
        decoder=graph,
        layers=config.n_layer,
        shape=_heads(config, 0),
        vocabulary=vocabulary,
    )


def _layer(
    graph: GraphWriter,
    inputs: SelfAttentionInputs,
    layer: int,
    hidden: Value,
    config: TransformersConfig,
) -> Value:
    name, epsilon = f"h.{layer}", config.layer_norm_epsilon
    normed = graph.layer_norm(hidden, f"{name}.ln_1", epsilon)
    joined = graph.linear(normed, [f"{name}.attn.c_attn"], stored="columns")
    attended = inputs.attend(layer, [joined], _heads(config, layer))
    projected = graph.linear(attended, [f"{name}.attn.c_proj"], stored="columns")
    hidden = graph.op("Add", hidden, projected)
    normed = graph.layer_norm(hidden, f"{name}.ln_2", epsilon)
    inner = graph.linear(normed, [f"{name}.mlp.c_fc"], stored="columns")
    active = graph.activation(inner, config.activation_function)
    return graph.op("Add", hidden, graph.linear(active, [f"{name}.mlp.c_proj"], stored="columns"))


def _heads(config: TransformersConfig, layer: int) -> HeadShape:
    size = config.n_embd // config.n_head
    scale = size**-0.5 if config.scale_attn_weights else 1.0
    if config.scale_attn_by_inverse_layer_idx:
        scale /= layer + 1
    return HeadShape(config.n_head, size, scale)
