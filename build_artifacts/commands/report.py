"""The command `report`: measure every stage of a build."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from build_artifacts.commands.arguments import (
    add_evaluation,
    parse_count,
    parse_seconds,
    read_sampling,
)
from build_artifacts.commands.store_command import (
    MODEL_HELP,
    encoders_only_error,
    find_model,
    store_command,
)
from build_artifacts.errors import BuildError
from deployments.artifacts.manifest import GENERATION_NAME, ArtifactManifest
from deployments.artifacts.types import ModelHead
from deployments.terminal.command_line import OK
from deployments.terminal.console import add_json_option, add_store_option, print_json, print_text

if TYPE_CHECKING:
    from build_artifacts.progress import BuildProgress
    from build_artifacts.report.values import Report, ReportRequest

# Options of `report` that change what is measured.
_MEASURING_OPTIONS = (
    *("force", "runs", "threads", "seconds"),
    *("eval", "eval_limit", "adapter", "prune_data"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument("--runs", type=parse_count, help="forward passes per length; default: 50")
    parser.add_argument("--threads", type=parse_count, help="threads per stage; default: all cores")
    parser.add_argument(
        "--seconds",
        type=parse_seconds,
        metavar="S",
        help="s for all timed forward passes; if they do not suffice, fewer run, "
        "but at least 5 per length; default: 300",
    )
    parser.add_argument(
        "--force", action="store_true", help="measure again even if a report of this host exists"
    )
    parser.add_argument(
        "--adapter", type=Path, help="directory of the LoRA adapter that the build merged"
    )
    parser.add_argument(
        "--prune-data", type=Path, metavar="FILE", help="the file that the build rated heads on"
    )
    add_evaluation(parser)
    add_json_option(parser)
    add_store_option(parser)


@store_command
def run(arguments: argparse.Namespace) -> int:
    from build_artifacts.progress import BuildProgress
    from build_artifacts.report.values import DEFAULT_RUNS, DEFAULT_SECONDS, ReportRequest

    artifact = find_model(arguments)
    manifest = ArtifactManifest.read(artifact)
    if manifest.head is ModelHead.NEXT_TOKEN:
        return _report_generator(artifact, manifest, arguments)
    request = ReportRequest(
        artifact=artifact,
        store=arguments.store,
        runs=arguments.runs or DEFAULT_RUNS,
        threads=arguments.threads,
        seconds=DEFAULT_SECONDS if arguments.seconds is None else arguments.seconds,
        evaluation=arguments.eval,
        sampling=read_sampling(arguments),
        adapter=arguments.adapter,
        prune_data=arguments.prune_data,
    )
    with BuildProgress.on_stderr() as progress:
        _report_encoder(request, manifest, progress, force=arguments.force, as_json=arguments.json)
    return OK


def _report_generator(
    artifact: Path, manifest: ArtifactManifest, arguments: argparse.Namespace
) -> int:
    """Print the measurements of a generative model from its build. Reject measuring options."""
    from build_artifacts.decoders.generation_report import format_report, read_generation_report

    for name in _MEASURING_OPTIONS:
        value = getattr(arguments, name)
        if value is not None and value is not False:
            option = name.replace("_", "-")
            raise encoders_only_error(f"report --{option}", "the build measures and evaluates them")
    if GENERATION_NAME not in manifest.files:
        raise BuildError(
            f"`{manifest.id}` {manifest.version} has no `{GENERATION_NAME}` to report",
            hint=f"the build of a `{manifest.architecture}` stores no measurements",
        )
    stored = read_generation_report(artifact)
    if arguments.json:
        parity = {c.name: c.parity.model_dump(mode="json") for c in manifest.candidates}
        return print_json({**stored.model_dump(mode="json"), "parity": parity})
    return print_text(format_report(manifest, stored))


def _report_encoder(
    request: ReportRequest,
    manifest: ArtifactManifest,
    progress: BuildProgress,
    *,
    force: bool,
    as_json: bool,
) -> None:
    from build_artifacts.report.build import build_report
    from build_artifacts.report.output import read_report, write_report
    from build_artifacts.report.values import read_conditions
    from build_artifacts.sources.hub import HuggingFaceHub

    artifact, conditions = request.artifact, read_conditions(request, manifest)
    stored = None if force else read_report(artifact, conditions, progress.message)
    if stored is not None:
        _print_report(stored, as_json=as_json)
        return
    built = build_report(request, manifest, conditions, progress, HuggingFaceHub())
    _print_report(built, as_json=as_json)  # print first: writing may fail on a full disk
    path = write_report(artifact, built, progress.message).parent
    progress.message(f"written to {path}")


def _print_report(found: Report, *, as_json: bool) -> None:
    from build_artifacts.report.output import format_stages

    if as_json:
        print_json(found.model_dump(mode="json"))
    else:
        print_text(format_stages(found))
