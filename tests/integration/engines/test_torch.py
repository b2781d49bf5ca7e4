"""Torch programs, the graph files of the torch engine: allowed content and errors."""

from __future__ import annotations

import json
import logging
import shutil
import threading
import weakref
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="`torch` is not installed")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="`safetensors` is missing")

from safetensors import safe_open  # noqa: E402

from deployments.artifacts.manifest import EngineOptions  # noqa: E402
from deployments.artifacts.types import ModelHead  # noqa: E402
from deployments.batching.batch_policy import collate  # noqa: E402
from deployments.engines import open_engine  # noqa: E402
from deployments.engines.pytorch import engine as torch_engine  # noqa: E402
from deployments.engines.pytorch.capture import CaptureFailed, EngineGraphs  # noqa: E402
from deployments.engines.pytorch.engine import TorchEngine  # noqa: E402
from deployments.engines.pytorch.program import read_program, write_program  # noqa: E402
from deployments.errors import EngineFailed  # noqa: E402
from tests.integration.engines.conftest import KINDS, SETTINGS, Written, spec_of  # noqa: E402
from tests.integration.engines.test_contract import ITEMS, check  # noqa: E402
from tests.support.captured_sessions import RecordedLock  # noqa: E402
from tests.support.fakes import item  # noqa: E402
from tests.support.torch_memory import count_tensor_bytes, without_collections  # noqa: E402

TORCH = KINDS["torch"]
Nodes = list[dict[str, Any]]


@pytest.fixture
def rewritten(written: Written, tmp_path: Path) -> Callable[[Callable[[Nodes], None]], Path]:
    """Return a function that copies the file of the tiny program with modified calls."""

    def rewrite(change: Callable[[Nodes], None]) -> Path:
        with safe_open(written(TORCH, ModelHead.VECTOR), framework="pt") as file:
            nodes = json.loads(file.metadata()["program"])
        weights = safetensors_torch.load_file(written(TORCH, ModelHead.VECTOR))
        change(nodes)
        path = tmp_path / "changed.graph"
        safetensors_torch.save_file(weights, path, metadata={"program": json.dumps(nodes)})
        return path

    return rewrite


def calling(name: str) -> Callable[[Nodes], None]:
    def change(nodes: Nodes) -> None:
        next(node for node in nodes if "call" in node)["call"] = name

    return change


def test_close_frees_the_weights(written: Written) -> None:
    """Modules refer to themselves, so only garbage collection or `close` frees their weights.

    The garbage collector rarely runs in a replica.
    """
    engine = open_engine(
        spec_of(TORCH, written(TORCH, ModelHead.VECTOR), ModelHead.VECTOR), SETTINGS
    )
    assert isinstance(engine, TorchEngine)
    weights = [weakref.ref(weight) for weight in engine._program.module.buffers()]
    assert weights
    engine.close()
    assert [weight() for weight in weights] == [None] * len(weights)


@pytest.mark.parametrize(
    "name",
    [
        "aten.from_file.default",
        "aten.sub_.Tensor",
        "aten._grouped_mm.default",  # addresses memory by a tensor, unchecked
        "hundredfold.other.default",
        "aten.add.out",
        "aten.nothing.default",
        "aten.linear",
        "aten.__class__.__init__",
        "torch.hub.load",
        "os.system",
        "eval",
        "_c10d_functional.all_reduce.default",
        "aten._cudnn_rnn.default",
    ],
)
def test_program_calls_allowed_operators_only(name: str, rewritten) -> None:
    with pytest.raises(EngineFailed, match=r"changed\.graph: a torch program cannot call"):
        open_engine(spec_of(TORCH, rewritten(calling(name))), SETTINGS)


@pytest.mark.parametrize("dtype", ["nonsense", "save", "float32.__class__", "strided"])
def test_unknown_dtype_is_rejected(dtype: str, rewritten) -> None:
    def change(nodes: Nodes) -> None:
        next(node for node in nodes if "call" in node)["kwargs"] = {"dtype": {"dtype": dtype}}

    with pytest.raises(EngineFailed, match="cannot contain the dtype"):
        open_engine(spec_of(TORCH, rewritten(change)), SETTINGS)


def test_unknown_operator_fails(rewritten) -> None:
    def unknown_weight(nodes: Nodes) -> None:
        next(node for node in nodes if "weight" in node)["weight"] = "nothing"

    def unknown_node(nodes: Nodes) -> None:
        nodes[-1]["output"] = {"node": "nothing"}

    def strange_input(nodes: Nodes) -> None:
        next(node for node in nodes if "input" in node)["input"] = "pixels"

    for change in (unknown_weight, unknown_node, strange_input, list.clear):
        with pytest.raises(EngineFailed, match=r"changed\.graph"):
            open_engine(spec_of(TORCH, rewritten(change)), SETTINGS)


