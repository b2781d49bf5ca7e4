"""Graph rewrites: matched patterns, unchanged graphs and equal outputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from build_artifacts.presets import CPU_INT8_FUSED, CPU_INT8_PLAIN
from build_artifacts.recipes import CandidateRecipe, GraphRewrites
from build_artifacts.steps.rewrite import REWRITES, rewrite
from tests.support.prepared_build import FLOAT, PreparedBuild, largest_difference, op_counts
from tests.support.tiny_encoders import tiny_checkpoint

# For outputs of up to 3. The summation order changes their last digits.
TOLERANCE = 1e-5
LEAN = GraphRewrites(names=("drop-empty-rows", "packed-heads"))


@pytest.fixture(scope="module")
def distilbert(tmp_path_factory: pytest.TempPathFactory) -> PreparedBuild:
    root = tmp_path_factory.mktemp("distilbert")
    source = tiny_checkpoint(root / "model", model_type="distilbert", pooling="cls")
    return PreparedBuild.of(source, root / "work")


@pytest.mark.parametrize("model", ["prepared_build", "distilbert"])
def test_rewrites_remove_where_and_transposes_of_bert(
    model: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    build: PreparedBuild = request.getfixturevalue(model)
    exported = build.graphs.float_graph(FLOAT)
    halfway, lean = tmp_path / "halfway.onnx", tmp_path / "lean.onnx"
    before = op_counts(exported)
    assert (before["Attention"], before["Transpose"], before["Where"]) == (2, 8, 2)

    assert rewrite(exported, GraphRewrites(names=("drop-empty-rows",)), halfway) == 2
    assert op_counts(halfway)["Transpose"] == 8
    assert "Where" not in op_counts(halfway)
    assert rewrite(halfway, GraphRewrites(names=("packed-heads",)), lean) == 2
    assert op_counts(lean)["Attention"] == 2
    assert not {"Transpose", "Where", "Reshape"} & op_counts(lean).keys()

    due = build.answers(FLOAT, exported)
    assert max(float(np.abs(answer).max()) for answer in due) > 1
    for graph in (halfway, lean):
        assert largest_difference(build.answers(FLOAT, graph), due) < TOLERANCE
        assert largest_difference(build.answers(FLOAT, graph, batch_items=1), due) < TOLERANCE


@pytest.mark.parametrize("model", ["prepared_build", "distilbert"])
def test_padding_mask_is_reshaped_instead_of_gathered(
    model: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    build: PreparedBuild = request.getfixturevalue(model)
    exported, direct = build.graphs.float_graph(FLOAT), tmp_path / "direct.onnx"
    assert rewrite(exported, GraphRewrites(names=("direct-mask",)), direct) == 1
    before, after = op_counts(exported), op_counts(direct)
    assert (before["GatherND"], after["GatherND"]) == (1, 0)
    assert before.total() - after.total() > 10
    assert largest_difference(build.answers(FLOAT, direct), build.answers(FLOAT, exported)) == 0


def test_pack_heads_requires_dropped_where(prepared_build: PreparedBuild, tmp_path: Path) -> None:
    exported = prepared_build.graphs.float_graph(FLOAT)
    assert rewrite(exported, GraphRewrites(names=("packed-heads",)), tmp_path / "graph.onnx") == 0
    reversed_order = GraphRewrites(names=("packed-heads", "drop-empty-rows"))
    assert rewrite(exported, reversed_order, tmp_path / "graph.onnx") == 2


def test_unpadded_batch_uses_unmasked_attention(
    prepared_build: PreparedBuild, tmp_path: Path
) -> None:
    exported = prepared_build.graphs.float_graph(FLOAT)
    either = tmp_path / "either.onnx"
    assert rewrite(exported, GraphRewrites(names=(*LEAN.names, "flash-when-full")), either) == 6
    counts = op_counts(either)
    assert (counts["If"], counts["MultiHeadAttention"], counts["Attention"]) == (2, 2, 2)
    due = prepared_build.answers(FLOAT, exported)
    # A batch of one has no padding. A batch of eight different lengths has padding.
    assert largest_difference(prepared_build.answers(FLOAT, either, batch_items=1), due) < TOLERANCE
    assert largest_difference(prepared_build.answers(FLOAT, either), due) < TOLERANCE


@pytest.mark.parametrize("recipe", [CPU_INT8_PLAIN, CPU_INT8_FUSED], ids=lambda r: str(r.name))
def test_graph_without_attention_is_unchanged(
    prepared_build: PreparedBuild, tmp_path: Path, recipe: CandidateRecipe
) -> None:
    exported = prepared_build.graphs.float_graph(recipe)
    any_export = {"matmul-pooling", "direct-mask"}
    others = GraphRewrites(names=tuple(name for name in REWRITES if name not in any_export))
    assert rewrite(exported, others, tmp_path / "graph.onnx") == 0
    assert op_counts(tmp_path / "graph.onnx") == op_counts(exported)
    due, given = (prepared_build.answers(FLOAT, g) for g in (exported, tmp_path / "graph.onnx"))
    assert largest_difference(given, due) == 0


def attention(
    path: Path,
    *,
    split: Sequence[int] = (0, 2, 1, 3),
    empty_rows: float | None = None,
    readers: int = 1,
) -> Path:
    """Write self-attention over x [B, T, 8] with 2 heads, as the exporter writes it.

    `split` is the permutation of the preceding Transpose. `empty_rows` replaces outputs where the
    input `off` [B, 1, T, 1] is true. `readers` is the number of consumers of the output.
    """
    node = helper.make_node
    nodes = [
        node("Reshape", ["x", "apart"], ["heads"]),
        node("Transpose", ["heads"], ["q"], perm=list(split)),
        node("Attention", ["q", "q", "q"], ["attended"]),
    ]
    last = "attended"
    if empty_rows is not None:
        nodes.append(node("Where", ["off", "empty", last], ["kept"]))
        last = "kept"
    nodes += [
        node("Transpose", [last], ["turned"], perm=[0, 2, 1, 3]),
        node("Reshape", ["turned", "together"], ["joined"]),
        node("Identity", ["joined"], ["y"]),
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["B", "T", 8])]
    if readers == 2:
        nodes.append(node("Identity", [last], ["z"]))
        outputs.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    constants = {
        "apart": np.array([0, 0, 2, 4]),
        "together": np.array([0, 0, 8]),
        "empty": np.array(empty_rows or 0.0, dtype=np.float32),
    }
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", "T", 8]),
        helper.make_tensor_value_info("off", TensorProto.BOOL, ["B", 1, "T", 1]),
    ]
    tables = [numpy_helper.from_array(table, name) for name, table in constants.items()]
    # The exporter also records the shape of this intermediate value.
    heads = [helper.make_tensor_value_info("heads", TensorProto.FLOAT, ["B", "T", 2, 4])]
    graph = helper.make_graph(nodes, "attention", inputs, outputs, tables, value_info=heads)
    opset = [helper.make_opsetid("", 23)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), path)
    return path


def changed(graph: Path) -> dict[str, int]:
    """Return the number of changes per rewrite, without rewrites that change nothing."""
    into = graph.with_name("changed.onnx")
    counts = {name: rewrite(graph, GraphRewrites(names=(name,)), into) for name in REWRITES}
    return {name: count for name, count in counts.items() if count}


def test_where_with_zeros_is_removed(tmp_path: Path) -> None:
    graph = attention(tmp_path / "graph.onnx", empty_rows=0.0)
    assert changed(graph) == {"drop-empty-rows": 1}
    assert rewrite(graph, LEAN, tmp_path / "lean.onnx") == 2
    assert op_counts(tmp_path / "lean.onnx")["Attention"] == 1
    assert not {"Where", "Transpose", "Reshape"} & op_counts(tmp_path / "lean.onnx").keys()


def test_where_with_other_values_remains(tmp_path: Path) -> None:
    assert changed(attention(tmp_path / "graph.onnx", empty_rows=-1.0)) == {}


def test_other_transposes_remain(tmp_path: Path) -> None:
    assert changed(attention(tmp_path / "graph.onnx", split=(0, 2, 3, 1))) == {}


def test_heads_with_other_consumers_remain(tmp_path: Path) -> None:
    assert changed(attention(tmp_path / "one.onnx")) == {"packed-heads": 1}
    assert changed(attention(tmp_path / "two.onnx", readers=2)) == {}


def test_pack_heads_sets_head_counts(tmp_path: Path) -> None:
    import onnxruntime as ort

    graph, lean = attention(tmp_path / "graph.onnx"), tmp_path / "lean.onnx"
    assert rewrite(graph, LEAN, lean) == 1
    operator = next(n for n in onnx.load(lean).graph.node if n.op_type == "Attention")
    heads = {a.name: a.i for a in operator.attribute}
    assert heads == {"q_num_heads": 2, "kv_num_heads": 2}
    rng = np.random.default_rng(0)
    feeds = {
        "x": rng.standard_normal((3, 5, 8)).astype(np.float32),
        "off": np.zeros((3, 1, 5, 1), dtype=np.bool_),
    }
    answers = []
    for path in (graph, lean):
        session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        known = {i.name for i in session.get_inputs()}
        answers.append(session.run(["y"], {k: v for k, v in feeds.items() if k in known})[0])
    assert np.abs(answers[0] - answers[1]).max() < TOLERANCE
