"""The model builder of onnxruntime-genai (MIT): a checkpoint in, the directory of a graph out.

It runs in a process of its own: it is a program rather than a library, and gives back its memory
when it ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from deployments.artifacts.types import Device

_PROVIDERS = {Device.CPU: "cpu", Device.GPU: "cuda"}
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


class BuilderRun(NamedTuple):
    """What came of it."""

    log: str
    failure: str | None  # its last words; None where the graph is written


def run_builder(
    weights: Path, into: Path, *, precision: str, device: Device, options: Sequence[str] = ()
) -> BuilderRun:
    """Let it make a graph of the checkpoint in `weights`, without the network.

    `options` are its own, such as "block_size=16". `into` and a cache beside it are made.
    """
    command = [
        *(sys.executable, "-m", "build_artifacts.decoders.builder_program"),
        *("--input", str(weights.absolute())),
        *("--output", str(into)),
        *("--cache_dir", str(into.with_name(f"{into.name}-cache"))),
        *("--precision", precision),
        *("--execution_provider", _PROVIDERS[device]),
        *("--extra_options", "hf_token=false", *options),
    ]
    done = subprocess.run(
        command, env=os.environ | _OFFLINE, capture_output=True, text=True, check=False
    )
    failure = None
    if done.returncode:
        failure = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
    return BuilderRun(f"{done.stdout} {done.stderr}", failure)
