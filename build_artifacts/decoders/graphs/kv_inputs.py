"""Attention inputs of encoder-decoder and decoder graphs: tokens, masks and KV caches.

deployments/engines/onnx/decoder.py defines the layout. The sum of a mask row is the length of its
slot, so slots of different lengths run in one batch. The graph has no slot numbers, so the engine
may copy slots freely.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from build_artifacts.checkpoints.architectures import TransformersConfig
from build_artifacts.decoders.graphs.graph import INT32, GraphWriter, create_node
from build_artifacts.decoders.graphs.operators import Value
from build_artifacts.errors import UnsupportedModel
from build_artifacts.graph_nodes import ORT_DOMAIN
from deployments.engines.decoder import KV_NAMES, LOGITS_FROM


class EncoderInputs:
    """Inputs of an encoder: B texts padded to S tokens. Padding does not affect real tokens."""

    def __init__(self, graph: GraphWriter) -> None:
        self._graph = graph
        self.ids = graph.input("input_ids", "INT64", "B", "S")
        mask = graph.input("attention_mask", "INT64", "B", "S")
        self._mask = graph.op("Cast", mask, to=INT32)

    def positions(self) -> Value:
        """Return the token positions [S], which are equal for all texts."""
        return arange(self._graph, read_length(self._graph, self.ids))

    def attend(
        self, parts: Sequence[Value], shape: HeadShape, name: str, bias: Value | None = None
    ) -> Value:
        """Compute bidirectional attention over the texts.

        `parts` are query, key and value, [B, S, heads x size] each. `bias` is added to the scores,
        [1, heads, S, S].
        """
        inputs = [*parts, None, self._mask, *([] if bias is None else [bias])]
        return self._graph.op(
            "MultiHeadAttention",
            *inputs,
            name=name,
            mask_filter_value=MASKED_SCORE,
            **shape.attributes,
        )

    def export_cross_kv(self, layer: int, projected: Sequence[Value], shape: HeadShape) -> None:
        """Add the graph outputs that a decoder layer reads in cross-attention.

        `projected` are key and value, [B, S, heads x size] each. The outputs are
        `cross.{layer}.{key,value}`, [B, heads, S, size].
        """
        graph = self._graph
        apart = graph.constant([0, 0, shape.heads, shape.size])
        for part, value in zip(KV_NAMES, projected, strict=True):
            heads = graph.op("Reshape", value, apart)
            turned = graph.op("Transpose", heads, perm=[0, 2, 1, 3])
            graph.output(turned, f"cross.{layer}.{part}", "B", shape.heads, "S", shape.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGraphs:
    """Graph builders of one model."""

    decoder: GraphWriter
    encoder: GraphWriter | None = None  # encoder-decoder models only
    layers: int  # number of decoder layers with a KV cache
    # Attention heads of a decoder layer; the largest, if layers differ. None without attention.
    shape: HeadShape | None
    vocabulary: int


# Takes the config and the checkpoint directory; returns the graphs. Raises UnsupportedModel.
GraphFamily = Callable[[TransformersConfig, Path], ModelGraphs]

# Attention score of padding. The softmax maps this score to zero. Sums with this score stay finite.
MASKED_SCORE = -1e30
TO_THE_END = 2**62
# GroupQueryAttention requires heads of a multiple of _SIZE_STEP channels. It applies RoPE only to a
# multiple of _ROPE_STEP channels, in heads of a multiple of _ROPE_STEP channels.
_SIZE_STEP, _ROPE_STEP = 8, 16


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Attention heads of one layer."""

    heads: int
    size: int  # values per head
    scale: float | None = None  # factor of the scores; None: 1 / sqrt(size)
    # KV heads, which several query heads share. None: each query head has its own.
    shared_heads: int | None = None

    def __post_init__(self) -> None:
        if self.size % _SIZE_STEP:
            raise UnsupportedModel(
                f"the attention heads have {self.size} values each; GroupQueryAttention requires "
                f"multiples of {_SIZE_STEP}",
                hint="another size of the same model may work",
            )

    @property
    def kv_heads(self) -> int:
        return self.heads if self.shared_heads is None else self.shared_heads

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes of ONNX Runtime's attention operators."""
        scale = {} if self.scale is None else {"scale": self.scale}
        return {"domain": ORT_DOMAIN, "num_heads": self.heads, **scale}

    @property
    def grouped(self) -> dict[str, Any]:
        """Attributes of GroupQueryAttention."""
        return {"kv_num_heads": self.kv_heads, **self.attributes}


