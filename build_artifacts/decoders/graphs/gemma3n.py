"""Graph builder for Gemma 3n: Gemma 4's layers over several versions of the hidden states.

Each layer predicts all versions from each other, computes one of them, and corrects all by what it
found ("alternating updates", Baykal et al. 2023, https://arxiv.org/abs/2301.13310).
"""

from __future__ import annotations

from pathlib import Path
from statistics import NormalDist

from build_artifacts.checkpoints.architectures import TransformersConfig
from build_artifacts.decoders.graphs.gemma4 import Gemma4Builder
from build_artifacts.decoders.graphs.kv_inputs import HeadShape, ModelGraphs
from build_artifacts.decoders.graphs.operators import Value
from build_artifacts.decoders.graphs.recurrent_layers import RecurrentLayer

_MIN_MEAN_SQUARE = 1e-5  # of a version, as in transformers


def build_gemma3n(config: TransformersConfig, checkpoint: Path) -> ModelGraphs:
    """Build the graph of a Gemma 3n.

    Raises UnsupportedModel for an unsupported activation or head size, or a missing tensor.
    """
    return _Gemma3nBuilder(config, checkpoint).build()


class _Gemma3nBuilder(Gemma4Builder):
    """Builder of the graph of one checkpoint. V is the number of versions of the hidden states."""

    def build(self) -> ModelGraphs:
        graph, config = self._graph, self._config
        embedded = self._embed()
        context = self._project_layer_inputs(embedded)
        size = self._read_size(embedded)
        others = range(config.altup_num_inputs - 1)
        versions = [embedded]
        for other in others:
            projected = graph.linear(embedded, [f"altup_projections.{other}"])
            versions.append(self._resize(projected, size))
        hidden = self._stack(versions)
        for layer in range(config.num_hidden_layers):
            hidden = self._update_versions(layer, hidden, context)
        first = self._version(hidden, 0)
        size, summed = self._read_size(first), first
        for other in others:
            version = self._version(hidden, other + 1)
            projected = graph.linear(version, [f"altup_unembed_projections.{other}"])
            summed = graph.op("Add", summed, self._resize(projected, size))
        return self._finish(self._scale(summed, 1 / config.altup_num_inputs))

    def _shape(self, layer: int) -> HeadShape:
        config = self._config
        return HeadShape(
            config.num_attention_heads,
            config.head_dim,
            scale=1.0,
            shared_heads=config.num_key_value_heads,
        )

    def _has_equal_keys(self, kind: str) -> bool:
        return False

    def _layer_ids(self) -> Value:
        """Return the ids with those that the table of the layers lacks as 0, [B, T]."""
        graph, ids = self._graph, self._inputs.ids
        rows = self._weights.shape("embed_tokens_per_layer.weight")[0]
        has_row = graph.op("Less", ids, graph.constant(rows))
        return graph.op("Where", has_row, ids, graph.constant(0))

    def _update_versions(self, number: int, hidden: Value, context: Value | None) -> Value:
        """Apply a layer to the versions, [B, T, V, D]."""
        graph, config, layer = self._graph, self._config, f"layers.{number}"
        predicted = self._predict(number, hidden)
        active = self._version(predicted, config.altup_active_idx)
        computed = self._compute(number, active)
        innovation = graph.op("Sub", computed, active)
        corrected = self._correct(number, predicted, computed, innovation)
        first = self._version(corrected, config.altup_active_idx)
        if config.altup_correct_scale:
            scale = graph.stored(f"{layer}.altup.correct_output_scale")
            first = graph.op("Mul", first, scale)
        assert context is not None, "bug: a Gemma 3n without inputs of its layers"
        added = self._compute_layer_input(number, first, context)
        sizes = graph.constant([1, config.altup_num_inputs - 1])
        kept, others = graph.multi_output_op("Split", 2, corrected, sizes, axis=2)
        others = graph.op("Add", others, graph.op("Unsqueeze", added, graph.constant([2])))
        return graph.op("Concat", kept, others, axis=2)

    def _compute(self, number: int, hidden: Value) -> Value:
        """Apply attention, its low-rank addition and the MLP: [B, T, D] -> [B, T, D]."""
        graph, layer = self._graph, f"layers.{number}"
        source = self._norm(hidden, f"{layer}.input_layernorm")
        low_rank = graph.linear(source, [f"{layer}.laurel.linear_left"])
        low_rank = graph.linear(low_rank, [f"{layer}.laurel.linear_right"])
        augmented = self._add(source, low_rank, f"{layer}.laurel.post_laurel_norm")
        attended = self._attention(number, source)
        summed = self._add(hidden, attended, f"{layer}.post_attention_layernorm")
        summed = self._scale(graph.op("Add", summed, augmented), 2**-0.5)
        source = self._norm(summed, f"{layer}.pre_feedforward_layernorm")
        gate = graph.linear(source, [f"{layer}.mlp.gate_proj"])
        sparsity = self._config.activation_sparsity_pattern[number]
        if sparsity > 0:
            gate = self._keep_largest(gate, sparsity)
        up = graph.linear(source, [f"{layer}.mlp.up_proj"])
        inner = graph.op("Mul", self._activate(gate), up)
        computed = graph.linear(inner, [f"{layer}.mlp.down_proj"])
        return self._add(summed, computed, f"{layer}.post_feedforward_layernorm")

    def _keep_largest(self, gate: Value, sparsity: float) -> Value:
        """Subtract the quantile of a normal distribution from [B, T, N], and clamp to zero."""
        graph = self._graph
        mean = self._mean(gate)
        deviations = graph.op("Sub", gate, mean)
        deviation = graph.op("Sqrt", self._mean(graph.op("Mul", deviations, deviations)))
        cutoff = self._scale(deviation, NormalDist().inv_cdf(sparsity))
        return graph.op("Relu", graph.op("Sub", deviations, cutoff))

    def _predict(self, number: int, hidden: Value) -> Value:
        """Add to each version a sum of all, whose factors depend on the active one."""
        graph, count = self._graph, self._config.altup_num_inputs
        active = self._version(hidden, self._config.altup_active_idx)
        router = self._route(number, active, "predict")
        factors = self._apply_small(number, router, "prediction_coefs")
        square = graph.op("Reshape", factors, graph.constant([0, 0, count, count]))
        return graph.op("Add", hidden, graph.op("MatMul", square, hidden))

    def _correct(self, number: int, predicted: Value, computed: Value, innovation: Value) -> Value:
        """Add to each version a multiple of what the layer added to the active one."""
        graph = self._graph
        router = self._route(number, computed, "correct")
        factors = self._apply_small(number, router, "correction_coefs")
        factors = graph.op("Add", factors, graph.constant(1.0))
        factors = graph.op("Unsqueeze", factors, graph.constant([-1]))
        innovation = graph.op("Unsqueeze", innovation, graph.constant([2]))
        return graph.op("Add", predicted, graph.op("Mul", factors, innovation))

    def _route(self, number: int, hidden: Value, use: str) -> Value:
        """Return numbers from -1 to 1 for each token, [B, T, V]."""
        normed = self._norm(hidden, f"layers.{number}.altup.router_norm")
        scaled = self._scale(normed, 1 / self._config.hidden_size)
        return self._graph.op("Tanh", self._apply_small(number, scaled, "modality_router", use))

    def _apply_small(self, number: int, value: Value, module: str, use: str = "") -> Value:
        """Apply a linear layer with few outputs, which stays fp32, as gates do."""
        layer = RecurrentLayer(self._graph, self._config, f"layers.{number}", number)
        return layer.gate(value, f"layers.{number}.altup.{module}", use=use and f".{use}")

    def _stack(self, versions: list[Value]) -> Value:
        """V times [B, T, D] -> [B, T, V, D]."""
        graph, axis = self._graph, self._graph.constant([2])
        return graph.op(
            "Concat", *(graph.op("Unsqueeze", version, axis) for version in versions), axis=2
        )

    def _version(self, hidden: Value, index: int) -> Value:
        """[B, T, V, D] -> [B, T, D]."""
        return self._graph.op("Gather", hidden, self._graph.constant(index), axis=2)

    def _read_size(self, hidden: Value) -> Value:
        """Return the RMS of each token, [B, T, 1]."""
        squares = self._graph.op("Mul", hidden, hidden)
        return self._graph.op("Sqrt", self._mean(squares))

    def _resize(self, hidden: Value, size: Value) -> Value:
        """Scale the vector of each token to the RMS `size`."""
        graph = self._graph
        squares = self._mean(graph.op("Mul", hidden, hidden))
        own = graph.op("Sqrt", graph.op("Max", squares, graph.constant(_MIN_MEAN_SQUARE)))
        return graph.op("Div", graph.op("Mul", hidden, size), own)

    def _mean(self, value: Value) -> Value:
        """Return the mean of the last axis, which stays with size 1."""
        return self._graph.op("ReduceMean", value, self._graph.constant([-1]), keepdims=1)
