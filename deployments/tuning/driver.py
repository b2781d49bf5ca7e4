"""What the driver of NVIDIA's GPUs tells of the first one."""

from __future__ import annotations

import logging
import shutil
import subprocess

log = logging.getLogger("ray.serve.hundredfold")

_PATIENCE_S = 30


def ask_driver(fields: str) -> str:
    """The values of `fields`, as `nvidia-smi --query-gpu` knows them; empty where it tells none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    asked = [tool, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(
            asked, capture_output=True, text=True, check=True, timeout=_PATIENCE_S
        )
    except (OSError, subprocess.SubprocessError) as exc:
        log.warning("%s does not tell %s of the GPU: %s", tool, fields, exc)
        return ""
    return told.stdout.partition("\n")[0].strip()
