"""Tiny artifacts with several candidates and reference outputs."""

from __future__ import annotations

import fcntl
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from deployments.artifacts.manifest import (
    REFERENCE_NAME,
    ArtifactManifest,
    Candidate,
    EngineOptions,
)
from deployments.artifacts.types import Device
from deployments.config import EncoderSettings
from deployments.engines import open_engine
from deployments.tuning.costs import CostTable, TuningTarget, write_costs
from deployments.tuning.host import read_engine_versions
from deployments.tuning.parity import ReferenceOutputs, run_probes
from tests.support.artifacts import (
    EMBEDDER,
    GRAPH_NAME,
    MAX_TOKENS,
    NO_FILES_YET,
    WIDTH,
    seal,
    seal_tiny,
    write_graph,
)
from tests.support.cost_tables import row, shape, variant
from tests.support.fakes import build_item

STALE = {"engines": {"onnxruntime": "onnxruntime 1.2.3"}}  # fields that make a cost table stale
WRONG_GRAPH_NAME = "graphs/wrong.onnx"
SLOW_GRAPH_NAME = "graphs/slow.onnx"
MISSING_PROVIDER = EngineOptions(providers=("AbacusExecutionProvider",))
UNUSED_SIZE = 300  # side of the square matrix that only slows the slow graph down


def seal_tunable(
    store: Path,
    model_id: str = EMBEDDER,
    *,
    names: Collection[str] = ("plain", "twin"),
    wrong: Collection[str] = (),
    absent: Collection[str] = (),
    settings: EncoderSettings | None = None,
) -> TuningTarget:
    """Write an artifact with one CPU candidate per name, all with the same fp32 graph.

    Candidates in `wrong` have a graph with other vectors. Candidates in `absent` require an
    execution provider that does not exist. A candidate named `slow` takes a hundred times as long.
    A candidate whose name starts with `int8` has this precision.
    """
    directory = seal_tiny(store, model_id, devices=(Device.CPU,))
    manifest = ArtifactManifest.read(directory)
    (sealed,) = manifest.candidates

    def candidate(name: str) -> Candidate:
        graph = WRONG_GRAPH_NAME if name in wrong else GRAPH_NAME
        changes = {
            "name": name,
            "graph": SLOW_GRAPH_NAME if name == "slow" else graph,
            "options": MISSING_PROVIDER if name in absent else EngineOptions(),
            "precision": "int8" if name.startswith("int8") else "fp32",
        }
        return sealed.model_copy(update=changes)

    target = TuningTarget(
        directory, manifest, Device.CPU, settings or EncoderSettings(tune_seconds=0.2)
    )
    _reference(target).write(directory / REFERENCE_NAME)
    vectors = np.random.default_rng(1).standard_normal((500, WIDTH), dtype=np.float32)
    write_graph(directory / WRONG_GRAPH_NAME, vectors)
    _slow_down(directory / GRAPH_NAME, directory / SLOW_GRAPH_NAME)
    files = (*manifest.files, REFERENCE_NAME, WRONG_GRAPH_NAME, SLOW_GRAPH_NAME)
    changed = {
        "candidates": tuple(map(candidate, names)),
        "files": dict.fromkeys(files, NO_FILES_YET),
    }
    seal(directory, manifest.model_copy(update=changed))
    return TuningTarget(directory, ArtifactManifest.read(directory), Device.CPU, target.settings)


def _reference(target: TuningTarget) -> ReferenceOutputs:
    """Run the first graph on seeded items of all lengths."""
    rng = np.random.default_rng(3)
    items = tuple(build_item(rng.integers(5, 100, n)) for n in range(1, MAX_TOKENS + 1))
    engine = open_engine(target.spec(target.candidates[0]), target.settings)
    return ReferenceOutputs(items, tuple(np.array(a) for a in run_probes(engine, items, 1)))


def _slow_down(graph: Path, into: Path) -> None:
    """Copy the graph and add three matrix products that do not change its output."""
    node = helper.make_node
    model = onnx.load(graph)
    last_node = next(n for n in model.graph.node if "output" in n.output)
    last_node.output[0] = "right"
    tables = {
        "grid": np.ones((UNUSED_SIZE, UNUSED_SIZE), np.float32),
        "nothing": np.zeros(1, np.float32),
    }
    model.graph.initializer.extend(numpy_helper.from_array(t, name) for name, t in tables.items())
    model.graph.node.extend(
        [
            node("Cast", ["attention_mask"], ["seen0"], to=TensorProto.FLOAT),
            node("ReduceSum", ["seen0"], ["seen1"], keepdims=0),
            node("Mul", ["grid", "seen1"], ["grid0"]),
            *(node("MatMul", [f"grid{i}", "grid"], [f"grid{i + 1}"]) for i in range(3)),
            node("ReduceSum", ["grid3"], ["sum"], keepdims=0),
            node("Mul", ["sum", "nothing"], ["zero"]),
            node("Add", ["right", "zero"], ["output"]),
        ]
    )
    onnx.save(model, into)


def write_table(target: TuningTarget, winners: dict[str, str], **changes: object) -> Path:
    """Write a cost table with the fastest variant of each shape in `winners`. Return its path."""
    named = [variant(name) for name in winners.values()]
    shapes = dict.fromkeys(winners, 1.0)
    table = CostTable(
        version=target.manifest.version,
        host=target.host,
        threads=target.settings.intra_op_threads,
        providers=target.settings.providers,
        engines=read_engine_versions(candidate.engine for candidate in target.candidates),
        rows=tuple(row(v.name, shapes, "fp32") for v in dict.fromkeys(named)),
        selection=tuple(zip(map(shape, winners), named, strict=True)),
    )
    return write_costs(target.artifact, table.model_copy(update=changes))


@contextmanager
def hold_tuning_lock(target: TuningTarget) -> Iterator[None]:
    """Hold the lock of a tuning process for `target` within the block."""
    lock = target.costs_path.with_suffix(".lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
