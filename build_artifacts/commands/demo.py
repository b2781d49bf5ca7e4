"""The command `demo`: build the demo models that are missing."""

from __future__ import annotations

import argparse

from build_artifacts.commands.build import print_result
from build_artifacts.commands.store_command import store_command
from deployments.artifacts.types import Device
from deployments.terminal.command_line import OK
from deployments.terminal.console import add_store_option


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-gpu", action="store_true", help="build what a host without a GPU builds"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help="build those of further tasks too")
    which.add_argument(
        "--variants",
        action="store_true",
        help="build a model for questions in three sizes, each from PyTorch to int8",
    )
    which.add_argument(
        "--first",
        action="store_true",
        help="build one model and queue the others: a server builds them while it serves",
    )
    add_store_option(parser)


@store_command
def run(arguments: argparse.Namespace) -> int:
    from build_artifacts.build_devices import has_device
    from build_artifacts.demo import ALL_DEMO_MODELS, DEMO_MODELS, build_demo_model
    from build_artifacts.demo_variants import build_demo_variants
    from build_artifacts.progress import BuildProgress, copy_stderr
    from build_artifacts.pulls import build_first_demo_model

    with_gpu = not arguments.no_gpu and has_device(Device.GPU)
    if arguments.first:
        with copy_stderr() as stream:
            for built in build_first_demo_model(arguments.store, stream, with_gpu=with_gpu):
                print_result(built)
        return OK
    with BuildProgress.on_stderr() as progress:
        if arguments.variants:
            for built in build_demo_variants(arguments.store, progress, with_gpu=with_gpu):
                print_result(built)
            return OK
        for model in ALL_DEMO_MODELS if arguments.all else DEMO_MODELS:
            result = build_demo_model(model, arguments.store, progress, with_gpu=with_gpu)
            print_result(result)
    return OK
