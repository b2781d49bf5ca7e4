"""What an encoder is fed, attention over it, and what it leaves for the decoder."""

from __future__ import annotations

from collections.abc import Sequence

from build_artifacts.decoders.written.graph import INT32, GraphWriter, Value
from build_artifacts.decoders.written.memory import HIDDEN_SCORE, HeadShape, counted, size_of
from deployments.engines.decoder import KEPT


class SourceText:
    """B texts padded to S tokens. Padding changes nothing for the tokens that are there."""

    def __init__(self, graph: GraphWriter) -> None:
        self._graph = graph
        self.ids = graph.input("input_ids", "INT64", "B", "S")
        mask = graph.input("attention_mask", "INT64", "B", "S")
        self._mask = graph.op("Cast", mask, to=INT32)

    def positions(self) -> Value:
        """Of each token, the same in every text: [S]."""
        return counted(self._graph, size_of(self._graph, self.ids))

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
            mask_filter_value=HIDDEN_SCORE,
            **shape.attributes,
        )

    def leave(self, layer: int, projected: Sequence[Value], shape: HeadShape) -> None:
        """Keys and values [B, S, heads x size] that a decoder's layer will attend to.

        They become the outputs `cross.{layer}.{key,value}`, [B, heads, S, size].
        """
        graph = self._graph
        apart = graph.constant([0, 0, shape.heads, shape.size])
        for part, value in zip(KEPT, projected, strict=True):
            heads = graph.op("Reshape", value, apart)
            turned = graph.op("Transpose", heads, perm=[0, 2, 1, 3])
            graph.output(turned, f"cross.{layer}.{part}", "B", shape.heads, "S", shape.size)