def test_file_without_program_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "weights.graph"
    safetensors_torch.save_file({"w": torch.zeros(2)}, path)
    with pytest.raises(EngineFailed, match=r"weights\.graph: the file contains no torch program"):
        open_engine(spec_of(TORCH, path), SETTINGS)


def test_non_json_values_round_trip(tmp_path: Path) -> None:
    class Hidden(torch.nn.Module):
        def forward(self, input_ids):
            hidden = torch.full_like(input_ids, float("-inf"), dtype=torch.float16)
            return torch.where(input_ids > 2, input_ids.to(torch.float16), hidden)

    example = {"input_ids": torch.arange(4)[None]}
    with torch.no_grad():
        write_program(torch.export.export(Hidden(), (), example), tmp_path / "p")
    (row,) = read_program(tmp_path / "p", "cpu")(example["input_ids"]).tolist()
    assert row == [float("-inf")] * 3 + [3.0]


def test_unsupported_program_is_rejected_when_written(tmp_path: Path) -> None:
    class Spectrum(torch.nn.Module):
        def forward(self, input_ids):
            return torch.fft.fft(input_ids.float()).real

    with torch.no_grad():
        program = torch.export.export(Spectrum(), (), {"input_ids": torch.ones(1, 4).long()})
    with pytest.raises(EngineFailed, match=r"cannot call `aten\.\w*fft"):
        write_program(program, tmp_path / "p")
    assert not (tmp_path / "p").exists()


def test_compile_without_buckets_is_rejected(written: Written) -> None:
    spec = spec_of(TORCH, written(TORCH, ModelHead.VECTOR))
    with pytest.raises(EngineFailed, match="needs buckets"):
        open_engine(replace(spec, options=EngineOptions(compile=True)), SETTINGS)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs `g++` on a CPU")
def test_compiled_program_matches(written: Written) -> None:
    spec = spec_of(TORCH, written(TORCH, ModelHead.TOKENS), ModelHead.TOKENS)
    options = EngineOptions(buckets=((2, 8), (4, 8)), compile=True)
    with closing(open_engine(replace(spec, options=options), SETTINGS)) as engine:
        check(engine, ModelHead.TOKENS, ITEMS[:1])
        check(engine, ModelHead.TOKENS, ITEMS[:4])
        check(engine, ModelHead.TOKENS, ITEMS)  # larger than every bucket


def test_close_stops_the_thread(written: Written) -> None:
    spec = spec_of(TORCH, written(TORCH, ModelHead.VECTOR))
    before = set(threading.enumerate())
    engine = open_engine(spec, SETTINGS)
    engine.run(collate([item(1)]))
    # Other libraries may start threads too, such as tqdm's monitor.
    started = [
        thread
        for thread in threading.enumerate()
        if thread not in before and thread.name.startswith("torch")
    ]
    assert len(started) == 1, "the engine computes on a thread of its own"
    engine.close()
    engine.close()
    assert not started[0].is_alive()


class ReplayedShape:
    """A fake of a captured call: it repeats the computation on the CPU, in its recorded tensors."""

    def __init__(
        self,
        call: Callable[[], None],
        graphs: EngineGraphs,
        _lock: object,
        *,
        waits: bool,
    ) -> None:
        self.call, self.graphs, self.replays = call, graphs, 0
        assert waits, "an encoder captures its shapes before it serves"
        call()

    def replay(self) -> None:
        self.replays += 1
        self.call()


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("head", [ModelHead.VECTOR, ModelHead.TOKENS, ModelHead.MASKS])
def test_buckets_are_captured_and_replayed(
    head: ModelHead, compiles: bool, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Callable[..., Any]] = []

    def compile_(module: Callable[..., Any], **_: object) -> Callable[..., Any]:
        compiled.append(module)
        return module

    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(torch_engine, "capture", ReplayedShape)
    monkeypatch.setattr(torch_engine, "uses_cuda", lambda _: True)
    monkeypatch.setattr(torch_engine, "_CUDA", "cpu")
    lock, held = RecordedLock(), []
    monkeypatch.setattr(torch_engine, "find_capture_lock", lambda *, is_gpu: lock)
    to_tensors = torch_engine._DeviceProgram.to_tensors

    def allocate(program: Any, arrays: Any) -> Any:
        held.append(lock.held)
        return to_tensors(program, arrays)

    monkeypatch.setattr(torch_engine._DeviceProgram, "to_tensors", allocate)
    options = EngineOptions(buckets=((1, 4), (2, 16), (4, 16)), compile=compiles)
    spec = replace(spec_of(TORCH, written(TORCH, head), head), options=options)
    with closing(open_engine(spec, SETTINGS)) as engine:
        assert isinstance(engine, TorchEngine)
        check(engine, head, ITEMS[:1])
        check(engine, head, ITEMS[:3])
        check(engine, head, ITEMS[1:3])
        check(engine, head, ITEMS)  # larger than every bucket
        shapes = [shape._captured for shape in engine._in_buckets.values()]
    assert {shape.graphs for shape in shapes} == {engine._graphs}, "they share their memory"
    assert sum(shape.replays for shape in shapes) >= 2
    assert len(compiled) == compiles
    assert held[:3] == ["opening"] * 3, "an allocation would end the capture of another engine"
    assert set(held[3:]) == {"pass"}


