"""The process that a replica tunes in: its command line, its manners, how it ends."""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum
from pathlib import Path

import psutil

import deployments
from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import Device
from deployments.config import EncoderSettings
from deployments.errors import ServeError
from deployments.tuning.costs import TuningTarget
from deployments.tuning.tuner import tune_exclusively

_PACKAGES = Path(deployments.__file__).parents[1]


class ExitCode(IntEnum):
    """Exit statuses; 2 is that of a wrong command line."""

    TUNED = 0
    FAILED = 1
    BUSY = 3  # somebody else tunes this model for this kind of host
    STORE_NOT_WRITABLE = 4  # the store cannot be written; so it is for every model


def start(target: TuningTarget) -> subprocess.Popen[bytes]:
    """The process that tunes `target`; it ends when its standard input is closed.

    It stays in the session and the process group of this one, where whoever ends a replica with
    all that belongs to it finds both.
    """
    settings = target.settings
    command = [
        *(sys.executable, "-m", "deployments.tuning", str(target.artifact.resolve())),
        *("--device", target.device, "--threads", str(settings.intra_op_threads)),
        *(
            "--concurrent-passes",
            str(settings.concurrent_passes),
            "--seconds",
            str(settings.tune_seconds),
        ),
        *("--providers", *settings.providers),
        "--for-replica",
    ]
    return subprocess.Popen(
        command,
        cwd=_PACKAGES,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune as the command line says; one line on standard error says what came of it."""
    asked = _parser().parse_args(arguments)
    if asked.for_replica:
        _end_with_standard_input()
        _lower_priority()
    logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.INFO)
    options = {
        "intra_op_threads": asked.threads,
        "concurrent_passes": asked.concurrent_passes,
        "providers": asked.providers,
    }
    try:
        settings = EncoderSettings.parse(options)
        manifest = ArtifactManifest.read(asked.artifact)
        target = TuningTarget(asked.artifact, manifest, asked.device, settings)
        table = tune_exclusively(target, asked.seconds, force=asked.force)
    except ServeError as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitCode.FAILED
    except OSError as error:
        print(f"error: {asked.artifact} cannot keep what is measured: {error}", file=sys.stderr)
        return ExitCode.STORE_NOT_WRITABLE
    if table is None:
        print(f"{manifest.id} is being tuned by another process", file=sys.stderr)
        return ExitCode.BUSY
    print(f"{manifest.id}: {', '.join(v.name for v in table.selected_variants())}", file=sys.stderr)
    return ExitCode.TUNED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deployments.tuning",
        description="Measure a sealed model's graphs on this host, once.",
    )
    parser.add_argument("artifact", type=Path, help="directory of a sealed version")
    parser.add_argument("--device", type=Device, choices=list(Device), required=True)
    parser.add_argument("--threads", type=int, default=1, help="engine threads per pass")
    parser.add_argument("--concurrent-passes", type=int, default=1, help="passes at once")
    parser.add_argument("--seconds", type=float, default=60.0, help="for the measuring")
    parser.add_argument("--providers", nargs="+", default=["CPUExecutionProvider"])
    parser.add_argument("--force", action="store_true", help="also where a valid table is")
    parser.add_argument(
        "--for-replica",
        action="store_true",
        help="at the lowest priority, and no longer than standard input stays open",
    )
    return parser


def _end_with_standard_input() -> None:
    """End this process at once when whoever started it is gone, however that happened."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(ExitCode.FAILED)

    threading.Thread(target=watch, name="watch", daemon=True).start()


def _lower_priority() -> None:
    """Let everything else on the machine go first: to the cores, the disk, and the memory."""
    os.nice(19)
    with suppress(psutil.Error, OSError):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
    with suppress(OSError):  # the kernel ends this process before any that serves
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")
