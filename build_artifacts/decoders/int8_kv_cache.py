"""KV cache in int8: a quarter of the memory and of the memory bandwidth of an fp32 cache.

Each channel of each head has a fixed scale, computed from the KV caches of calibration texts.

ONNX Runtime's int8 attention computes each token separately, with at most one thread per head. In
decode steps, a token therefore has bit-identical results alone, in a batch and before draft tokens.
This allows a decode step to verify several draft tokens. For prompts, int8 attention takes three
times as long as float attention. The graph therefore contains a branch for decode steps and a
branch for prefill. The input `is_prefill` selects the branch:

    decode:   query, key, value -> GroupQueryAttention over the int8 cache
    prefill:  apply RoPE to query and key, round key and value, write them to the cache
              (TensorScatter), dequantize cached and new values -> GroupQueryAttention in float

Prompt tokens attend to rounded keys and values, including those of their own chunk. The result
therefore does not depend on the chunking. Both branches write to the buffer that `past` and
`present` share (deployments/engines/onnx/decoder.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from build_artifacts.decoders.calibration import SCALE_MARGIN, CalibrationTexts
from build_artifacts.decoders.float_graph import ATTENTION, read_int_attribute
from build_artifacts.graph_nodes import ORT_DOMAIN
from build_artifacts.types import MAX_INT8, FloatArray
from deployments.engines.decoder import IS_PREFILL, KV_NAMES

_MIN_SCALE = 1e-6  # minimum, for channels that are always zero


class ChannelScales:
    """Scales of the channels of one cache, the keys or the values of a layer."""

    def __init__(self, pairs: int = 0, *, interleaved: bool = False) -> None:
        """Set the RoPE layout: the first 2 x `pairs` channels rotate in pairs.

        A pair is two neighbors if `interleaved`, otherwise one channel of each half. Both channels
        of a pair share a scale.
        """
        self._pairs, self._interleaved = pairs, interleaved
        self._largest: FloatArray = np.zeros((), np.float32)

    def update(self, cache: FloatArray) -> None:
        """Include the cache of one text, [heads, tokens, size].

        The size of a rotated channel is the norm of its pair, because RoPE may move the whole norm
        into one of the two channels.
        """
        sizes = np.abs(cache)
        rotated = cache[..., : 2 * self._pairs]
        parted = (self._pairs, 2) if self._interleaved else (2, self._pairs)
        by_pair = (*rotated.shape[:-1], *parted)
        axis = -1 if self._interleaved else -2
        lengths = np.linalg.norm(rotated.reshape(by_pair), axis=axis, keepdims=True)
        sizes[..., : 2 * self._pairs] = np.broadcast_to(lengths, by_pair).reshape(rotated.shape)
        self._largest = np.maximum(self._largest, sizes.max(axis=1))

    @property
    def table(self) -> FloatArray:
        """Scale of each channel, [heads, size]."""
        scales: FloatArray = np.maximum(self._largest * SCALE_MARGIN / MAX_INT8, _MIN_SCALE)
        return scales.astype(np.float32)


def collect_scales(
    texts: Iterable[Mapping[str, FloatArray]], scales: Mapping[str, ChannelScales]
) -> Mapping[str, FloatArray]:
    """Update `scales` with the caches of all texts and return the scale tables by name."""
    for text in texts:
        for name, scale in scales.items():
            scale.update(text[name])
    return {name: scale.table for name, scale in scales.items()}


if TYPE_CHECKING:
    import onnx

_OPSET, _IR_VERSION = 24, 11  # first opset with TensorScatter
# The decode and the prefill branch support only the first nine inputs of GroupQueryAttention.
_KNOWN_INPUTS = 9
_KNOWN_ATTRIBUTES = {
    *("num_heads", "kv_num_heads", "scale", "softcap", "local_window_size"),
    *("do_rotary", "rotary_interleaved"),
}
# Operators of a norm of the keys of each head.
_BETWEEN_ROPE_AND_ATTENTION = (
    "Reshape", "SimplifiedLayerNormalization", "LayerNormalization", "Concat", "Tile",
)  # fmt: skip
_ROPE_COSINES = 2  # input index of RotaryEmbedding
_QUERY, _KEY, _PAST, _LENGTHS, _COSINES, _SINES = 0, 1, 3, 5, 7, 8
_MODE = {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": 8}
# Names of graph values with the token counts of a prefill of one slot: the cached tokens, [1], and
# the cached plus the new tokens, a scalar.
_CACHED_TOKENS, _TOTAL_TOKENS = "kv_cache_cached_tokens", "kv_cache_total_tokens"
_FIRST, _TOKENS_AXIS, _ONE = "kv_cache_first", "kv_cache_tokens_axis", "kv_cache_one"
_LOWEST, _HIGHEST = "kv_cache_lowest", "kv_cache_highest"


def quantize_kv_cache(graph: Path, calibration: CalibrationTexts) -> None:
    """Rewrite the file `graph` so that its KV cache is int8. The weight file stays unchanged.

    The KV cache must still be float; weights may be quantized. A graph with an unsupported
    attention node stays unchanged.
    """
    import onnx

    model = onnx.load(graph, load_external_data=False)
    nodes = [node for node in model.graph.node if node.op_type == ATTENTION]
    tables = {table.name: table for table in model.graph.initializer}
    answers = {value.name for value in model.graph.output}
    if not nodes or not all(_is_supported(node, tables, answers) for node in nodes):
        return
    producers = {name: each for each in model.graph.node for name in each.output}
    ropes = [_find_rope(node, producers) for node in nodes]
    if any(rope and (rope.is_hidden or rope.cosines not in tables) for rope in ropes):
        return
    created = _create_scales(nodes, ropes, tables)
    scales = collect_scales(calibration.observe_kv_cache(graph), created)
    writer = _Int8KvCacheWriter(model, tables)
    for layer, node in enumerate(nodes):
        writer.replace(node, f"kv_cache/{layer}", [scales[name] for name in node.output[1:]])
    writer.finish()
    onnx.save(model, graph)


def has_int8_kv_cache(graph: Path) -> bool:
    """Return whether `quantize_kv_cache` converted the graph."""
    import onnx

    model = onnx.load(graph, load_external_data=False)
    return any(value.name == IS_PREFILL for value in model.graph.input)


def _is_supported(node: onnx.NodeProto, tables: Mapping[str, Any], answers: Set[str]) -> bool:
    """Return whether both branches support all inputs and attributes of the node."""
    attributes = {attribute.name for attribute in node.attribute}
    if any(node.input[_KNOWN_INPUTS:]) or not attributes <= _KNOWN_ATTRIBUTES:
        return False
    if len(node.output) != 1 + len(KV_NAMES) or not answers >= set(node.output[1:]):
        return False
    return not read_int_attribute(node, "do_rotary") or node.input[_COSINES] in tables


def _create_scales(
    nodes: Sequence[onnx.NodeProto],
    ropes: Sequence[_AppliedRope | None],
    tables: Mapping[str, onnx.TensorProto],
) -> Mapping[str, ChannelScales]:
    """Create empty scales for the cache outputs of all nodes, by name."""
    scales: dict[str, ChannelScales] = {}
    for node, rope in zip(nodes, ropes, strict=True):
        _, keys, values = node.output
        if rope is None:
            scales[keys] = ChannelScales()
        else:
            pairs = tables[rope.cosines].dims[-1]
            scales[keys] = ChannelScales(pairs, interleaved=rope.interleaved)
        scales[values] = ChannelScales()
    return scales


class _AppliedRope(NamedTuple):
    """RoPE of the keys of one layer."""

    cosines: str  # name of the table
    interleaved: bool
    is_hidden: bool = False  # whether a norm follows, so that cached pairs change their size


def _find_rope(
    node: onnx.NodeProto, producers: Mapping[str, onnx.NodeProto]
) -> _AppliedRope | None:
    """Return the RoPE that an attention node applies, or a node before it. None without RoPE."""
    if read_int_attribute(node, "do_rotary"):
        is_interleaved = bool(read_int_attribute(node, "rotary_interleaved"))
        return _AppliedRope(node.input[_COSINES], is_interleaved)
    producer = producers.get(node.input[_KEY])
    is_hidden = False
    while producer is not None and producer.op_type in _BETWEEN_ROPE_AND_ATTENTION:
        producer, is_hidden = producers.get(producer.input[0]), True
    if producer is None or producer.op_type != "RotaryEmbedding":
        return None
    is_interleaved = bool(read_int_attribute(producer, "interleaved"))
    return _AppliedRope(producer.input[_ROPE_COSINES], is_interleaved, is_hidden)


def _count_rotated_pairs(node: onnx.NodeProto, tables: Mapping[str, onnx.TensorProto]) -> int:
    """Return the pairs of channels to which the attention node itself applies RoPE."""
    return tables[node.input[_COSINES]].dims[-1] if read_int_attribute(node, "do_rotary") else 0


class _Int8KvCacheWriter:
    """Rewriter of one graph to an int8 KV cache."""

    def __init__(self, model: onnx.ModelProto, tables: dict[str, onnx.TensorProto]) -> None:
        self._model = model
        self._graph = model.graph
        self._tables = tables
        self._lengths = ""  # input with the slot lengths, shared by all attention nodes
        self._nodes: list[onnx.NodeProto] = []  # nodes of the current branch

    def replace(self, node: onnx.NodeProto, name: str, scales: Sequence[FloatArray]) -> None:
        """Replace an attention node by an If with a decode and a prefill branch.

        `name` prefixes the new tensors. `scales` has the scales of the keys and those of the
        values, [heads, size] each.
        """
        import onnx

        self._lengths = node.input[_LENGTHS]
        for part, table in zip(KV_NAMES, scales, strict=True):
            self._constant(f"{name}/{part}_scales", table[None, :, None, :])
            self._constant(f"{name}/{part}_steps", table)
        branches = {
            "then_branch": self._build_prefill_branch(node, name),
            "else_branch": _build_decode_branch(node, name),
        }
        chosen = onnx.helper.make_node("If", [IS_PREFILL], node.output, name, **branches)
        index = list(self._graph.node).index(node)
        self._graph.node.remove(node)
        self._graph.node.insert(index, chosen)

    def finish(self) -> None:
        """Add constants, token counts and the input `is_prefill`; set the cache types to int8."""
        import onnx

        types = onnx.TensorProto
        for value in (*self._graph.input, *self._graph.output):
            if value.name.startswith(("past_key_values.", "present.")):
                value.type.tensor_type.elem_type = types.INT8
        self._graph.input.append(onnx.helper.make_tensor_value_info(IS_PREFILL, types.BOOL, []))
        for name, values in {
            _FIRST: np.array([0]),
            _TOKENS_AXIS: np.array([2]),
            _LOWEST: np.array(-MAX_INT8, np.float32),
            _HIGHEST: np.array(MAX_INT8, np.float32),
            _ONE: np.array([1], np.int32),
        }.items():
            self._constant(name, values)
        make = onnx.helper.make_node
        counting = [
            make("Shape", ["input_ids"], ["kv_cache_new"], "kv_cache_new", start=1, end=2),
            make("Gather", [self._lengths, _FIRST], ["kv_cache_last"], "kv_cache_last"),
            make("Add", ["kv_cache_last", _ONE], ["kv_cache_each"], "kv_cache_each"),
            make("Squeeze", ["kv_cache_each", _FIRST], [_TOTAL_TOKENS], _TOTAL_TOKENS),
            make("Cast", ["kv_cache_each"], ["kv_cache_end"], "kv_cache_end", to=types.INT64),
            make("Sub", ["kv_cache_end", "kv_cache_new"], [_CACHED_TOKENS], _CACHED_TOKENS),
        ]
        made = [set(node.output) for node in self._graph.node]
        behind = next((i + 1 for i, names in enumerate(made) if self._lengths in names), 0)
        for node in reversed(counting):
            self._graph.node.insert(behind, node)
        # Recorded cache types are stale; ONNX Runtime infers all types.
        del self._graph.value_info[:]
        self._model.ir_version = max(self._model.ir_version, _IR_VERSION)
        for opset in self._model.opset_import:
            if not opset.domain:
                opset.version = max(opset.version, _OPSET)

    def _build_prefill_branch(self, node: onnx.NodeProto, name: str) -> onnx.GraphProto:
        """Build the prefill branch: float attention over the cache and T new tokens of one slot."""
        self._nodes = []
        heads, size = self._tables[f"{name}/key_steps"].dims
        pairs = _count_rotated_pairs(node, self._tables)
        queries, *new = self._split_inputs(node, name, size)
        if pairs:
            partial = 2 * pairs if 2 * pairs < size else 0
            queries = self._apply_rope(
                node, queries, read_int_attribute(node, "num_heads"), partial
            )
            new[0] = self._apply_rope(node, new[0], heads, partial)
        self._constant(f"{name}/by_heads", np.array([0, 0, heads, size]))
        self._constant(f"{name}/side_by_side", np.array([0, 0, heads * size]))
        sides = [
            self._write_kv(name, part, value, past)
            for part, value, past in zip(KV_NAMES, new, node.input[_PAST:_LENGTHS], strict=True)
        ]
        (keys, past_keys, updated_keys), (values, past_values, updated_values) = sides
        out = f"{name}/out"
        attended = self._op(
            ATTENTION,
            [queries, keys, values, past_keys, past_values, node.input[_LENGTHS], _TOTAL_TOKENS],
            [out, f"{name}/all_keys", f"{name}/all_values"],
            domain=ORT_DOMAIN,
        )
        attended.attribute.extend(_drop_attributes(node, "do_rotary", "rotary_interleaved"))
        return _subgraph(f"{name}/prefill", self._nodes, [out, updated_keys, updated_values])

    def _split_inputs(self, node: onnx.NodeProto, name: str, size: int) -> list[str]:
        """Return the names of query, key and value. Split them if the node reads them packed."""
        if node.input[_KEY]:
            return list(node.input[_QUERY : _KEY + 2])
        counts = [
            read_int_attribute(node, key) for key in ("num_heads", "kv_num_heads", "kv_num_heads")
        ]
        self._constant(f"{name}/sizes", np.array([count * size for count in counts]))
        parts = [f"{name}/{part}" for part in ("queries", *KV_NAMES)]
        self._op("Split", [node.input[_QUERY], f"{name}/sizes"], parts, axis=2)
        return parts

    def _apply_rope(self, node: onnx.NodeProto, value: str, heads: int, partial: int) -> str:
        """Apply RoPE to queries or keys, [1, T, heads x size].

        `partial` is the number of channels per head that RoPE rotates; 0 means all channels.
        """
        turned = f"{value}/turned"
        self._op(
            "RotaryEmbedding",
            [value, _CACHED_TOKENS, node.input[_COSINES], node.input[_SINES]],
            [turned],
            domain=ORT_DOMAIN,
            num_heads=heads,
            rotary_embedding_dim=partial,
            interleaved=read_int_attribute(node, "rotary_interleaved"),
        )
        return turned

    def _write_kv(self, name: str, part: str, value: str, past: str) -> tuple[str, str, str]:
        """Round new values, [1, T, heads x size], and write them to the cache.

        Returns the names of three graph values: the rounded new values in float, the dequantized
        cached values, [1, heads, cached tokens, size], and the updated cache.
        """
        import onnx

        def named(what: str) -> str:
            return f"{name}/{part}_{what}"

        steps, scales = named("steps"), named("scales")
        self._op("Reshape", [value, f"{name}/by_heads"], [named("heads")])
        self._op("Div", [named("heads"), steps], [named("shares")])
        self._op("Round", [named("shares")], [named("whole")])
        self._op("Clip", [named("whole"), _LOWEST, _HIGHEST], [named("near")])
        self._op("Mul", [named("near"), steps], [named("rounded")])
        self._op("Reshape", [named("rounded"), f"{name}/side_by_side"], [named("new")])
        self._op("Transpose", [named("near")], [named("by_head")], perm=[0, 2, 1, 3])
        self._op("Cast", [named("by_head")], [named("int8")], to=onnx.TensorProto.INT8)
        self._op(
            "TensorScatter", [past, named("int8"), _CACHED_TOKENS], [named("updated")], axis=-2
        )
        self._op("Slice", [past, _FIRST, _CACHED_TOKENS, _TOKENS_AXIS], [named("before_int8")])
        self._op("Cast", [named("before_int8")], [named("before")], to=onnx.TensorProto.FLOAT)
        self._op("Mul", [named("before"), scales], [named("past")])
        return named("new"), named("past"), named("updated")

    def _op(
        self, kind: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any
    ) -> onnx.NodeProto:
        import onnx

        made = onnx.helper.make_node(kind, inputs, outputs, outputs[0], **attributes)
        self._nodes.append(made)
        return made

    def _constant(self, name: str, values: NDArray[np.generic]) -> None:
        import onnx

        table = onnx.numpy_helper.from_array(np.ascontiguousarray(values), name)
        self._tables[name] = table
        self._graph.initializer.append(table)


def _build_decode_branch(node: onnx.NodeProto, name: str) -> onnx.GraphProto:
    """Build the decode branch: the original operator, which reads and writes an int8 cache."""
    import onnx

    outputs = [f"{name}/stepped", *(f"{name}/{part}_stepped" for part in KV_NAMES)]
    inputs = [*node.input, *[""] * (12 - len(node.input))]
    inputs += [f"{name}/{part}_scales" for part in KV_NAMES]
    step = onnx.helper.make_node(ATTENTION, inputs, outputs, outputs[0], domain=ORT_DOMAIN, **_MODE)
    step.attribute.extend(node.attribute)
    return _subgraph(f"{name}/stepping", [step], outputs)


def _subgraph(
    name: str, nodes: Sequence[onnx.NodeProto], outputs: Sequence[str]
) -> onnx.GraphProto:
    """Build a branch with three outputs: attention in float, key and value caches in int8."""
    import onnx

    types = (onnx.TensorProto.FLOAT, onnx.TensorProto.INT8, onnx.TensorProto.INT8)
    values = [
        onnx.helper.make_tensor_value_info(output, kind, None)
        for output, kind in zip(outputs, types, strict=True)
    ]
    return onnx.helper.make_graph(list(nodes), name, [], values)


def _drop_attributes(node: onnx.NodeProto, *names: str) -> list[onnx.AttributeProto]:
    return [attribute for attribute in node.attribute if attribute.name not in names]
