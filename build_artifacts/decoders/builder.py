"""Subprocess that runs the model builder of onnxruntime-genai (MIT).

The builder is a program, not a library. It runs in a separate process, so that the system frees all
its memory when it ends.
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
    log: str
    failure: str | None  # last line of stderr or the exit status; None after success


def run_builder(
    weights: Path, into: Path, *, precision: str, device: Device, options: Sequence[str] = ()
) -> BuilderRun:
    """Export the checkpoint in `weights` to the directory `into`, without network access.

    `options` are options of the builder, such as "block_size=16". The builder creates `into` and a
    cache directory next to it.
    """
    command = [
        *(sys.executable, "-m", "build_artifacts.decoders.builder_program"),
        *("--input", str(weights.absolute())),
        *("--output", str(into)),
        *("--cache_dir", str(into.with_name(f"{into.name}-cache"))),
        *("--precision", precision),
        *("--execution_provider", _PROVIDERS[device]),
        *("--extra_options", "hf_token=false", "hf_remote=false", *options),
    ]
    # The builder ends when its stdin ends. The pipe closes with this process, even after a crash.
    alive, held = os.pipe()
    try:
        done = subprocess.run(
            command,
            env=os.environ | _OFFLINE,
            stdin=alive,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        os.close(alive)
        os.close(held)
    failure = None
    if done.returncode:
        failure = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
    return BuilderRun(f"{done.stdout} {done.stderr}", failure)
