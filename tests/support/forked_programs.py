"""Programs in forks of a process that has imported torch, because this import takes seconds.

Each program runs in its own fork, so programs share nothing but imports. A test session has one
fork server. The fork server computes nothing, because forks lack the threads that a
computation starts.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest

PROCESSES = get_context("forkserver")
# Package of the model builder. On import, the package adds its own directory to sys.path.
_PACKAGE_WITH_PATH = "onnxruntime_genai.models"
PROCESSES.set_forkserver_preload(
    [
        "torch",
        _PACKAGE_WITH_PATH,
        "builders",
        "builder_config",
        "quantization",
        "transformers.integrations.tensor_parallel",
        "transformers.models.auto.modeling_auto",
        "transformers.models.llama.modeling_llama",
        "deployments.engines.pytorch.tensor_parallel_decoder",
        "deployments.engines.pytorch.transformers_engine",
    ]
)
_PYTHON_MODULE = (sys.executable, "-m")


@contextmanager
def fork_model_builder() -> Iterator[None]:
    """Run onnxruntime-genai's model builder in forks within the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("build_artifacts.decoders.builder.subprocess", SimpleNamespace(run=run))
        yield


def run(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    stdin: int,
    capture_output: bool,
    text: bool,
    check: bool,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m MODULE ...` in a fork. Arguments and result are those of `subprocess.run`."""
    assert (tuple(command[:2]), capture_output, text, check) == (_PYTHON_MODULE, True, True, False)
    with (
        TemporaryDirectory() as directory,
        Connection(os.dup(stdin), writable=False) as standard_input,
    ):
        outputs = [Path(directory, name) for name in ("stdout", "stderr")]
        process = PROCESSES.Process(
            target=_run_module,
            args=(command[2:], dict(env), standard_input, [str(path) for path in outputs]),
        )
        process.start()
        process.join()
        stdout, stderr = (path.read_text(encoding="utf-8") for path in outputs)
    assert process.exitcode is not None
    return subprocess.CompletedProcess(command, process.exitcode, stdout, stderr)


def _run_module(
    arguments: Sequence[str],
    env: Mapping[str, str],
    standard_input: Connection,
    outputs: Sequence[str],
) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.dup2(standard_input.fileno(), 0)
    for descriptor, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.argv = list(arguments)
    # The fork has the sys.path of the tests, which lacks the directory of the package. Forget the
    # package, so that the program imports it again and thus adds the directory.
    sys.modules.pop(_PACKAGE_WITH_PATH, None)
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
