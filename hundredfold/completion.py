"""`hundredfold completion SHELL`: a completion script for bash, zsh or tcsh."""

from __future__ import annotations

import argparse

import shtab

from deployments.terminal.command_line import OK
from hundredfold.__main__ import build_program


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=shtab.SUPPORTED_SHELLS)
    parser.epilog = 'example: eval "$(hundredfold completion bash)"'


def run(arguments: argparse.Namespace) -> int:
    print(shtab.complete(build_program().build_parser(), shell=arguments.shell))
    return OK
