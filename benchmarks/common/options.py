"""Command-line options that several benchmarks share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.http import DEFAULT_URL
from benchmarks.common.report import DEFAULT_OUT
from deployments.terminal.command_line import positive_count, positive_seconds
from deployments.terminal.console import add_json_option
from deployments.tuning.costs import Shape

DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
DEFAULT_GENERATOR = "HuggingFaceTB/SmolLM2-135M-Instruct"


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Add `--model`, `--data` and the options of `add_run_options`."""
    parser.add_argument("--model", default=DEFAULT_MODEL, metavar="ID", help="default: %(default)s")
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="directory of stsb-test.tsv and sst2-dev.tsv"
    )
    add_run_options(parser)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--out", type=Path, default=DEFAULT_OUT, metavar="DIR", help="default: %(default)s"
    )
    add_json_option(parser)


def add_url_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, help="default: %(default)s")


def add_rounds_option(parser: argparse.ArgumentParser, default: int = 3) -> None:
    parser.add_argument(
        "--rounds",
        type=positive_count,
        default=default,
        metavar="N",
        help="number of interleaved rounds (default: %(default)s)",
    )


def add_load_options(
    parser: argparse.ArgumentParser, connections: Sequence[int], seconds: float
) -> None:
    """Add the options `--connections` and `--seconds` with the given defaults."""
    levels = " ".join(map(str, connections))
    parser.add_argument(
        "--connections",
        type=positive_count,
        nargs="+",
        default=list(connections),
        metavar="N",
        help=f"default: {levels}",
    )
    parser.add_argument(
        "--seconds",
        type=positive_seconds,
        default=seconds,
        metavar="S",
        help="per level and round, after the warm-up (default: %(default)s)",
    )


def parse_shape(text: str) -> Shape:
    """Parse items x tokens, such as 8x128, for argparse."""
    items, _, tokens = text.partition("x")
    if not (items.isdigit() and tokens.isdigit() and int(items) and int(tokens)):
        raise argparse.ArgumentTypeError(f"`{text}` is no shape; write items x tokens: 8x128")
    return Shape(items=int(items), tokens=int(tokens))
