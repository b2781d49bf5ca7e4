"""A decoder's two memories: rows of what it has read itself, and rows of what the encoder read.

The layout is that of deployments/engines/onnx_decoder.py. A row's length is the sum of its row of
a mask, so that rows of different lengths go together, and nothing else in the graph tells which
row it works on: a row may be copied to another at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from build_artifacts.checkpoints.architectures import TransformersConfig
from build_artifacts.decoders.float_graph import ORT_DOMAIN
from build_artifacts.decoders.graphs.graph import INT32, GraphWriter, create_node
from build_artifacts.decoders.graphs.operators import Value
from build_artifacts.errors import UnsupportedModel
from deployments.engines.decoder import KV_NAMES, LOGITS_FROM


class EncoderInputs:
    """B texts padded to S tokens. Padding changes nothing for the tokens that are there."""

    def __init__(self, graph: GraphWriter) -> None:
        self._graph = graph
        self.ids = graph.input("input_ids", "INT64", "B", "S")
        mask = graph.input("attention_mask", "INT64", "B", "S")
        self._mask = graph.op("Cast", mask, to=INT32)

    def positions(self) -> Value:
        """Of each token, the same in every text: [S]."""
        return arange(self._graph, read_length(self._graph, self.ids))

    def attend(
        self, parts: Sequence[Value], shape: HeadShape, name: str, bias: Value | None = None
    ) -> Value:
        """Every token attends to every token.

        `parts` are queries, keys and values, [B, S, heads x size] each; `bias` is added to the
        scores, [1, heads, S, S].
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
        """Keys and values [B, S, heads x size] that a decoder's layer will attend to.

        They become the outputs `cross.{layer}.{key,value}`, [B, heads, S, size].
        """
        graph = self._graph
        apart = graph.constant([0, 0, shape.heads, shape.size])
        for part, value in zip(KV_NAMES, projected, strict=True):
            heads = graph.op("Reshape", value, apart)
            turned = graph.op("Transpose", heads, perm=[0, 2, 1, 3])
            graph.output(turned, f"cross.{layer}.{part}", "B", shape.heads, "S", shape.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGraphs:
    """The graphs of one model."""

    decoder: GraphWriter
    encoder: GraphWriter | None = None  # of a model that reads a source first
    layers: int  # of the decoder
    shape: HeadShape  # of the decoder
    vocabulary: int


# Reads config.json and the weights. Raises UnsupportedModel.
GraphFamily = Callable[[TransformersConfig, Path], ModelGraphs]

# Added to the scores of padding: none of it counts then, and the sum is a finite number.
MASKED_SCORE = -1e30
_TO_THE_END = 2**62
_SIZE_STEP = 8


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Attention of one layer: as many heads of keys and values as of queries."""

    heads: int
    size: int  # values per head
    scale: float | None = None  # of the scores; None is 1 / sqrt(size)

    def __post_init__(self) -> None:
        if self.size % _SIZE_STEP:
            raise UnsupportedModel(
                f"its heads have {self.size} values each, and GroupQueryAttention takes multiples "
                f"of {_SIZE_STEP}",
                hint="another size of the same model may work",
            )

    @property
    def attributes(self) -> dict[str, Any]:
        """What ONNX Runtime's own attention operators are told."""
        scale = {} if self.scale is None else {"scale": self.scale}
        return {"domain": ORT_DOMAIN, "num_heads": self.heads, **scale}

    @property
    def grouped(self) -> dict[str, Any]:
        """What GroupQueryAttention is told."""
        return {"kv_num_heads": self.heads, **self.attributes}


class SelfAttentionInputs:
    """What a decoder is fed, B rows and T tokens each, and attention over what they have read.

    T may be above 1 for a single row only.
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

    def positions(self) -> Value:
        """Of each token within its row, [B, T]."""
        first = self._graph.op("Sub", self._sums, self.tokens)
        return self._graph.op("Add", first, arange(self._graph, self.tokens))

    def places(self) -> Value:
        """0 to M - 1, [M]."""
        return arange(self._graph, self._width)

    def attend(
        self, layer: int, joined: Value, shape: HeadShape, bias: Value | None = None
    ) -> Value:
        """Write T tokens behind what is there, and attend to all up to each of them.

        `joined` is queries, keys and values side by side, [B, T, 3 x heads x size]; `bias` is added
        to the scores, [B, heads, T, M]. Returns [B, T, heads x size].
        """
        graph, size = self._graph, ("B", shape.heads, "M", shape.size)
        past = [graph.input(f"past_key_values.{layer}.{part}", "FLOAT", *size) for part in KV_NAMES]
        biased = [] if bias is None else [None, None, None, bias]
        inputs = [joined, None, None, *past, self._lengths, self._total, *biased]
        attended, *present = graph.multi_output_op(
            "GroupQueryAttention", 3, *inputs, name=f"self_attention.{layer}", **shape.grouped
        )
        for part, value in zip(KV_NAMES, present, strict=True):
            graph.output(value, f"present.{layer}.{part}", *size)
        return attended

    def select_logits_positions(self, hidden: Value) -> Value:
        """The tokens whose logits are asked for: [B, T, D] -> [B, T - logits_from, D]."""
        end, axis = self._graph.constant([_TO_THE_END]), self._graph.constant([1])
        return self._graph.op("Slice", hidden, self._logits_from, end, axis)


class CrossAttentionInputs:
    """What the encoder made of B sources, padded to C: a key and a value per layer and token.

    `cross_mask` [B, C] is 1 where a source's tokens are, from the left.
    """

    def __init__(self, graph: GraphWriter, tokens: Value, shape: HeadShape) -> None:
        self._graph, self._shape = graph, shape
        mask = graph.input("cross_mask", "INT64", "B", "C")
        # A row that nobody uses has no source: it reads one token of noise.
        sums = graph.op("Max", sum_rows(graph, mask), graph.constant([1]))
        self._lengths = lengths_before_last(graph, sums)
        self._total = graph.op("Cast", read_length(graph, mask), to=INT32)
        self._mask = graph.op("Cast", mask, to=INT32)
        self._is_step = graph.op("Equal", tokens, graph.constant(1))
        empty = [graph.op("Shape", mask, end=1), graph.constant([0, shape.heads * shape.size])]
        empty_kv = graph.op("ConstantOfShape", graph.op("Concat", *empty, axis=0))
        self._empty_kv = [empty_kv, empty_kv]  # keys and values of no tokens

    def attend(self, layer: int, query: Value) -> Value:
        """[B, T, heads x size] -> [B, T, heads x size].

        One token per row goes through GroupQueryAttention, with no keys and values of its own: it
        reads a source to its end, where MultiHeadAttention reads the whole width (four times as
        long for 8 sources of 3 to 512 tokens). It refuses more tokens than the source has, so a
        row that reads several at once takes the other way.
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


def sum_rows(graph: GraphWriter, mask: Value) -> Value:
    """[B, M] -> [B, 1]."""
    return graph.op("ReduceSum", mask, graph.constant([1]), keepdims=1)


def lengths_before_last(graph: GraphWriter, sums: Value) -> Value:
    """Tokens of each row but one, as GroupQueryAttention counts: [B, 1] -> [B] of int32."""
    less = graph.op("Sub", sums, graph.constant([1]))
    return graph.op("Cast", graph.op("Squeeze", less, graph.constant([1])), to=INT32)


def read_length(graph: GraphWriter, value: Value) -> Value:
    """The second size of [B, N]: N, a scalar."""
    return graph.op("Squeeze", graph.op("Shape", value, start=1, end=2))


def arange(graph: GraphWriter, size: Value) -> Value:
    """0 to N - 1, [N]."""
    return graph.op("Range", graph.constant(0), size, graph.constant(1))