@dataclass(frozen=True, slots=True)
class LayerRope:
    """RoPE of one layer, for the first channels of each head."""

    cosines: Value  # [positions, rotated channels / 2]
    sines: Value
    channels: int  # number of channels with RoPE
    interleaved: bool  # True: neighboring channels form a pair. False: one channel of each half.

    def fits_attention(self, shape: HeadShape) -> bool:
        """Return whether GroupQueryAttention can apply RoPE itself: it limits both sizes."""
        return shape.size % _ROPE_STEP == 0 and self.channels % _ROPE_STEP == 0


class AttentionOptions(NamedTuple):
    """What the causal self-attention of a layer computes besides softmax(q . k) . v."""

    bias: Value | None = None  # [B, heads, T, M], added to the scores
    rope: LayerRope | None = None
    window: int | None = None  # a token attends to so many tokens, including itself
    sinks: Value | None = None  # [heads], score of an additional token whose value is zero
    softcap: float | None = None  # tanh keeps scores below it


_PLAIN = AttentionOptions()


class SelfAttentionInputs:
    """Inputs of a decoder with causal self-attention, for B slots of T tokens each.

    T may exceed 1 only for a single slot. M is the capacity of a slot in the KV cache, in tokens.
    """

    def __init__(self, graph: GraphWriter) -> None:
        self._graph = graph
        self.ids = graph.input("input_ids", "INT64", "B", "T")
        mask = graph.input("attention_mask", "INT64", "B", "M")
        self._logits_from = graph.input(LOGITS_FROM, "INT64", 1)
        self._sums = sum_rows(graph, mask)
        self._width = read_length(graph, mask)
        self._lengths = lengths_before_last(graph, self._sums)
        self._total = graph.op("Cast", self._width, to=INT32)
        self.tokens = read_length(graph, self.ids)
        self._positions: Value | None = None
        self._present: dict[int, Sequence[Value]] = {}  # keys and values by layer

    def positions(self) -> Value:
        """Return the token positions within each slot, [B, T]."""
        if self._positions is None:
            first = self._graph.op("Sub", self._sums, self.tokens)
            self._positions = self._graph.op("Add", first, arange(self._graph, self.tokens))
        return self._positions

    def apply_rope(self, value: Value, rope: LayerRope, heads: int) -> Value:
        """Apply RoPE to queries or keys, [B, T, heads x size], before `attend`."""
        inputs = [value, self.positions(), rope.cosines, rope.sines]
        return self._graph.op(
            "RotaryEmbedding",
            *inputs,
            domain=ORT_DOMAIN,
            num_heads=heads,
            rotary_embedding_dim=rope.channels,
            interleaved=int(rope.interleaved),
        )

    def cache_positions(self) -> Value:
        """Return the cache positions 0 to M - 1, [M]."""
        return arange(self._graph, self._width)

    def attend(
        self,
        layer: int,
        parts: Sequence[Value],
        shape: HeadShape,
        options: AttentionOptions = _PLAIN,
    ) -> Value:
        """Append T tokens to the cache and attend causally.

        `parts` are query, key and value, [B, T, heads x size] each, or one value that packs them.
        Returns [B, T, heads x size].
        """
        graph, size = self._graph, ("B", shape.kv_heads, "M", shape.size)
        past = [graph.input(f"past_key_values.{layer}.{part}", "FLOAT", *size) for part in KV_NAMES]
        query, key, value = parts if len(parts) > 1 else (parts[0], None, None)
        tables, attributes = [None, None], shape.grouped
        if (rope := options.rope) is not None:
            tables = [rope.cosines, rope.sines]
            attributes |= {"do_rotary": 1, "rotary_interleaved": int(rope.interleaved)}
        if options.window is not None:
            attributes["local_window_size"] = options.window
        if options.softcap is not None:
            attributes["softcap"] = options.softcap
        inputs = [query, key, value, *past, self._lengths, self._total, *tables]
        inputs += [None, options.bias, options.sinks]  # the first of them would be the positions
        while inputs[-1] is None:
            inputs.pop()
        attended, *present = graph.multi_output_op(
            "GroupQueryAttention", 3, *inputs, name=f"self_attention.{layer}", **attributes
        )
        for part, value in zip(KV_NAMES, present, strict=True):
            graph.output(value, f"present.{layer}.{part}", *size)
        self._present[layer] = present
        return attended

    def attend_to_layer(
        self, layer: int, query: Value, shape: HeadShape, *, window: int | None, name: str
    ) -> Value:
        """Attend causally to the keys and values of an earlier `layer`, new tokens included.

        `query` is [B, T, heads x size], after RoPE. The operator gets no new keys and values.
        """
        graph = self._graph
        none = empty_kv(graph, self.ids, shape)
        attributes = shape.grouped | ({} if window is None else {"local_window_size": window})
        inputs = [query, none, none, *self._present[layer], self._lengths, self._total]
        return graph.op("GroupQueryAttention", *inputs, name=name, **attributes)

    def select_logits_positions(self, hidden: Value) -> Value:
        """Select the tokens that need logits: [B, T, D] -> [B, T - logits_from, D]."""
        end, axis = self._graph.constant([TO_THE_END]), self._graph.constant([1])
        return self._graph.op("Slice", hidden, self._logits_from, end, axis)


