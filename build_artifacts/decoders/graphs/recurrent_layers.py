"""Layers with recurrent states instead of attention: short convolutions, DeltaNet and Mamba 2.

A recurrent state has a fixed size, whatever the length of the text. The graph reads the states of B
slots and returns them after T further tokens (deployments/engines/onnx/decoder.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from build_artifacts.checkpoints.architectures import TransformersConfig
from build_artifacts.checkpoints.recurrent_states import Mamba2Config, read_mamba2_config
from build_artifacts.decoders.graphs.graph import GraphWriter
from build_artifacts.decoders.graphs.kv_inputs import TO_THE_END
from build_artifacts.decoders.graphs.operators import Value
from build_artifacts.errors import UnsupportedModel
from build_artifacts.graph_nodes import ORT_DOMAIN
from build_artifacts.types import FloatArray
from deployments.engines.decoder import PAST_STATES, PRESENT_STATES

_GATE_COLUMNS = 16
_OLMO_EPSILON = 1e-5  # of the norm in OLMo Hybrid's DeltaNet; its config has that of other norms
_L2_EPSILON = 1e-6  # added to the squared lengths of queries and keys, as in transformers


@dataclass(frozen=True, slots=True)
class LinearHeads:
    """Heads of linear attention. The state of a head is [key size, value size]."""

    count: int
    key_size: int
    value_size: int


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """A layer whose module is no attention."""

    graph: GraphWriter
    config: TransformersConfig
    name: str  # name of the layer in the checkpoint, such as "layers.0"
    number: int  # index of the layer

    def convolve(self, value: Value, *modules: str) -> Value:
        """Convolve each channel of [B, T, C] with the last tokens, causally.

        Several modules have parts of the channels each; the first one decides about a bias. This
        takes a third of the time of ONNX Runtime's CausalConvWithState. Raises UnsupportedModel for
        a convolution without a state.
        """
        graph, bias = self.graph, f"{modules[0]}.bias"
        weights = [f"{module}.weight" for module in modules]
        taps = graph.weights.shape(weights[0])[2]
        channels = sum(graph.weights.shape(weight)[0] for weight in weights)
        if taps < 2:
            raise UnsupportedModel(
                f"the convolution `{modules[0]}` covers one token only",
                hint="use a model whose convolutions cover several tokens",
            )
        past = self._read_state("conv", taps - 1, channels)
        tokens = graph.op("Concat", past, value, axis=1)
        self._write_state("conv", self._cut(tokens, 1 - taps, TO_THE_END), taps - 1, channels)
        summed = graph.stored(bias) if bias in graph.weights else None
        for tap in range(taps):
            end = tap - taps + 1 or TO_THE_END
            product = graph.op("Mul", self._cut(tokens, tap, end), self._read_tap(weights, tap))
            summed = product if summed is None else graph.op("Add", summed, product)
        return summed

    def _read_tap(self, names: Sequence[str], tap: int) -> Value:
        """Return the factors of one of the tokens in convolutions [C, 1, taps]: [sum of C]."""
        weights = self.graph.weights
        return self.graph.weight(
            f"{names[0]}.{tap}",
            (sum(weights.shape(name)[0] for name in names),),
            lambda: np.concatenate([weights.read(name)[:, 0, tap] for name in names]),
        )

    def attend_linearly(
        self,
        parts: Sequence[Value],
        gates: Sequence[Value],
        heads: LinearHeads,
        rule: Literal["gated", "gated_delta"],
        scale: float,
    ) -> Value:
        """Update the state of each head by one token after the other, and read it.

        `parts` are query, key and value, [B, T, heads x size] each. `gates` are the decay in
        log-space and, for the delta rule, the update rate, [B, T, heads] each.
        Returns [B, T, heads x value size].
        """
        shape = (heads.count, heads.key_size, heads.value_size)
        output, present = self.graph.multi_output_op(
            "LinearAttention",
            2,
            *parts,
            self._read_state("recurrent", *shape),
            *gates,
            name=f"{self.name}.recurrent",
            domain=ORT_DOMAIN,
            q_num_heads=heads.count,
            kv_num_heads=heads.count,
            update_rule=rule,
            scale=scale,
        )
        self._write_state("recurrent", present, *shape)
        return output

    def _read_state(self, name: str, *shape: int) -> Value:
        return self.graph.input(f"{PAST_STATES}{self.number}.{name}", "FLOAT", "B", *shape)

    def _write_state(self, name: str, value: Value, *shape: int) -> None:
        self.graph.output(value, f"{PRESENT_STATES}{self.number}.{name}", "B", *shape)

    def _cut(self, value: Value, first: int, end: int) -> Value:
        """Return tokens `first` to `end` - 1 of [B, T, C]. Negative numbers count from the end."""
        bounds = (self.graph.constant([each]) for each in (first, end, 1))
        return self.graph.op("Slice", value, *bounds)

    def split_channels(self, value: Value, sizes: Sequence[int]) -> Sequence[Value]:
        """Split the last axis into parts of these sizes."""
        graph = self.graph
        return graph.multi_output_op("Split", len(sizes), value, graph.constant(sizes), axis=-1)

    def split_heads(self, value: Value, heads: int, size: int) -> Value:
        """[B, T, heads x size] -> [B, T, heads, size]."""
        return self.graph.op("Reshape", value, self.graph.constant([0, 0, heads, size]))

    def join_heads(self, value: Value) -> Value:
        """[B, T, heads, size] -> [B, T, heads x size]."""
        return self.graph.op("Reshape", value, self.graph.constant([0, 0, -1]))

    def repeat_heads(self, value: Value, heads: int, size: int, times: int) -> Value:
        """Repeat each head: [B, T, heads x size] -> [B, T, heads x times x size]."""
        if times == 1:
            return value
        graph = self.graph
        apart = graph.op("Reshape", value, graph.constant([0, 0, heads, 1, size]))
        repeated = graph.op("Expand", apart, graph.constant([1, 1, 1, times, 1]))
        return self.join_heads(repeated)

    def linear_rows(self, hidden: Value, module: str, rows: slice) -> Value:
        """Apply some rows of a linear layer."""
        names = (f"{module}.weight", f"{module}.bias")
        return self._multiply(hidden, names, rows, "columns")

    def gate(self, hidden: Value, module: str, first: int = 0, use: str = "") -> Value:
        """Apply the rows of a linear layer from `first` on, without quantization: [B, T, gates].

        Gates enter an exponential function, which enlarges errors, and their values must not depend
        on the batch or the chunk. In fp32, ONNX Runtime multiplies a single row by another kernel
        than several rows, and splits wide products among threads. A gate therefore gets a row more,
        and has _GATE_COLUMNS columns per product. Quantizers replace products with matrices only,
        so its weights have an axis more. `use` names one of several uses of the same gate.
        """
        graph, names = self.graph, (f"{module}.weight", f"{module}.bias")
        outputs, _ = graph.weights.shape(names[0])
        padded = graph.op("Pad", hidden, graph.constant([0, 0, 0, 0, 1, 0]))
        parts = [
            self._multiply(
                padded, names, slice(start, start + _GATE_COLUMNS), f"gates.{start}", 1, use=use
            )
            for start in range(first, outputs, _GATE_COLUMNS)
        ]
        joined = parts[0] if len(parts) == 1 else graph.op("Concat", *parts, axis=-1)
        return self._cut(joined, 0, -1)

    def _multiply(
        self,
        hidden: Value,
        names: tuple[str, str],
        rows: slice,
        suffix: str,
        *outer: int,
        use: str = "",
    ) -> Value:
        """Multiply by rows of a weight, and add those of the bias, if there is one.

        `names` are those of both. The graph stores the weight as [*outer, in, rows].
        """
        graph, (weight_name, bias_name) = self.graph, names
        outputs, inputs = graph.weights.shape(weight_name)
        count = len(range(*rows.indices(outputs)))
        shape = (*outer, inputs, count)

        def read() -> FloatArray:
            return graph.weights.read(weight_name)[rows].T.reshape(shape)

        weight = graph.weight(f"{weight_name}.{suffix}", shape, read)
        product = graph.op("MatMul", hidden, weight, name=f"{weight_name}.{suffix}{use}")
        if bias_name not in graph.weights:
            return product
        bias = graph.weight(
            f"{bias_name}.{suffix}", (count,), lambda: graph.weights.read(bias_name)[rows]
        )
        return graph.op("Add", product, bias)

    def read_negative_rates(self, name: str) -> Value:
        """Return -exp of the logarithms that the checkpoint stores, [heads]."""
        graph = self.graph
        return graph.weight(
            f"{name}.negative_rates",
            graph.weights.shape(name),
            lambda: -np.exp(graph.weights.read(name)),
        )


# Applies the module of a layer: [B, T, D] -> [B, T, D]. Raises UnsupportedModel.
ApplyRecurrence = Callable[[RecurrentLayer, Value], Value]


def apply_short_convolution(layer: RecurrentLayer, hidden: Value) -> Value:
    """Apply LFM2's gated convolution over three tokens (https://arxiv.org/abs/2511.23404)."""
    graph, name, width = layer.graph, f"{layer.name}.conv", layer.config.hidden_size
    projected = graph.linear(hidden, [f"{name}.in_proj"])
    inner, outer, value = layer.split_channels(projected, [width] * 3)
    convolved = layer.convolve(graph.op("Mul", inner, value), f"{name}.conv")
    return graph.linear(graph.op("Mul", outer, convolved), [f"{name}.out_proj"])


