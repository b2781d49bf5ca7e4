"""The command `drain`: build the models that wait in the queue."""

from __future__ import annotations

import argparse

from build_artifacts.commands.arguments import parse_count
from build_artifacts.commands.store_command import store_command
from deployments.builds.process import BUSY
from deployments.builds.queue import BuildQueue
from deployments.host.background_process import (
    end_with_standard_input,
    limit_memory,
    lower_process_priority,
)
from deployments.terminal.command_line import FAILED, OK, print_error
from deployments.terminal.console import add_store_option


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--for-server",
        action="store_true",
        help="use the lowest priority; end when standard input is closed",
    )
    parser.add_argument(
        "--max-memory-bytes", type=parse_count, metavar="N", help="bytes that the builds may use"
    )
    add_store_option(parser)


@store_command
def run(arguments: argparse.Namespace) -> int:
    from build_artifacts.progress import copy_stderr
    from build_artifacts.pulls import drain

    queue = BuildQueue(arguments.store)
    if arguments.for_server:
        end_with_standard_input(queue.interrupt)
        lower_process_priority()
    if arguments.max_memory_bytes:
        limit_memory(arguments.max_memory_bytes)
    with copy_stderr() as stream:
        failed = drain(queue, stream)
    if arguments.for_server:  # the records tell the server which builds failed
        return BUSY if failed is None else OK
    if failed is None:
        return print_error(f"another process already runs the queued builds of {arguments.store}")
    return FAILED if failed else OK
