"""Tensor-parallel decoder with two processes, each on CPU cores instead of a GPU."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import psutil
import pytest

torch = pytest.importorskip("torch", reason="`torch` is not installed")
pytest.importorskip("transformers", reason="`transformers` is not installed")

from deployments.artifacts.manifest import EngineOptions  # noqa: E402
from deployments.config import GeneratorSettings  # noqa: E402
from deployments.engines.decoder import DecoderSpec  # noqa: E402
from deployments.engines.decoder_factory import open_decoder  # noqa: E402
from deployments.engines.pytorch import tensor_parallel_decoder  # noqa: E402
from deployments.engines.pytorch.decoder import TorchDecoder  # noqa: E402
from deployments.engines.pytorch.tensor_parallel_decoder import TensorParallelDecoder  # noqa: E402
from deployments.errors import EngineFailed  # noqa: E402
from tests.support import forked_programs  # noqa: E402
from tests.support.decoder_programs import WHOLE, whole_spec  # noqa: E402
from tests.support.tiny_decoders import tiny_llama  # noqa: E402
from tests.support.waiting import TIMEOUT_S  # noqa: E402

PROMPT = list(range(10, 45))
OTHER = list(range(90, 40, -1))
SETTINGS = GeneratorSettings(kv_slots=3, max_context_tokens=128, kv_cache_bytes=1 << 30)
CLOSE = 1e-4


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> DecoderSpec:
    checkpoint = tiny_llama(tmp_path_factory.mktemp("checkpoint"))
    recipe = replace(WHOLE, run=EngineOptions(tensor_parallel_size=2))
    return whole_spec(checkpoint, tmp_path_factory.mktemp("spread"), recipe)


@pytest.fixture(scope="module")
def sharded(spec: DecoderSpec) -> Iterator[TensorParallelDecoder]:
    decoder = open_decoder(spec, SETTINGS)
    assert isinstance(decoder, TensorParallelDecoder)
    yield decoder
    decoder.close()


@pytest.fixture(scope="module")
def single_process(spec: DecoderSpec) -> Iterator[TorchDecoder]:
    """The same model in one process."""
    alone = replace(spec, options=EngineOptions())
    decoder = TorchDecoder(alone, SETTINGS, slots=3, context=128)
    yield decoder
    decoder.close()


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, atol=CLOSE)


def test_shards_match_a_single_process(
    sharded: TensorParallelDecoder, single_process: TorchDecoder
) -> None:
    for decoder in (sharded, single_process):
        decoder.prefill(0, OTHER, 0)
        decoder.prefill(1, PROMPT[:20], 0)
    every = [
        decoder.prefill(1, PROMPT[20:], 20, all_logits=True).copy()
        for decoder in (sharded, single_process)
    ]
    assert every[0].shape == (15, sharded.info.vocabulary)
    assert_close(*every)
    for step in range(4):
        ids = np.array([9 + step, 7 + step])
        lengths = np.array([len(OTHER) + step, len(PROMPT) + step])
        assert_close(sharded.decode(ids, lengths), single_process.decode(ids, lengths))


def test_copy_and_swap_reach_all_processes(
    sharded: TensorParallelDecoder, single_process: TorchDecoder
) -> None:
    answers = []
    for decoder in (sharded, single_process):
        decoder.prefill(0, OTHER, 0)
        decoder.prefill(1, PROMPT, 0)
        decoder.copy(1, 2, len(PROMPT))
        decoder.swap(0, 1, max(len(PROMPT), len(OTHER)))
        lengths = np.array([len(PROMPT), len(OTHER), len(PROMPT)])
        answers.append(decoder.decode(np.array([5, 6, 5]), lengths).copy())
    assert_close(*answers)
    assert_close(answers[0][0], answers[0][2])
    assert np.abs(answers[0][0] - answers[0][1]).max() > 1


def test_rejected_call_does_not_affect_the_next(sharded: TensorParallelDecoder) -> None:
    expected = sharded.prefill(0, PROMPT, 0).copy()
    with pytest.raises(EngineFailed, match="exceed the context"):
        sharded.prefill(0, PROMPT, 100)
    with pytest.raises(EngineFailed, match="the maximum is 265"):
        sharded.prefill(0, [sharded.info.vocabulary], 0)
    with pytest.raises(EngineFailed, match="verification is not supported"):
        sharded.verify(0, [1, 2], 5)
    np.testing.assert_array_equal(sharded.prefill(0, PROMPT, 0), expected)


def test_killed_process_ends_all_and_is_reported(
    spec: DecoderSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_parallel_decoder, "_PROCESSES", forked_programs.PROCESSES)
    decoder = TensorParallelDecoder(spec, SETTINGS, slots=2, context=64)
    processes = [psutil.Process(worker.process.pid) for worker in decoder._workers]
    decoder.prefill(0, PROMPT, 0)
    os.kill(processes[1].pid, signal.SIGKILL)
    with pytest.raises(EngineFailed, match=r"`decode` failed in process [01], which ends all"):
        decoder.decode(np.array([5]), np.array([len(PROMPT)]))
    _, alive = psutil.wait_procs(processes, timeout=TIMEOUT_S)
    assert not alive
    with pytest.raises(EngineFailed, match="closed"):
        decoder.prefill(0, PROMPT, 0)
    decoder.close()


ORPHANING = """
import pickle, sys
from pathlib import Path
from deployments.config import GeneratorSettings
from deployments.engines.pytorch.tensor_parallel_decoder import TensorParallelDecoder