def apply_gated_delta_net(layer: RecurrentLayer, hidden: Value) -> Value:
    """Apply the gated DeltaNet of Qwen3.5, Qwen3-Next and OLMo Hybrid.

    Yang et al. 2024, https://arxiv.org/abs/2412.06464
    """
    graph, config, name = layer.graph, layer.config, f"{layer.name}.linear_attn"
    key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    heads = LinearHeads(value_heads, config.linear_key_head_dim, config.linear_value_head_dim)
    joined = f"{name}.in_proj_qkv"
    if f"{joined}.weight" in graph.weights:
        mixed = graph.linear(hidden, [joined])
    else:  # OLMo Hybrid has several modules, Qwen3-Next one in another order, read in parts
        parts = [f"{name}.in_proj_{part}" for part in "qkv"]
        mixed = graph.linear(hidden, parts, label=joined)
    convolutions = [f"{name}.{part}_conv1d" for part in "qkv"]
    if f"{name}.conv1d.weight" in graph.weights:
        convolutions = [f"{name}.conv1d"]
    mixed = graph.activation(layer.convolve(mixed, *convolutions), config.hidden_act)
    sizes = [key_heads * heads.key_size] * 2 + [value_heads * heads.value_size]
    query, key, value = layer.split_channels(mixed, sizes)
    query, key = (
        layer.repeat_heads(
            _normalize_heads(layer, part, key_heads, heads.key_size),
            key_heads,
            heads.key_size,
            value_heads // key_heads,
        )
        for part in (query, key)
    )
    decay, update_rate = graph.multi_output_op(
        "LinearAttentionGate",
        2,
        layer.gate(hidden, f"{name}.in_proj_a"),
        graph.stored(f"{name}.dt_bias"),
        layer.read_negative_rates(f"{name}.A_log"),
        layer.gate(hidden, f"{name}.in_proj_b"),
        domain=ORT_DOMAIN,
    )
    if getattr(config, "linear_allow_neg_eigval", False):
        update_rate = graph.op("Mul", update_rate, graph.constant(2.0))
    attended = layer.attend_linearly(
        [query, key, value],
        [decay, update_rate],
        heads,
        rule="gated_delta",
        scale=heads.key_size**-0.5,
    )
    apart = layer.split_heads(attended, heads.count, heads.value_size)
    scale = graph.stored(f"{name}.norm.weight")
    epsilon = _OLMO_EPSILON if config.model_type == "olmo_hybrid" else config.rms_norm_eps
    normed = layer.join_heads(graph.rms_norm(apart, scale, epsilon))
    gate = graph.activation(graph.linear(hidden, [f"{name}.in_proj_z"]), "silu")
    return graph.linear(graph.op("Mul", normed, gate), [f"{name}.out_proj"])


