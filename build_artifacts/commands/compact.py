"""The command `compact`: show what pruning left to remove."""

from __future__ import annotations

import argparse

from build_artifacts.commands.store_command import encoders_only_error, store_command
from deployments.artifacts.types import ModelHead
from deployments.tasks import find_head
from deployments.terminal.console import (
    add_json_option,
    add_store_option,
    format_table,
    print_json,
    print_text,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="as for `build`")
    add_json_option(parser)
    add_store_option(parser)


@store_command
def run(arguments: argparse.Namespace) -> int:
    from build_artifacts.checkpoints.models import load_model
    from build_artifacts.checkpoints.tasks import select_tasks
    from build_artifacts.compaction.find import find_compaction
    from build_artifacts.families import read_metadata
    from build_artifacts.progress import BuildProgress
    from build_artifacts.sources.hub import HuggingFaceHub
    from build_artifacts.steps.convert_weights import convert_weights
    from build_artifacts.steps.resolve import resolve
    from build_artifacts.workspaces.opening import open_temporary_workspace
    from build_artifacts.workspaces.step_runner import StepRunner

    with BuildProgress.on_stderr() as progress, open_temporary_workspace(arguments.store) as files:
        steps = StepRunner(files, progress)
        sources = steps.create_directory("sources")
        checkpoint = resolve(arguments.source, sources, HuggingFaceHub())
        tasks = select_tasks(checkpoint, None, None)
        if find_head(tasks[0]) is ModelHead.NEXT_TOKEN:
            raise encoders_only_error(
                "compact",
                "the compiler compacts no generative models",
                hint="build it without this step: `hundredfold build`",
            )
        checkpoint = convert_weights(steps, checkpoint, tasks)
        head = read_metadata(checkpoint, tasks).loaded_head
        compaction = find_compaction(load_model(checkpoint.weights, head=head, dtype="float32"))
    if arguments.json:
        return print_json(compaction.model_dump(mode="json"))
    rows = [
        (str(cut.layer), str(len(cut.heads)), str(len(cut.ffn_channels)))
        for cut in compaction.reductions
    ]
    table = format_table([("layer", "heads", "feed-forward channels"), *rows], align_right=True)
    return print_text(f"{compaction.describe()}\n{table}" if rows else compaction.describe())
