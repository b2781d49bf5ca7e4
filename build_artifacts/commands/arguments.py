"""Arguments that several commands share, and their types for argparse."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from build_artifacts.errors import BuildError
from deployments.tasks import list_task_names

if TYPE_CHECKING:
    from build_artifacts.evaluation import ExampleSampling


def add_evaluation(parser: argparse.ArgumentParser) -> None:
    """Add the options for labeled data."""
    parser.add_argument(
        "--eval",
        type=Path,
        metavar="FILE",
        help="labeled data; formats: the docstring of build_artifacts/evaluation/__init__.py",
    )
    parser.add_argument(
        "--eval-limit", type=parse_count, metavar="N", help="examples to use, at most"
    )


def read_sampling(arguments: argparse.Namespace) -> ExampleSampling:
    """Return the sampling of labeled data. Raises BuildError for a limit without data."""
    from build_artifacts.evaluation import ExampleSampling

    if arguments.eval_limit is not None and arguments.eval is None:
        raise BuildError("`--eval-limit` has no effect without `--eval`", hint="add `--eval FILE`")
    return ExampleSampling(limit=arguments.eval_limit)


def add_task(parser: argparse.ArgumentParser) -> None:
    """Add the option for the task of a model."""
    parser.add_argument(
        "--task",
        choices=list(map(str, list_task_names())),
        metavar="TASK",
        help="such as `text-classification`, or `sparse-embeddings` for a SPLADE model that states "
        "only a masked language model; default: the task of the checkpoint",
    )


def parse_count(text: str) -> int:
    """Parse an integer of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"`{text}` is not a positive integer")
    return int(text)


def parse_seconds(text: str) -> float:
    """Parse a number of seconds of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"`{text}` is not a number of seconds below 1e6")
    return value
