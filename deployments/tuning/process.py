"""The tuning process of a replica: command line, priority and exit codes."""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import Device
from deployments.config import EncoderSettings
from deployments.errors import ServeError
from deployments.host.background_process import (
    PACKAGES,
    end_with_standard_input,
    lower_process_priority,
)
from deployments.tuning.costs import TuningTarget
from deployments.tuning.tuner import tune_exclusively


class ExitCode(IntEnum):
    """Exit status of the process; argparse uses 2 for a wrong command line."""

    TUNED = 0
    FAILED = 1
    BUSY = 3  # another process tunes this model for this kind of host
    STORE_NOT_WRITABLE = 4  # tuning fails for every model of the store


def start(target: TuningTarget) -> subprocess.Popen[bytes]:
    """Start the process that tunes `target`. The process ends when its standard input is closed.

    The process stays in the session and process group of the replica, so that both are killed
    together.
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
        cwd=PACKAGES,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune as the command line requests. Return an ExitCode.

    Write the result as the last line to standard error. Earlier lines are log messages.
    """
    args = _build_parser().parse_args(arguments)
    if args.for_replica:
        end_with_standard_input()
        lower_process_priority()
    logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.INFO)
    options = {
        "intra_op_threads": args.threads,
        "concurrent_passes": args.concurrent_passes,
        "providers": args.providers,
    }
    try:
        settings = EncoderSettings.parse(options)
        manifest = ArtifactManifest.read(args.artifact)
        target = TuningTarget(args.artifact, manifest, args.device, settings)
        table = tune_exclusively(target, args.seconds, force=args.force)
    except ServeError as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitCode.FAILED
    except OSError as error:
        print(f"error: cannot write to {args.artifact}: {error}", file=sys.stderr)
        return ExitCode.STORE_NOT_WRITABLE
    if table is None:
        print(f"{manifest.id} is being tuned by another process", file=sys.stderr)
        return ExitCode.BUSY
    print(f"{manifest.id}: {', '.join(v.name for v in table.selected_variants())}", file=sys.stderr)
    return ExitCode.TUNED


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deployments.tuning",
        description="Measure a sealed model's graphs on this host, once.",
    )
    parser.add_argument("artifact", type=Path, help="directory of a sealed version")
    parser.add_argument("--device", type=Device, choices=list(Device), required=True)
    parser.add_argument("--threads", type=int, default=1, help="engine threads per forward pass")
    parser.add_argument(
        "--concurrent-passes", type=int, default=1, help="concurrent forward passes of the encoder"
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="time budget of the measurements"
    )
    parser.add_argument("--providers", nargs="+", default=["CPUExecutionProvider"])
    parser.add_argument("--force", action="store_true", help="replace a valid cost table")
    parser.add_argument(
        "--for-replica",
        action="store_true",
        help="use the lowest priority; end when standard input is closed",
    )
    return parser
