"""A build of a tiny model after its prepare step. Many tests share its graphs."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import psutil
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from build_artifacts.accuracy_gate import AccuracyGate
from build_artifacts.checkpoints.checkpoint import Checkpoint
from build_artifacts.checkpoints.tasks import select_tasks
from build_artifacts.encoders.candidates import CandidateGraphs, build_graph_spec
from build_artifacts.encoders.preparation import PreparedModel, prepare
from build_artifacts.families import read_metadata
from build_artifacts.families.base import BuildBudget, BuildContext
from build_artifacts.families.encoder import EncoderBuild
from build_artifacts.presets import CPU_INT8, CPU_INT8_WEIGHTS
from build_artifacts.progress import BuildProgress
from build_artifacts.recipes import CPU_FP32, BuildRecipe, CandidateRecipe
from build_artifacts.workspaces.step_runner import StepRunner
from build_artifacts.workspaces.workspace import Workspace
from deployments.artifacts.manifest import Gate, ModelSource
from deployments.config import EncoderSettings
from deployments.engines import GraphSpec, open_engine
from deployments.messages import TokenizedItem
from deployments.tuning.parity import ProbeOutputs, run_probes

# Two candidates from one export, and minimal tuning, so that a build takes a few seconds.
SMALL = BuildRecipe(candidates=(CPU_INT8, CPU_INT8_WEIGHTS))
LITTLE = BuildBudget(tune_seconds=0.2)
# Gate that accepts all finite outputs.
ANYTHING = Gate(
    cosine_mean=-2,
    cosine_worst=-2,
    batched_cosine_worst=-2,
    top1_agreement=-1,
    batched_top1_agreement=-1,
    logit_correlation=-2,
    metric_drop=1e9,
)

# Candidate that is the torch export without rewrites.
FLOAT = replace(CPU_FP32, name="float", rewrites=None)


class RecordingRunner:
    """A StepRunner with a separate workspace and recorded output."""

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True)
        self.output = io.StringIO()
        self.steps = StepRunner(Workspace(root), BuildProgress(self.output))

    def lines(self, step: str) -> list[str]:
        """Return the output lines of a step without the columns before the message."""
        lines = [line.split(maxsplit=3) for line in self.output.getvalue().splitlines()]
        return [words[3] for words in lines if words[0] == step]


@dataclass(frozen=True)
class PreparedBuild:
    """A prepared model and its graphs."""

    prepared: PreparedModel
    graphs: CandidateGraphs
    runner: RecordingRunner

    @classmethod
    def of(cls, source: Path, root: Path) -> PreparedBuild:
        checkpoint = Checkpoint(source, ModelSource(ref="here", revision="1"), "tiny/model")
        metadata = read_metadata(checkpoint, select_tasks(checkpoint, None, None))
        runner = RecordingRunner(root)

        def work(into: Path) -> str:
            prepare(source, metadata, None, into)
            return ""

        directory = runner.steps.run_cached("reference", "reference", "", work)
        prepared = PreparedModel(source, metadata, directory, None)
        return cls(prepared, CandidateGraphs(runner.steps, prepared), runner)

    @property
    def items(self) -> tuple[TokenizedItem, ...]:
        return self.prepared.reference.items

    def answers(self, recipe: CandidateRecipe, graph: Path, batch_items: int = 8) -> ProbeOutputs:
        """Run the probes, whose lengths differ, on `graph` in padded batches of `batch_items`."""
        engine = open_engine(build_graph_spec(recipe, graph, self.prepared), EncoderSettings())
        try:
            return run_probes(engine, self.items, batch_items)
        finally:
            engine.close()

    def encoder_build(
        self,
        runner: RecordingRunner,
        recipe: BuildRecipe,
        *,
        graphs: CandidateGraphs | None = None,
        prepared: PreparedModel | None = None,
    ) -> EncoderBuild:
        """Return a build of this model. Its gate results go to the workspace of `runner`."""
        prepared = prepared or self.prepared
        context = BuildContext(
            steps=runner.steps,
            weights=prepared.weights,
            metadata=prepared.metadata,
            recipe=recipe,
            budget=BuildBudget(search_seconds=60.0, tune_seconds=0.2),
        )
        return EncoderBuild(context, prepared, graphs or self.graphs)

    def accuracy_gate(
        self,
        runner: RecordingRunner,
        gate: Gate,
        *,
        graphs: CandidateGraphs | None = None,
        prepared: PreparedModel | None = None,
    ) -> AccuracyGate[CandidateRecipe, GraphSpec]:
        recipe = BuildRecipe(candidates=(), gate=gate)
        build = self.encoder_build(runner, recipe, graphs=graphs, prepared=prepared)
        return AccuracyGate(runner.steps, build)


@dataclass
class FixedGraphs(CandidateGraphs):
    """Graphs that exist already, by candidate name. Records the requests."""

    given: Mapping[str, Path]
    requested: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)

    def graph(self, recipe: CandidateRecipe, excluded_nodes: Sequence[str] = ()) -> Path:
        self.requested.append((recipe.name, tuple(excluded_nodes)))
        return self.given[recipe.name]

    def sensitive_nodes(self, recipe: CandidateRecipe) -> list[str]:
        return ["first", "second", *map(str, range(3, 10))]


def set_available_memory(monkeypatch: pytest.MonkeyPatch, available_bytes: int) -> None:
    """Let the host report this many free bytes."""
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(available=available_bytes)
    )


def largest_difference(a: ProbeOutputs, b: ProbeOutputs) -> float:
    """Return the largest absolute difference of two outputs."""
    return max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True))


def op_counts(graph: Path) -> Counter[str]:
    """Count the nodes of each type, including those of subgraphs."""
    return Counter(node.op_type for node in _nodes(onnx.load(graph).graph))


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g)


def matrices(graph: Path) -> dict[str, NDArray[np.float32]]:
    """Return the constant matrix of each MatMul by node name."""
    model = onnx.load(graph)
    weights = {i.name: i for i in model.graph.initializer}
    return {
        node.name: numpy_helper.to_array(weights[node.input[1]])
        for node in model.graph.node
        if node.op_type == "MatMul" and node.input[1] in weights
    }


def plant_outlier(source: Path, *, layer: int, factor: float = 1000.0) -> Path:
    """Multiply the weights of feed-forward channel 5 of a BERT checkpoint by `factor`.

    Divide the weights of the next matrix that read this channel by `factor`, so that the outputs
    hardly change. The product of the next matrix loses accuracy if its inputs share one int8 scale.
    """
    from safetensors.torch import load_file, save_file

    path = source / "model.safetensors"
    tensors = load_file(path)
    prefix = f"encoder.layer.{layer}"
    tensors[f"{prefix}.intermediate.dense.weight"][5] *= factor
    tensors[f"{prefix}.output.dense.weight"][:, 5] /= factor
    save_file(tensors, path, metadata={"format": "pt"})
    return source


def corrupted(graph: Path, into: Path, value: float = float("inf")) -> Path:
    """Copy `graph` and fill the first row of its first matrix with `value`."""
    model = onnx.load(graph)
    weight = next(i for i in model.graph.initializer if i.name == _first_matrix(model))
    changed = numpy_helper.to_array(weight).copy()
    changed[0] = value
    weight.CopyFrom(numpy_helper.from_array(changed, weight.name))
    onnx.save(model, into)
    return into


def _first_matrix(model: onnx.ModelProto) -> str:
    constants = {i.name for i in model.graph.initializer}
    products = (node for node in model.graph.node if node.op_type == "MatMul")
    return str(next(node.input[1] for node in products if node.input[1] in constants))


def slowed(graph: Path, into: Path, size: int = 700) -> Path:
    """Copy `graph` and add a large matrix product that does not change the output."""
    model = onnx.load(graph)
    answer = model.graph.output[0]
    inner = f"{answer.name}_before"
    for node in model.graph.node:
        node.output[:] = [inner if name == answer.name else name for name in node.output]
        node.input[:] = [inner if name == answer.name else name for name in node.input]
    large = np.random.default_rng(0).standard_normal((size, size)).astype(np.float32)
    nothing = np.zeros(1, dtype=np.float32)
    model.graph.initializer.extend(
        [numpy_helper.from_array(large, "large"), numpy_helper.from_array(nothing, "nothing")]
    )
    # ONNX Runtime would precompute a constant product, so this product depends on the output.
    model.graph.node.extend(
        [
            helper.make_node("ReduceMean", [inner], ["mean"], keepdims=0),
            helper.make_node("Mul", ["large", "mean"], ["scaled"]),
            helper.make_node("MatMul", ["scaled", "large"], ["product"]),
            helper.make_node("ReduceMean", ["product"], ["one"], keepdims=0),
            helper.make_node("Mul", ["one", "nothing"], ["zero"]),
            helper.make_node("Add", [inner, "zero"], [answer.name]),
        ]
    )
    onnx.save(model, into)
    return into


def unreadable(into: Path, operator: str = "Telepathy") -> Path:
    """Write a graph with an unknown operator."""
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["B", "T"])
    out = helper.make_tensor_value_info("output", TensorProto.FLOAT, ["B", 32])
    node = helper.make_node(operator, ["input_ids"], ["output"], domain="org.example")
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("org.example", 1)]
    graph = helper.make_graph([node], "unreadable", [ids], [out])
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), into)
    return into
