"""`hundredfold check`: lint a Serve config and print the problems."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from cluster.default_config import CONFIG_HELP, find_config
from cluster.linting.linter import check_file, report
from deployments.terminal.command_line import FAILED, OK, print_error
from deployments.terminal.console import add_json_option, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `hundredfold check`."""
    parser.add_argument("config", nargs="?", type=Path, help=CONFIG_HELP)
    add_json_option(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the problems. Return FAILED if there are some, or if the file is unreadable."""
    config = find_config(arguments.config)
    try:
        problems = check_file(config)
    except (OSError, UnicodeDecodeError) as exc:
        hint = "name the file, `hundredfold check FILE`"
        return print_error(f"cannot read `{config}`: {exc}", hint)
    if arguments.json:
        print_json([asdict(problem) for problem in problems])
    else:
        print(report(str(config), problems) if problems else f"{config}: no problems")
    return FAILED if problems else OK
