"""Simulation of a day with bursts of requests under several autoscaling policies.

The benchmark compares the policy of serve_config.yaml, Ray Serve's policy and a constant number of
replicas. It applies each policy and the delays of Serve's controller to seeded random arrivals.
It takes seconds of CPU time and needs no server. `--start-seconds` sets how long a replica takes to
start, which differs between clusters.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.autoscaling.controller import Controller
from benchmarks.autoscaling.day import Day, DaySettings, draw_day
from benchmarks.autoscaling.policies import ScalingMethod, build_scaling_methods, read_autoscaling
from benchmarks.autoscaling.results import (
    AutoscalingResults,
    ScalingResults,
    average_work,
    build_table,
    plot_day,
    summarize_trace,
)
from benchmarks.autoscaling.simulation import ServerSettings, Simulation
from benchmarks.common.errors import BenchmarkError
from benchmarks.common.options import add_run_options
from benchmarks.common.report import log_progress, publish, start_run
from cluster.default_config import CONFIG_HELP, find_config
from deployments.artifacts.types import Device
from deployments.deployment_names import ENCODER_DEPLOYMENTS
from deployments.terminal.command_line import positive_count, positive_number, positive_seconds

DAY = DaySettings()
SERVER = ServerSettings()
# Maximum queue, in s of work, that a replica reports if it does not see the queue of the ingress.
# A replica itself queues the work of a few forward passes. All other work waits in the ingress.
HIDDEN_WINDOW_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_options(parser)
    parser.add_argument("--config", type=Path, metavar="FILE", help=CONFIG_HELP)
    parser.add_argument(
        "--deployment",
        default=ENCODER_DEPLOYMENTS[Device.CPU],
        metavar="NAME",
        help="default: %(default)s",
    )
    parser.add_argument("--min-replicas", type=int, default=1, help="default: %(default)s")
    parser.add_argument(
        "--max-replicas", type=positive_count, default=8, help="default: %(default)s"
    )
    parser.add_argument(
        "--start-seconds",
        type=positive_count,
        default=SERVER.start_s,
        metavar="S",
        help="until a new replica takes requests (default: %(default)s)",
    )
    parser.add_argument(
        "--deadline-seconds",
        type=positive_seconds,
        default=SERVER.deadline_s,
        metavar="S",
        help="requests that would wait longer are rejected (default: %(default)s)",
    )
    parser.add_argument(
        "--hours", type=positive_count, default=DAY.seconds // 3600, help="default: %(default)s"
    )
    parser.add_argument(
        "--models", type=positive_count, default=DAY.models, help="default: %(default)s"
    )
    parser.add_argument(
        "--bursts", type=int, default=DAY.bursts, help="per model (default: %(default)s)"
    )
    for name, what in (("base", "at noon, all models"), ("burst", "of one burst, at most")):
        parser.add_argument(
            f"--{name}-work",
            type=positive_number,
            default=getattr(DAY, f"{name}_work"),
            metavar="REPLICAS",
            help=f"replicas that the load needs, {what} (default: %(default)s)",
        )


def run(arguments: argparse.Namespace) -> int:
    """Simulate the day and write the results. Raises BenchmarkError for invalid settings."""
    metadata = start_run("autoscaling", arguments.command_line, arguments.seed)
    results = replay(arguments)
    publish(arguments, metadata, results, [build_table(results)])
    for path in plot_day(arguments.out, metadata, results):
        log_progress(f"wrote {path}")
    return 0


def replay(arguments: argparse.Namespace) -> AutoscalingResults:
    settings = read_autoscaling(find_config(arguments.config), arguments.deployment)
    settings |= {"min_replicas": arguments.min_replicas, "max_replicas": arguments.max_replicas}
    settings.pop("initial_replicas", None)
    # With `cores_per_replica`, the cores of this host would limit the simulated replicas. The
    # simulated cluster has cores for `--max-replicas` replicas.
    policy = settings.get("policy") or {}
    (policy.get("policy_kwargs") or {}).pop("cores_per_replica", None)
    day_settings = DaySettings(
        seconds=arguments.hours * 3600,
        models=arguments.models,
        base_work=arguments.base_work,
        bursts=arguments.bursts,
        burst_work=arguments.burst_work,
    )
    day = draw_day(day_settings, arguments.seed)
    if not day.requests.any():
        raise BenchmarkError("the day has no requests", hint="raise --base-work or --hours")
    server = ServerSettings(arguments.start_seconds, arguments.deadline_seconds)
    return AutoscalingResults(
        deployment=arguments.deployment,
        day=day_settings,
        server=server,
        work=average_work(day),
        policies=[
            replay_policy(one, day, server, settings) for one in build_scaling_methods(settings)
        ],
    )


def replay_policy(
    method: ScalingMethod, day: Day, server: ServerSettings, settings: dict[str, Any]
) -> ScalingResults:
    log_progress(f"replaying: {method.name}")
    if not method.sees_queue:
        server = replace(server, window_s=HIDDEN_WINDOW_S)
    controller = None if method.config is None else Controller(method.config)
    replicas = settings["max_replicas" if controller is None else "min_replicas"]
    simulation = Simulation(day, server, controller, method.count_calls, replicas)
    return summarize_trace(method, simulation.run())
