"""Logits slicing: a graph returns only the logits from a given token on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from build_artifacts.decoders.logits_slicing import slice_logits
from build_artifacts.errors import UnsupportedModel
from tests.support.decoder_artifacts import HEAD_DIM, KV_HEADS, LAYERS
from tests.support.decoder_graphs import CONTEXT, tiny_graph, without_slicing

IDS = np.array([[5, 9, 2, 40, 7, 7, 31]])


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return without_slicing(tiny_graph(tmp_path / "tiny.onnx"), tmp_path / "plain.onnx")


def logits_of(graph: Path, **further: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(graph, providers=["CPUExecutionProvider"])
    mask = np.zeros((1, CONTEXT), np.int64)
    mask[0, : IDS.shape[1]] = 1
    memory = np.zeros((1, KV_HEADS, CONTEXT, HEAD_DIM), np.float32)
    past = {
        f"past_key_values.{layer}.{part}": memory
        for layer in range(LAYERS)
        for part in ("key", "value")
    }
    feeds = {"input_ids": IDS, "attention_mask": mask, **past, **further}
    return np.asarray(session.run(["logits"], feeds)[0])


def test_slice_from_zero_is_bit_identical(plain: Path) -> None:
    expected = logits_of(plain)
    slice_logits(plain, "Tiny")
    whole = logits_of(plain, logits_from=np.array([0]))
    assert whole.tobytes() == expected.tobytes()


@pytest.mark.parametrize("first", [1, 4, 6])
def test_slice_returns_trailing_logits(plain: Path, first: int) -> None:
    expected = logits_of(plain)
    slice_logits(plain, "Tiny")
    sliced = logits_of(plain, logits_from=np.array([first]))
    assert sliced.shape == (1, 7 - first, expected.shape[2])
    np.testing.assert_allclose(sliced, expected[:, first:], atol=1e-5)


def test_logits_of_lower_precision_are_cast_once(plain: Path) -> None:
    model = onnx.load(plain)
    model.graph.node[-1].output[0] = "wide"
    model.graph.node.append(
        helper.make_node("Cast", ["wide"], ["logits"], "narrow", to=TensorProto.FLOAT16)
    )
    (logits,) = (value for value in model.graph.output if value.name == "logits")
    logits.type.tensor_type.elem_type = TensorProto.FLOAT16
    onnx.save(model, plain)
    expected = logits_of(plain)
    slice_logits(plain, "Tiny")
    cast = logits_of(plain, logits_from=np.array([0]))
    assert (expected.dtype, cast.dtype) == (np.float16, np.float32)
    np.testing.assert_array_equal(cast, expected)


def test_slice_precedes_scaled_head(plain: Path) -> None:
    model = onnx.load(plain)
    head = model.graph.node[-1]
    head.output[0] = "raw"
    model.graph.initializer.append(helper.make_tensor("cap", TensorProto.FLOAT, [], [30.0]))
    model.graph.node.extend(
        [
            helper.make_node("Div", ["raw", "cap"], ["small"], "small"),
            helper.make_node("Tanh", ["small"], ["capped"], "capped"),
            helper.make_node("Mul", ["capped", "cap"], ["logits"], "logits"),
        ]
    )
    onnx.save(model, plain)
    expected = logits_of(plain)
    slice_logits(plain, "Tiny")
    (cut,) = (n for n in onnx.load(plain).graph.node if n.op_type == "Slice")
    assert cut.input[0] == "normed"
    assert logits_of(plain, logits_from=np.array([0])).tobytes() == expected.tobytes()


def test_graph_with_unknown_state_is_rejected(plain: Path) -> None:
    model = onnx.load(plain)
    state = helper.make_tensor_value_info("past.0.conv", TensorProto.FLOAT, ["B", 3])
    model.graph.input.append(state)
    onnx.save(model, plain)
    with pytest.raises(UnsupportedModel, match=r"`Tiny` requires the input `past.0.conv`"):
        slice_logits(plain, "Tiny")


def test_graph_without_group_query_attention_is_rejected(plain: Path) -> None:
    model = onnx.load(plain)
    next(
        n for n in model.graph.node if n.op_type == "GroupQueryAttention"
    ).op_type = "MultiHeadAttention"
    onnx.save(model, plain)
    with pytest.raises(UnsupportedModel, match="MultiHeadAttention"):
        slice_logits(plain, "Tiny")