@pytest.mark.parametrize("compiles", [False, True])
def test_buckets_that_cannot_be_captured_run_uncaptured(
    compiles: bool, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture(call: Any, graphs: Any, lock: Any, *, waits: bool) -> ReplayedShape:
        if len(shapes) == 1:
            raise CaptureFailed("operation not permitted when stream is capturing")
        shapes.append(ReplayedShape(call, graphs, lock, waits=waits))
        return shapes[-1]

    shapes: list[ReplayedShape] = []
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)
    monkeypatch.setattr(torch_engine, "capture", capture)
    monkeypatch.setattr(torch_engine, "uses_cuda", lambda _: True)
    monkeypatch.setattr(torch_engine, "_CUDA", "cpu")
    options = EngineOptions(buckets=((1, 4), (4, 16)), compile=compiles)
    spec = replace(spec_of(TORCH, written(TORCH, ModelHead.VECTOR)), options=options)
    given_back: list[object] = []
    monkeypatch.setattr(EngineGraphs, "give_back_stream", lambda graphs: given_back.append(graphs))
    with closing(open_engine(spec, SETTINGS)) as engine:
        check(engine, ModelHead.VECTOR, ITEMS[:1])
        check(engine, ModelHead.VECTOR, ITEMS[1:3])
    assert len(shapes) == 1
    assert given_back == [shapes[0].graphs]


def test_encoder_that_fails_for_lack_of_memory_frees_its_own(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[ReplayedShape] = []

    def capture(call: Any, graphs: Any, lock: Any, *, waits: bool) -> ReplayedShape:
        if shapes:
            shapes.clear()
            raise RuntimeError("out of memory")
        shapes.append(ReplayedShape(call, graphs, lock, waits=waits))
        return shapes[0]

    monkeypatch.setattr(torch_engine, "capture", capture)
    monkeypatch.setattr(torch_engine, "uses_cuda", lambda _: True)
    monkeypatch.setattr(torch_engine, "_CUDA", "cpu")
    options = EngineOptions(buckets=((1, 4), (2, 16)))
    spec = replace(spec_of(TORCH, written(TORCH, ModelHead.VECTOR)), options=options)
    with without_collections():
        before = count_tensor_bytes()
        with pytest.raises(EngineFailed, match="out of memory") as error:
            open_engine(spec, SETTINGS)
        assert count_tensor_bytes() == before, error


def test_closed_engine_returns_the_memory_that_torch_keeps(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    returned: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: returned.append("cuda"))
    engine = open_engine(spec_of(TORCH, written(TORCH, ModelHead.VECTOR)), SETTINGS)
    assert isinstance(engine, TorchEngine)
    engine._device = "cuda"
    engine.close()
    assert returned == ["cuda"]
    open_engine(spec_of(TORCH, written(TORCH, ModelHead.VECTOR)), SETTINGS).close()
    assert returned == ["cuda"], "an engine on the CPU uses no memory of a GPU"


def test_close_after_the_loss_of_the_gpu_keeps_the_first_error(
    written: Written, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A build or a tuner closes its engines in a `finally`, and continues with other candidates."""

    def fail() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "empty_cache", fail)
    engine = open_engine(spec_of(TORCH, written(TORCH, ModelHead.VECTOR)), SETTINGS)
    assert isinstance(engine, TorchEngine)
    engine._device = "cuda"
    with caplog.at_level(logging.WARNING), pytest.raises(ZeroDivisionError), closing(engine):
        raise ZeroDivisionError("the first error")
    assert "was not freed" in caplog.text
