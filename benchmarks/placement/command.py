"""Simulation of a day of requests under placement policies: `auto`, always CPU, always GPU.

The simulation applies the server's placement, its autoscaling and the delays of Serve's controller
to seeded random arrivals with deadlines. The cost covers running and starting replicas. Its unit is
one hour of a CPU replica.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.autoscaling.day import DaySettings, draw_day
from benchmarks.autoscaling.policies import read_autoscaling
from benchmarks.common.options import add_run_options
from benchmarks.common.report import Table, format_number, log_progress, publish, start_run
from benchmarks.placement.simulation import (
    POLICIES,
    FleetSettings,
    PlacedDay,
    ReplayedDay,
    split_by_deadline,
)
from cluster.default_config import CONFIG_HELP, find_config
from deployments.artifacts.types import Device
from deployments.deployment_names import ENCODER_DEPLOYMENTS
from deployments.terminal.command_line import positive_count, positive_number

DAY = DaySettings()
SETTINGS = FleetSettings()


@dataclass(frozen=True, slots=True)
class PolicyResults:
    """Results of one placement policy over the simulated day."""

    name: str
    outcome: ReplayedDay
    cost: float  # cost in hours of a CPU replica


@dataclass(frozen=True, slots=True)
class PlacementResults:
    day: DaySettings
    settings: FleetSettings
    policies: Sequence[PolicyResults]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_options(parser)
    parser.add_argument("--config", type=Path, metavar="FILE", help=CONFIG_HELP)
    parser.add_argument(
        "--hours", type=positive_count, default=DAY.seconds // 3600, help="default: %(default)s"
    )
    parser.add_argument(
        "--gpu-speedups",
        type=positive_number,
        nargs=DAY.models,
        default=list(SETTINGS.gpu_speedups),
        metavar="FACTOR",
        help="speed of a GPU replica relative to a CPU replica, by model (default: %(default)s)",
    )
    parser.add_argument(
        "--gpu-price",
        type=positive_number,
        default=SETTINGS.gpu_price,
        metavar="FACTOR",
        help="price of a GPU replica relative to a CPU replica (default: %(default)s)",
    )
    parser.add_argument(
        "--base-work",
        type=positive_number,
        default=DAY.base_work,
        metavar="REPLICAS",
        help="CPU replicas that the load needs at noon (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Simulate and write the results. Raises BenchmarkError for invalid settings."""
    metadata = start_run("placement", arguments.command_line, arguments.seed)
    results = replay(arguments)
    publish(arguments, metadata, results, [build_table(results)])
    return 0


def replay(arguments: argparse.Namespace) -> PlacementResults:
    config = find_config(arguments.config)
    autoscaling = {
        device: read_autoscaling(config, name) for device, name in ENCODER_DEPLOYMENTS.items()
    }
    day_settings = DaySettings(seconds=arguments.hours * 3600, base_work=arguments.base_work)
    settings = FleetSettings(
        gpu_speedups=tuple(arguments.gpu_speedups), gpu_price=arguments.gpu_price
    )
    day = split_by_deadline(draw_day(day_settings, arguments.seed), settings, arguments.seed)
    policies = []
    for policy in POLICIES:
        log_progress(f"replaying: {policy.name}")
        outcome = PlacedDay(day, settings, policy, autoscaling).run()
        policies.append(PolicyResults(policy.name, outcome, compute_cost(outcome, settings)))
    return PlacementResults(day_settings, settings, policies)


def compute_cost(outcome: ReplayedDay, settings: FleetSettings) -> float:
    """Return the cost of the day in hours of a CPU replica."""
    hours = outcome.replica_hours
    return hours.get("cpu", 0.0) + settings.gpu_price * hours.get("gpu", 0.0)


def build_table(results: PlacementResults) -> Table:
    columns = (
        *("policy", "cost per million requests", "per million in time", "deadlines met"),
        "interactive ones met",
        *("rejected", "CPU replica-hours", "GPU replica-hours", "on the GPU"),
    )
    rows = []
    for policy in results.policies:
        one = policy.outcome
        hours = [one.replica_hours.get(device.value, 0.0) for device in Device]
        rows.append(
            (
                policy.name,
                format_number(policy.cost / one.requests * 1e6, 2),
                format_number(policy.cost / one.in_time * 1e6, 2),
                f"{one.in_time / one.requests:.2%}",
                f"{one.interactive_in_time / one.interactive:.2%}",
                f"{one.rejected / one.requests:.2%}",
                *(format_number(each, 1) for each in hours),
                f"{one.by_device.get('gpu', 0.0) / one.requests:.1%}",
            )
        )
    return Table("policies", columns, rows)