def _normalize_heads(layer: RecurrentLayer, value: Value, heads: int, size: int) -> Value:
    """Divide each head by its length: [B, T, heads x size]."""
    graph = layer.graph
    # The norm divides by the RMS, which is the length over sqrt(size).
    scale = graph.tensor(f"l2_norm_{size}", np.full(size, size**-0.5, np.float32))
    apart = layer.split_heads(value, heads, size)
    return layer.join_heads(graph.rms_norm(apart, scale, _L2_EPSILON / size))


def apply_mamba2(layer: RecurrentLayer, hidden: Value) -> Value:
    """Apply Mamba 2 (Dao and Gu 2024, https://arxiv.org/abs/2405.21060).

    It is linear attention with a decay: B are the keys, C the queries, and the inputs times their
    time steps the values.
    """
    graph, config, name = layer.graph, layer.config, f"{layer.name}.mamba"
    mamba = read_mamba2_config(config)
    heads = LinearHeads(mamba.heads, mamba.state_size, mamba.head_size)
    groups, width = mamba.groups, heads.count * heads.value_size
    shared = groups * heads.key_size
    inputs = 2 * width + 2 * shared
    projected = layer.linear_rows(hidden, f"{name}.in_proj", slice(inputs))
    gate, mixed = layer.split_channels(projected, [width, width + 2 * shared])
    mixed = graph.activation(layer.convolve(mixed, f"{name}.conv1d"), mamba.activation)
    value, key, query = layer.split_channels(mixed, [width, shared, shared])
    # ONNX Runtime's Softplus would depend on the number of tokens: threads split it.
    (steps,) = graph.multi_output_op(
        "LinearAttentionGate",
        1,
        layer.gate(hidden, f"{name}.in_proj", inputs),
        graph.stored(f"{name}.dt_bias"),
        graph.tensor(f"ones_{heads.count}", np.ones(heads.count, np.float32)),
        domain=ORT_DOMAIN,
    )
    if mamba.min_step:
        steps = graph.op("Max", steps, graph.constant(mamba.min_step))
    decay = graph.op("Mul", steps, layer.read_negative_rates(f"{name}.A_log"))
    apart = layer.split_heads(value, heads.count, heads.value_size)
    stepped = graph.op("Mul", apart, graph.op("Unsqueeze", steps, graph.constant([-1])))
    query, key = (
        layer.repeat_heads(part, groups, heads.key_size, heads.count // groups)
        for part in (query, key)
    )
    attended = layer.attend_linearly(
        [query, key, layer.join_heads(stepped)], [decay], heads, rule="gated", scale=1.0
    )
    skipped = graph.weight(
        f"{name}.D.by_heads", (heads.count, 1), lambda: graph.weights.read(f"{name}.D")[:, None]
    )
    added = layer.join_heads(graph.op("Mul", apart, skipped))
    summed = graph.op("Add", attended, added)
    factor, scale = graph.activation(gate, "silu"), f"{name}.norm.weight"
    has_norm = scale in graph.weights  # most models of Falcon-H1 have none
    if has_norm and getattr(config, "mamba_norm_before_gate", False):
        gated = graph.op("Mul", _norm_groups(layer, summed, scale, mamba), factor)
    else:
        gated = graph.op("Mul", summed, factor)
        gated = _norm_groups(layer, gated, scale, mamba) if has_norm else gated
    return graph.linear(gated, [f"{name}.out_proj"])


def _norm_groups(layer: RecurrentLayer, value: Value, scale: str, mamba: Mamba2Config) -> Value:
    """Divide each of the groups of channels by its RMS and multiply by `scale`: [B, T, C]."""
    graph, groups, epsilon = layer.graph, mamba.groups, mamba.epsilon
    if groups == 1:
        return graph.rms_norm(value, graph.stored(scale), epsilon)
    size = graph.weights.shape(scale)[0] // groups
    ones = graph.tensor(f"ones_{size}", np.ones(size, np.float32))
    apart = graph.rms_norm(layer.split_heads(value, groups, size), ones, epsilon)
    return graph.op("Mul", layer.join_heads(apart), graph.stored(scale))