class CrossAttentionInputs:
    """Cross-attention over B encoded sources, padded to C tokens.

    `cross_mask` [B, C] is 1 for the tokens of a source, left-aligned.
    """

    def __init__(self, graph: GraphWriter, tokens: Value, shape: HeadShape) -> None:
        self._graph, self._shape = graph, shape
        mask = graph.input("cross_mask", "INT64", "B", "C")
        # GroupQueryAttention takes the source length less one. An unused slot has no source, so its
        # value would be -1. Treat the length as 1; the output of an unused slot is arbitrary.
        sums = graph.op("Max", sum_rows(graph, mask), graph.constant([1]))
        self._lengths = lengths_before_last(graph, sums)
        self._total = graph.op("Cast", read_length(graph, mask), to=INT32)
        self._mask = graph.op("Cast", mask, to=INT32)
        self._is_step = graph.op("Equal", tokens, graph.constant(1))
        self._empty_kv = [empty_kv(graph, mask, shape)] * 2

    def attend(self, layer: int, query: Value) -> Value:
        """Attend to the source: [B, T, heads x size] -> [B, T, heads x size].

        With one token per slot, the graph runs GroupQueryAttention without new keys and values.
        This operator stops at the end of each source. MultiHeadAttention would read all C tokens
        and take four times as long for 8 sources of 3 to 512 tokens. With several tokens per slot,
        the graph runs MultiHeadAttention, because GroupQueryAttention rejects more tokens than the
        source has.
        """
        shape, name = self._shape, f"cross_attention.{layer}"
        size = ("B", shape.heads, "C", shape.size)
        cross = [self._graph.input(f"cross.{layer}.{part}", "FLOAT", *size) for part in KV_NAMES]
        step_inputs = [query, *self._empty_kv, *cross, self._lengths, self._total]
        step = create_node(
            "GroupQueryAttention", *step_inputs, name=f"{name}.step", causal=0, **shape.grouped
        )
        part = create_node(
            "MultiHeadAttention",
            *[query, *cross, None, self._mask],
            name=f"{name}.part",
            mask_filter_value=MASKED_SCORE,
            **shape.attributes,
        )
        return self._graph.if_else(self._is_step, [step], [part], name)


def empty_kv(graph: GraphWriter, rows: Value, shape: HeadShape) -> Value:
    """Return keys or values of zero tokens, [B, 0, KV heads x size], for `rows` [B, N]."""
    sizes = [graph.op("Shape", rows, end=1), graph.constant([0, shape.kv_heads * shape.size])]
    return graph.op("ConstantOfShape", graph.op("Concat", *sizes, axis=0))


def sum_rows(graph: GraphWriter, mask: Value) -> Value:
    """Sum each row of the mask: [B, M] -> [B, 1]."""
    return graph.op("ReduceSum", mask, graph.constant([1]), keepdims=1)


def lengths_before_last(graph: GraphWriter, sums: Value) -> Value:
    """Return the lengths `sums` less one, as GroupQueryAttention expects: [B, 1] -> [B] int32."""
    less = graph.op("Sub", sums, graph.constant([1]))
    return graph.op("Cast", graph.op("Squeeze", less, graph.constant([1])), to=INT32)


def read_length(graph: GraphWriter, value: Value) -> Value:
    """Return the size N of the second axis of [B, N] as a scalar."""
    return graph.op("Squeeze", graph.op("Shape", value, start=1, end=2))


def arange(graph: GraphWriter, size: Value) -> Value:
    """Return the integers from 0 to `size` - 1, shape [`size`]."""
    return graph.op("Range", graph.constant(0), size, graph.constant(1))
