from __future__ import annotations

import platform
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from deployments.artifacts.types import ModelHead
from deployments.batching.batch_policy import collate
from deployments.engines import missing_requirement, open_engine
from tests.integration.engines.conftest import KINDS, SETTINGS, Written, spec_of
from tests.support.engine_programs import write_model
from tests.support.fakes import build_item, item

pytest.importorskip("openvino", reason="`openvino` is not installed")

OPENVINO = KINDS["openvino"]


def test_import_sends_no_telemetry(written: Written, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from deployments.config import EncoderSettings\n"
        "from deployments.engines import open_engine\n"
        "from tests.integration.engines.conftest import KINDS, spec_of\n"
        "open_engine(spec_of(KINDS['openvino'], Path(sys.argv[1])), EncoderSettings())\n"
        "print(sorted(m for m in sys.modules if m.startswith('openvino_telemetry.')))\n"
    )
    environment = {"HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, written(OPENVINO, ModelHead.VECTOR)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
    assert list(tmp_path.iterdir()) == []


def test_fp32_is_not_computed_in_bf16(tmp_path: Path) -> None:
    path = tmp_path / "product.onnx"
    write_model(
        path,
        [
            helper.make_node("Cast", ["input_ids"], ["x"], to=1),
            helper.make_node("MatMul", ["x", "table"], ["output"]),
        ],
        {"table": np.full((8, 8), 1 + 2**-12, np.float32)},
        ("input_ids",),
    )
    exact = 8 * (1 + 2**-12)
    spec = spec_of(OPENVINO, path)
    with closing(open_engine(spec, SETTINGS)) as engine:
        (row,) = engine.run(collate([item(1, 8)])).items
        np.testing.assert_allclose(row, exact, rtol=1e-6)
    half = replace(spec, precision="bf16")
    if reason := missing_requirement(half, SETTINGS):
        pytest.skip(reason)
    with closing(open_engine(half, SETTINGS)) as engine:
        (row,) = engine.run(collate([item(1, 8)])).items
        assert row[0] == 8  # bf16 rounds each weight 1 + 2**-12 to 1


def test_attention_operator_and_static_int8_are_supported(tmp_path: Path) -> None:
    """Q, K and V are equal, with one number per token. The int8 weight of 1 is exact."""
    node = helper.make_node
    nodes = [
        node("Cast", ["input_ids"], ["ids"], to=1),
        node("Unsqueeze", ["ids", "last"], ["x"]),
        node("QuantizeLinear", ["x", "one", "zero"], ["q"]),
        node("DequantizeLinear", ["q", "one", "zero"], ["xq"]),
        node("DequantizeLinear", ["weights", "one", "zero"], ["w"]),
        node("MatMul", ["xq", "w"], ["y"]),
        node("Attention", ["y", "y", "y"], ["z"], q_num_heads=1, kv_num_heads=1),
        node("Reshape", ["z", "shape"], ["output"]),
    ]
    tables = {
        "last": np.array([-1]),
        "shape": np.array([0, -1]),
        "one": np.array(1, np.float32),
        "zero": np.array(0, np.int8),
        "weights": np.array([[1]], np.int8),
    }
    path = tmp_path / "attention.onnx"
    write_model(path, nodes, tables, ("input_ids",), opset=23)
    with closing(open_engine(spec_of(OPENVINO, path), SETTINGS)) as engine:
        (row,) = engine.run(collate([build_item([1, 2])])).items
    x = np.array([1.0, 2.0])
    weights = np.exp(np.outer(x, x))
    np.testing.assert_allclose(row, weights @ x / weights.sum(axis=1), rtol=1e-4)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads the flags of an x86 CPU")
def test_bf16_requires_cpu_support(written: Written) -> None:
    flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    spec = spec_of(OPENVINO, written(OPENVINO, ModelHead.VECTOR))
    assert missing_requirement(spec, SETTINGS) is None
    has_it = bool(flags & {"avx512_bf16", "amx_bf16"})
    assert (missing_requirement(replace(spec, precision="bf16"), SETTINGS) is None) == has_it
