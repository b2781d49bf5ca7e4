"""Decoder graphs written without the model builder, and changes to them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from build_artifacts.decoders.gate_inputs import GateInputs
from build_artifacts.decoders.reference import DecoderReference
from deployments.artifacts.generation_config import GenerationConfig
from deployments.artifacts.manifest import EngineOptions
from deployments.artifacts.types import Device
from deployments.config import EncoderSettings
from deployments.engines.decoder import DecoderSpec
from deployments.engines.onnx.decoder import OnnxDecoder
from tests.support.decoder_artifacts import HEAD_DIM, KV_HEADS, LAYERS, export_model

VOCABULARY, CONTEXT = 96, 64
ENDS = (VOCABULARY - 1,)


def tiny_graph(
    path: Path, saying: Sequence[int] = (), dtype: type[np.floating] = np.float32
) -> Path:
    export_model(path, VOCABULARY, CONTEXT, saying, dtype)
    return path


def without_slicing(graph: Path, into: Path) -> Path:
    """Copy a tiny graph without the slicing of logits, which the model builder does not write."""
    model = onnx.load(graph)
    (cut,) = (node for node in model.graph.node if node.op_type == "Slice")
    (head,) = (node for node in model.graph.node if cut.output[0] in node.input)
    head.input[0] = cut.input[0]
    head.name = "head"
    model.graph.node.remove(cut)
    for value in list(model.graph.input):
        if value.name == "logits_from":
            model.graph.input.remove(value)
    onnx.save(model, into)
    return into


def add_noise(graph: Path, into: Path, *, table: str, noise: float) -> Path:
    """Copy a tiny graph and add random noise to one of its matrices."""
    model = onnx.load(graph)
    (weights,) = (t for t in model.graph.initializer if t.name == table)
    values = numpy_helper.to_array(weights)
    drawn = np.random.default_rng(3).normal(scale=noise, size=values.shape)
    changed = (values + drawn).astype(np.float32)
    weights.CopyFrom(numpy_helper.from_array(changed, table))
    onnx.save(model, into)
    return into


def spec_of(graph: Path) -> DecoderSpec:
    return DecoderSpec(
        path=graph,
        device=Device.CPU,
        precision="fp32",
        options=EngineOptions(),
        generation_config=GenerationConfig(
            layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, eos_token_ids=ENDS
        ),
        vocabulary=VOCABULARY,
        max_tokens=CONTEXT,
    )


def open_graph(graph: Path) -> OnnxDecoder:
    return OnnxDecoder(spec_of(graph), EncoderSettings(), slots=8, context=CONTEXT)


def build_reference(graph: Path) -> DecoderReference:
    """Build a reference with the outputs of `graph` on ten passages and three prompts."""
    draw = np.random.default_rng(5)

    def texts(count: int, shortest: int, longest: int) -> tuple[tuple[int, ...], ...]:
        lengths = draw.integers(shortest, longest, count)
        return tuple(tuple(draw.integers(0, VOCABULARY - 1, n).tolist()) for n in lengths)

    gate_inputs = GateInputs(passages=texts(10, 3, 40), prompts=texts(3, 2, 9))
    answers = texts(3, 4, 8)
    read = (
        *gate_inputs.passages,
        *(p + a for p, a in zip(gate_inputs.prompts, answers, strict=True)),
    )
    engine = open_graph(graph)
    logits = np.concatenate([engine.prefill(0, ids, 0, all_logits=True).copy() for ids in read])
    engine.close()
    return DecoderReference(gate_inputs, answers, logits)
