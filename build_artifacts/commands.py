"""One function per command of the command line: parsed arguments in, exit status out."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from build_artifacts.checkpoints.metadata import select_tasks
from build_artifacts.checkpoints.models import load_model
from build_artifacts.console import BuildProgress
from build_artifacts.decoders.generation_report import format_report, read_generation_report
from build_artifacts.demo import DEMO_MODELS, build_demo_model
from build_artifacts.errors import BuildError
from build_artifacts.evaluation import ExampleSampling
from build_artifacts.families.base import BuildBudget
from build_artifacts.pipeline import BuildRequest, BuildResult, build
from build_artifacts.recipes import SEARCH_PRESETS, BuildRecipe, with_gpu_placement
from build_artifacts.report.build import build_report
from build_artifacts.report.output import keep, read_report
from build_artifacts.report.output import table as journey_table
from build_artifacts.report.values import ReportRequest, read_conditions
from build_artifacts.sources.hub import HuggingFaceHub
from build_artifacts.steps.resolve import resolve
from build_artifacts.storage.garbage import describe, find_garbage, remove
from build_artifacts.storage.inspection import check, format_costs, list_versions, table
from build_artifacts.storage.workspace import scratch
from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.store import LATEST_NAME, find_artifact
from deployments.artifacts.types import TASK_HEADS, ModelHead
from deployments.config import EncoderSettings
from deployments.machine import usable_cores
from deployments.tuning.costs import TuningTarget
from deployments.tuning.tuner import tune_exclusively


def build_model(arguments: argparse.Namespace) -> int:
    """`build`."""
    request = BuildRequest(
        ref=arguments.source,
        store=arguments.store,
        id=arguments.id,
        task=arguments.task,
        adapter=arguments.adapter,
        recipe=_recipe(arguments),
        budget=BuildBudget(
            search_seconds=arguments.search_seconds,
            tune_seconds=arguments.tune_seconds,
            evaluation=arguments.eval,
            sampling=ExampleSampling(limit=arguments.eval_limit),
        ),
        force=arguments.force,
    )
    _tell(build(request, BuildProgress.on_stderr()))
    return 0


def _recipe(arguments: argparse.Namespace) -> BuildRecipe:
    recipe = with_gpu_placement(
        SEARCH_PRESETS[arguments.search],
        tensor_parallel_size=arguments.tensor_parallel_size,
        kv_offload=arguments.offload_kv_cache,
    )
    return replace(recipe, gate=recipe.gate.model_copy(update=dict(arguments.gate)))


def _tell(result: BuildResult) -> None:
    manifest = result.manifest
    how = "was built already" if result.already_built else "is built"
    print(f"{manifest.id} {manifest.version} {how}: {result.directory}", flush=True)


def show(arguments: argparse.Namespace) -> int:
    """`show`."""
    entries = list_versions(arguments.store)
    if entries:
        print(table(entries))
    else:
        print(f"no artifacts in {arguments.store}; `hundredfold demo` builds some")
    return 0


def demo(arguments: argparse.Namespace) -> int:
    """`demo`."""
    progress = BuildProgress.on_stderr()
    for model in DEMO_MODELS:
        _tell(build_demo_model(model, arguments.store, progress))
    return 0


def tune(arguments: argparse.Namespace) -> int:
    """`tune`."""
    artifact = _find(arguments)
    manifest = ArtifactManifest.read(artifact)
    if manifest.head is ModelHead.NEXT_TOKEN:
        raise _not_for_decoders("tune", "graphs that generate are measured when they are built")
    counts = [arguments.threads] if arguments.threads else sorted({1, usable_cores()})
    for threads in counts:
        settings = EncoderSettings(intra_op_threads=threads)
        placement = TuningTarget(artifact, manifest, arguments.device, settings)
        seconds = arguments.tune_seconds / len(counts)
        costs = tune_exclusively(placement, seconds, force=True, wait=True)
        assert costs is not None, "forced and waited for, so there is a table; this is a bug"
        print(format_costs(costs), flush=True)
    return 0


def verify(arguments: argparse.Namespace) -> int:
    """`verify`; status 1 when a candidate is not what it was."""
    artifact = _find(arguments)
    if ArtifactManifest.read(artifact).head is ModelHead.NEXT_TOKEN:
        print("every file is what was sealed; graphs that generate are judged when they are built")
        return 0
    whole = True
    for checked in check(artifact):
        print(checked.line, flush=True)
        whole = whole and (checked.verdict is None or checked.verdict.passed)
    return 0 if whole else 1


def report(arguments: argparse.Namespace) -> int:
    """`report`."""
    artifact, progress = _find(arguments), BuildProgress.on_stderr()
    manifest = ArtifactManifest.read(artifact)
    if manifest.head is ModelHead.NEXT_TOKEN:
        print(format_report(manifest, read_generation_report(artifact)))
        return 0
    request = ReportRequest(
        artifact=artifact,
        store=arguments.store,
        runs=arguments.runs,
        threads=arguments.threads,
        seconds=arguments.seconds,
        evaluation=arguments.eval,
        sampling=ExampleSampling(limit=arguments.eval_limit),
        adapter=arguments.adapter,
    )
    setting = read_conditions(request, manifest)
    found = None if arguments.again else read_report(artifact, setting, progress.message)
    if found is not None:
        print(journey_table(found))
        return 0
    fresh = build_report(request, manifest, setting, progress, HuggingFaceHub())
    print(journey_table(fresh), flush=True)  # before it is written, which a full disk may prevent
    progress.message(f"written to {keep(artifact, fresh, progress.message).parent}")
    return 0


def compact(arguments: argparse.Namespace) -> int:
    """`compact`."""
    from build_artifacts.compaction.find import find

    with scratch(arguments.store) as sources:
        checkpoint = resolve(arguments.source, sources, HuggingFaceHub())
        head = TASK_HEADS[select_tasks(checkpoint, None, None)[0]]
        if head is ModelHead.NEXT_TOKEN:
            raise _not_for_decoders("compact", "what pruning left is looked for in encoders")
        compaction = find(load_model(checkpoint.weights, head=head, dtype="float32"))
    print(compaction.describe())
    for cut in compaction.reductions:
        print(
            f"layer {cut.layer}: {len(cut.heads)} heads, {len(cut.ffn_channels)} feed-forward channels"
        )
    return 0


def _not_for_decoders(command: str, why: str) -> BuildError:
    return BuildError(
        f"`{command}` is not for models that generate text: {why}",
        hint="see what was measured with `hundredfold models report`",
    )


def gc(arguments: argparse.Namespace) -> int:
    """`gc`."""
    garbage = find_garbage(arguments.store, arguments.keep)
    print(describe(garbage))
    if garbage.items and (arguments.yes or _agreed()):
        gone = remove(garbage)
        print(f"removed {len(gone)}, {sum(item.size for item in gone) / 1e6:.1f} MB")
    return 0


def _agreed() -> bool:
    if not sys.stdin.isatty():
        raise BuildError("nobody is there to be asked", hint="pass `--yes` to remove all of it")
    try:
        return input("remove them? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _find(arguments: argparse.Namespace) -> Path:
    """The directory of the artifact that `arguments.model` names. Raises ArtifactError."""
    model_id, _, version = arguments.model.partition(":")
    return find_artifact(arguments.store, model_id, version or LATEST_NAME)
