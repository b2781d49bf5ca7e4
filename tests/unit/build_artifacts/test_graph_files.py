from __future__ import annotations

import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from onnxruntime.capi.onnxruntime_pybind11_state import Fail

from build_artifacts.errors import UnsupportedModel
from build_artifacts.graph_files import session_errors


def open_session(operator: str, values: int = 1) -> ort.InferenceSession:
    shape = helper.make_tensor("shape", TensorProto.INT64, [1], [values])
    graph = helper.make_graph(
        [helper.make_node(operator, ["shape"], ["output"])],
        "one node",
        [],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, None)],
        [shape],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(onnx.ModelProto.SerializeToString(model), options)


def test_graph_that_onnx_runtime_cannot_open_is_unsupported() -> None:
    message = "ONNX Runtime does not run the exported graph"
    with pytest.raises(UnsupportedModel, match=message), session_errors():
        open_session("NoSuchOperator")


def test_lack_of_memory_is_no_error_of_the_model() -> None:
    session = open_session("ConstantOfShape", values=2**50)
    with pytest.raises(Fail, match="Failed to allocate memory"), session_errors():
        session.run(None, {})


def test_other_errors_stay_bugs() -> None:
    with pytest.raises(KeyError), session_errors():
        {}["missing"]
