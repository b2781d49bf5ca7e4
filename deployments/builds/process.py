"""Start of the builder, a process that runs all queued builds of a store and then ends.

The server runs the builder as a command, so that the server imports neither torch nor the compiler.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from deployments.builds.queue import QUEUE_NAME
from deployments.host.background_process import PACKAGES

_COMPILER = ("build_artifacts", "torch")
LOG_NAME = "builder.log"
MAX_LOG_BYTES = 1 << 20  # a larger log is deleted before the next builder starts
# Variable that passes the operator's value of HF_HUB_OFFLINE on to the builder. Replicas themselves
# run with HF_HUB_OFFLINE=1, because they read sealed artifacts only.
HUB_OFFLINE_VARIABLE = "HUNDREDFOLD_HUB_OFFLINE"
BUSY = 3  # exit code: another process runs the builds of the queue


def has_compiler() -> bool:
    """Return whether this environment can build models."""
    return all(find_spec(name) is not None for name in _COMPILER)


def start_builder(store: Path, max_memory_bytes: int) -> subprocess.Popen[bytes]:
    """Start a builder, which ends when its standard input is closed.

    The builder stays in the POSIX session of this process, so that both are killed together. The
    builder's working directory contains no models, so a model id is never mistaken for a path.
    Raises OSError if the log cannot be written or the process cannot start.
    """
    directory = store / QUEUE_NAME
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / LOG_NAME
    if log.exists() and log.stat().st_size > MAX_LOG_BYTES:
        log.unlink()
    command = [
        *(sys.executable, "-m", "build_artifacts", "drain", "--store", str(store.resolve())),
        *("--for-server", "--max-memory-bytes", str(max_memory_bytes)),
    ]
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            cwd=directory,
            env=_builder_environment(),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
        )


def _builder_environment() -> dict[str, str]:
    """Return the environment of the builder.

    The builder can import this package, and HF_HUB_OFFLINE is as the operator set it.
    """
    environment = {**os.environ}
    environment.pop("HF_HUB_OFFLINE", None)
    if is_offline := environment.get(HUB_OFFLINE_VARIABLE):
        environment["HF_HUB_OFFLINE"] = is_offline
    paths = (str(PACKAGES), environment.get("PYTHONPATH", ""))
    return environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
