"""The command `pull`: fetch and build a model, once for all who ask."""

from __future__ import annotations

import argparse
import sys

from build_artifacts.commands.arguments import add_task
from build_artifacts.commands.store_command import store_command
from build_artifacts.errors import BuildError
from deployments.builds.queue import BuildQueue
from deployments.builds.record import BuildState
from deployments.builds.sources import default_model_id
from deployments.terminal.console import add_json_option, add_store_option, print_json, print_text

EXAMPLES = """\
example:
  hundredfold models pull BAAI/bge-small-en-v1.5
Builds with the quick search, unless a server builds this model already; then it waits for that."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="as for `build`")
    add_task(parser)
    parser.add_argument("--id", help="model id in the store; default: derived from SOURCE")
    add_json_option(parser)
    add_store_option(parser)
    parser.epilog = EXAMPLES


@store_command
def run(arguments: argparse.Namespace) -> int:
    """Build the model here, or wait for the process that builds it.

    Ctrl-C cancels the build if this command queued it and no other process runs it.
    """
    from build_artifacts.progress import copy_stderr
    from build_artifacts.pulls import pull_or_follow
    from build_artifacts.steps.resolve import make_absolute

    source = make_absolute(arguments.source)
    queue = BuildQueue(arguments.store)
    model_id = arguments.id or default_model_id(source)
    record, is_new = queue.submit(model_id, source, arguments.task)
    queued = _describe_build(record.source, record.task)
    requested = _describe_build(source, arguments.task)
    if queued != requested:
        raise BuildError(
            f"{model_id} is queued or runs as a build of {queued}, not of {requested}",
            hint="wait for the end of that build, or choose another --id",
        )
    try:
        with copy_stderr() as stream:
            pull_or_follow(queue, model_id, stream)
    except KeyboardInterrupt:
        if not is_new:
            print(f"{model_id} stays in the queue: others may wait for it", file=sys.stderr)
        elif not queue.forget(model_id):
            print(f"the build of {model_id} continues: another process runs it", file=sys.stderr)
        raise
    status = queue.status(model_id)
    if status is None or status.state is not BuildState.READY:
        reason = status.reason if status else "its record is gone"
        raise BuildError(f"{model_id} is not built: {reason}", hint="pull it again")
    if arguments.json:
        return print_json(status.model_dump(mode="json"))
    return print_text(f"{model_id} {status.version} is ready")


def _describe_build(source: str, task: str | None) -> str:
    return f"`{source}`" if task is None else f"`{source}` for `{task}`"