spec = pickle.loads(Path(sys.argv[1]).read_bytes())
decoder = TensorParallelDecoder(spec, GeneratorSettings(), slots=1, context=64)
print(*(worker.process.pid for worker in decoder._workers), flush=True)
decoder._workers[0].calls.send(("prefill", (0, [1, 2, 3], 0), {}))  # the other one waits for ever
sys.stdin.read()
"""


def test_processes_end_with_their_parent(spec: DecoderSpec, tmp_path: Path) -> None:
    pickled = tmp_path / "spec"
    pickled.write_bytes(pickle.dumps(spec))
    command = [sys.executable, "-c", ORPHANING, str(pickled)]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as parent:
        assert parent.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(processes) == 2
        parent.kill()
    _, alive = psutil.wait_procs(processes, timeout=TIMEOUT_S)
    assert not alive


def test_failed_open_leaves_no_process(spec: DecoderSpec, tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(EngineFailed, match=r"`open` failed in process [01]"):
        TensorParallelDecoder(
            replace(spec, path=tmp_path / "model.safetensors"), SETTINGS, slots=1, context=64
        )
    after = [child for child in psutil.Process().children() if child.pid not in before]
    assert [child for child in after if "spawn_main" in " ".join(child.cmdline())] == []


@pytest.mark.parametrize("number", [0, 1])
def test_each_process_uses_its_own_gpu(
    spec: DecoderSpec, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fakes record the chosen device and backend, because no GPU is present."""
    taken: dict[str, Any] = {}
    monkeypatch.setenv("LOCAL_RANK", "7")  # an inherited value, which the process must replace
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: taken.update(device=device))
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda **how: taken.update(how))
    monkeypatch.setattr(tensor_parallel_decoder, "TorchDecoder", lambda *given, **room: None)
    on_gpus = SETTINGS.model_copy(update={"providers": ("CUDAExecutionProvider",)})
    worker = tensor_parallel_decoder._WorkerSpec(
        number=number, rendezvous_file=tmp_path / "meeting", logits=None, decoder=spec,
        hardware=on_gpus, slots=1, context=64,
    )  # fmt: skip
    tensor_parallel_decoder._open_shard(worker)
    assert os.environ["LOCAL_RANK"] == str(number)
    assert (taken["device"], taken["rank"], taken["world_size"]) == (number, number, 2)
    assert (taken["backend"], taken["device_id"]) == ("nccl", torch.device("cuda", number))


@pytest.mark.parametrize("gpu_count", [0, 1])
def test_missing_gpus_are_reported(
    spec: DecoderSpec, gpu_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu_count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpu_count)
    on_gpus = SETTINGS.model_copy(update={"providers": ("CUDAExecutionProvider",)})
    message = (
        "the model needs 2 GPUs .tensor parallelism., the replica has 1"
        if gpu_count
        else "sees no CUDA device"
    )
    with pytest.raises(EngineFailed, match=message):
        open_decoder(spec, on_gpus)
    with pytest.raises(EngineFailed, match=message):
        TensorParallelDecoder(spec, on_gpus, slots=1, context=64)
