"""Variants of the tiny decoder graph: exporters' forms of attention, float or int8 KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from build_artifacts.decoders.calibration import CalibrationTexts
from build_artifacts.decoders.float_graph import ATTENTION
from build_artifacts.decoders.int8_kv_cache import quantize_kv_cache
from deployments.config import EncoderSettings
from deployments.engines.decoder import DecoderSpec
from deployments.engines.onnx.decoder import OnnxDecoder
from tests.support.decoder_artifacts import ATTENTION_HEADS, HEAD_DIM, KV_HEADS
from tests.support.decoder_graphs import CONTEXT, VOCABULARY, spec_of, tiny_graph

GraphChange = Callable[[onnx.GraphProto], None]

_DRAW = np.random.default_rng(17)
# Texts in token ids. SHOWN determines the int8 scales. It needs many texts to cover the range of
# random embeddings, because values beyond the scales are clipped. OTHERS are inputs of the tests.
SHOWN = tuple(tuple(each) for each in _DRAW.integers(0, VOCABULARY, (24, 40)).tolist())
OTHERS = tuple(tuple(each) for each in _DRAW.integers(0, VOCABULARY, (3, 40)).tolist())


def attentions(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    return [node for node in graph.node if node.op_type == ATTENTION]


def packed(graph: onnx.GraphProto) -> None:
    """Keep the exported form: packed query, key and value; RoPE pairs the halves of a head."""


def unpacked(graph: onnx.GraphProto) -> None:
    """Use separate linear layers for query, key and value."""
    tables = {table.name: table for table in graph.initializer}
    for node in attentions(graph):
        (product,) = (each for each in graph.node if node.input[0] in each.output)
        weights = numpy_helper.to_array(tables[product.input[1]])
        ends = np.cumsum([ATTENTION_HEADS, KV_HEADS, KV_HEADS])[:-1] * HEAD_DIM
        names = [f"{product.output[0]}_{part}" for part in ("queries", "keys", "values")]
        for part, (name, own) in enumerate(zip(names, np.split(weights, ends, 1), strict=True)):
            graph.initializer.append(
                numpy_helper.from_array(np.ascontiguousarray(own), f"{name}_weights")
            )
            made = helper.make_node("MatMul", [product.input[0], f"{name}_weights"], [name])
            graph.node.insert(list(graph.node).index(product), made)
            node.input[part] = name
        graph.initializer.remove(tables[product.input[1]])
        graph.node.remove(product)


def half_rotated(graph: onnx.GraphProto) -> None:
    """Use half as many heads of twice the size, with RoPE on the first half of each head."""
    for node in attentions(graph):
        for attribute in node.attribute:
            if attribute.name in ("num_heads", "kv_num_heads"):
                attribute.i //= 2
    for value in (*graph.input, *graph.output):
        if value.name.startswith(("past_key_values.", "present.")):
            _, heads, _, size = value.type.tensor_type.shape.dim
            heads.dim_value, size.dim_value = heads.dim_value // 2, size.dim_value * 2


def interleaved(graph: onnx.GraphProto) -> None:
    """Let RoPE pair neighboring channels instead of the halves of a head."""
    for node in attentions(graph):
        node.attribute.append(helper.make_attribute("rotary_interleaved", 1))


def half_rotated_neighbors(graph: onnx.GraphProto) -> None:
    half_rotated(graph)
    interleaved(graph)


def unrotated(graph: onnx.GraphProto) -> None:
    """Remove RoPE, as in GPT-2."""
    for node in attentions(graph):
        del node.input[7:]
        attributes = [each for each in node.attribute if each.name != "do_rotary"]
        del node.attribute[:]
        node.attribute.extend(attributes)
    for table in list(graph.initializer):
        if table.name in ("cos_cache", "sin_cache"):
            graph.initializer.remove(table)


def windowed(graph: onnx.GraphProto) -> None:
    """Use sliding-window attention with a soft cap and a custom scale of the scores."""
    numbers = {"local_window_size": 16, "softcap": 4.0, "scale": 0.2}
    for node in attentions(graph):
        node.attribute.extend(helper.make_attribute(*each) for each in numbers.items())


def biased(graph: onnx.GraphProto) -> None:
    """Add a score bias in the last layer, for texts of eight tokens."""
    bias = np.zeros((1, 1, 8, CONTEXT), np.float32)
    graph.initializer.append(numpy_helper.from_array(bias, "bias"))
    attentions(graph)[-1].input.extend(["", "bias"])


def sinking(graph: onnx.GraphProto) -> None:
    """Add an attention sink in the last layer."""
    sinks = np.linspace(0.5, 2, ATTENTION_HEADS, dtype=np.float32)
    graph.initializer.append(numpy_helper.from_array(sinks, "sinks"))
    attentions(graph)[-1].input.extend(["", "", "sinks"])


KINDS: Mapping[str, GraphChange] = {
    change.__name__: change
    for change in (
        packed,
        unpacked,
        half_rotated,
        interleaved,
        half_rotated_neighbors,
        unrotated,
        windowed,
    )
}
# Variants for which an int8 KV cache is not supported.
UNKNOWN: Mapping[str, GraphChange] = {change.__name__: change for change in (biased, sinking)}


def float_graph(path: Path, change: GraphChange = packed) -> Path:
    """Write the tiny float graph with `change`. Name attention nodes as exporters do."""
    model = onnx.load(tiny_graph(path))
    for layer, node in enumerate(attentions(model.graph)):
        node.name = f"/layers.{layer}/attention"
    change(model.graph)
    onnx.save(model, path)
    return path


def spec_for(graph: Path) -> DecoderSpec:
    """Build the spec of any variant. Read heads, head size and type from the KV cache inputs."""
    spec, inputs = spec_of(graph), onnx.load(graph).graph.input
    (past,) = (value for value in inputs if value.name == "past_key_values.0.key")
    heads, size = (past.type.tensor_type.shape.dim[axis].dim_value for axis in (1, 3))
    is_int8 = past.type.tensor_type.elem_type == onnx.TensorProto.INT8
    generation_config = spec.generation_config.model_copy(
        update={"kv_heads": heads, "head_dim": size}
    )
    return replace(
        spec, generation_config=generation_config, kv_cache_dtype="int8" if is_int8 else None
    )


def opened(graph: Path, rows: int = 4) -> OnnxDecoder:
    return OnnxDecoder(spec_for(graph), EncoderSettings(), slots=rows, context=CONTEXT)


def calibration_for(graph: Path) -> CalibrationTexts:
    return CalibrationTexts(SHOWN, spec_for(graph).generation_config)


def int8_graph(path: Path, change: GraphChange = packed) -> Path:
    """Write the graph of `float_graph` with an int8 KV cache."""
    float_graph(path, change)
    quantize_kv_cache(path, calibration_for(path))
    return path
