"""The command `tune`: measure the candidates of a model on this host again."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from build_artifacts.commands.arguments import parse_count
from build_artifacts.commands.store_command import (
    MODEL_HELP,
    encoders_only_error,
    find_model,
    store_command,
)
from build_artifacts.errors import BuildError
from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import Device, ModelHead
from deployments.host.machine import usable_cores
from deployments.terminal.command_line import OK, positive_seconds
from deployments.terminal.console import add_json_option, add_store_option, format_table, print_json

if TYPE_CHECKING:
    from deployments.tuning.costs import CostTable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument(
        "--threads",
        type=parse_count,
        help="threads per forward pass; default: one, then all cores; one for a GPU",
    )
    parser.add_argument(
        "--device", type=Device, choices=list(Device), default=Device.CPU, help="default: cpu"
    )
    parser.add_argument(
        "--tune-seconds",
        type=positive_seconds,
        default=120.0,
        metavar="S",
        help="s for measuring the candidates on this host (default: %(default)s)",
    )
    add_json_option(parser)
    add_store_option(parser)


@store_command
def run(arguments: argparse.Namespace) -> int:
    from build_artifacts.build_devices import engine_settings, has_device
    from deployments.tuning.costs import TuningTarget
    from deployments.tuning.tuner import tune_exclusively

    artifact = find_model(arguments)
    manifest = ArtifactManifest.read(artifact)
    if manifest.head is ModelHead.NEXT_TOKEN:
        raise encoders_only_error("tune", "generative graphs are measured by the build")
    device: Device = arguments.device
    if not has_device(device):
        raise BuildError(
            "`--device gpu` measures on a GPU, and this host has none that ONNX Runtime can use",
            hint="`hundredfold doctor` says why",
        )
    # The number of threads affects forward passes on the CPU only.
    usual = sorted({1, usable_cores()}) if device is Device.CPU else [1]
    counts = [arguments.threads] if arguments.threads else usual
    tables = []
    for threads in counts:
        target = TuningTarget(artifact, manifest, device, engine_settings(device, threads))
        seconds = arguments.tune_seconds / len(counts)
        costs = tune_exclusively(target, seconds, force=True, wait=True)
        if costs is None:
            raise AssertionError("bug: forced tuning returned no cost table")
        tables.append(costs)
        if not arguments.json:
            print(format_costs(costs), flush=True)
    return print_json([json.loads(costs.to_json()) for costs in tables]) if arguments.json else OK


def format_costs(table: CostTable) -> str:
    """Format latencies, a row per shape and a column per variant; `*` marks the served variant."""
    selection = dict(table.selection)
    rows = [["items x tokens", *(row.variant.name for row in table.rows)]]
    for shape in selection:
        cells = [str(shape)]
        for row in table.rows:
            ms = row.by_shape().get(shape)
            mark = "*" if row.variant == selection[shape] else " "
            cells.append("-" if ms is None else f"{ms:.2f}{mark}")
        rows.append(cells)
    threads = f"{table.threads} thread{'s' if table.threads > 1 else ''} a pass"
    head = f"{table.host.name}, {table.host.cores} cores, {threads}; milliseconds, * serves"
    rejected = [f"{name} violates the gate here: {why}" for name, why in table.rejected.items()]
    unmeasured = [f"{name} was not measured here: {why}" for name, why in table.unmeasured.items()]
    return "\n".join([head, format_table(rows, align_right=True), *rejected, *unmeasured])
