"""Handlers of the compiler's commands: parsed arguments in, exit code out. Results go to stdout."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from build_artifacts.build_devices import engine_settings, fit_to_host, has_device
from build_artifacts.checkpoints.metadata import select_tasks
from build_artifacts.checkpoints.models import load_model
from build_artifacts.decoders.generation_report import (
    format_report,
    read_generation_report,
)
from build_artifacts.demo import ALL_DEMO_MODELS, DEMO_MODELS, build_demo_model
from build_artifacts.demo_variants import build_demo_variants
from build_artifacts.errors import BuildError
from build_artifacts.evaluation import ExampleSampling
from build_artifacts.families.base import BuildBudget
from build_artifacts.gpu_placement import with_gpu_attention, with_gpu_placement
from build_artifacts.pipeline import BuildRequest, BuildResult, build
from build_artifacts.progress import BuildProgress, copy_stderr
from build_artifacts.pruning.prune import Pruning
from build_artifacts.pulls import build_first_demo_model, drain, pull_or_follow
from build_artifacts.recipes import SEARCH_PRESETS, BuildRecipe
from build_artifacts.report.build import build_report
from build_artifacts.report.output import format_stages, read_report, write_report
from build_artifacts.report.values import (
    DEFAULT_RUNS,
    DEFAULT_SECONDS,
    Report,
    ReportRequest,
    read_conditions,
)
from build_artifacts.sources.hub import HuggingFaceHub
from build_artifacts.steps.convert_weights import unpack_weights
from build_artifacts.steps.resolve import make_absolute, resolve
from build_artifacts.verification import CandidateCheck, verify_candidates
from build_artifacts.workspaces.opening import open_temporary_workspace
from build_artifacts.workspaces.step_runner import StepRunner
from deployments.artifacts.manifest import GENERATION_NAME, ArtifactManifest
from deployments.artifacts.types import Device, ModelHead
from deployments.background_process import end_with_standard_input, limit_memory, lower_priority
from deployments.builds.process import BUSY
from deployments.builds.queue import BuildQueue
from deployments.builds.record import BuildState
from deployments.builds.sources import default_model_id
from deployments.command_line import FAILED, OK, print_error
from deployments.console import format_table, print_json, print_text
from deployments.machine import usable_cores
from deployments.plan.plan_file import read_plan
from deployments.plan.resolution import find_named
from deployments.tasks import find_head
from deployments.tuning.costs import CostTable, TuningTarget
from deployments.tuning.tuner import tune_exclusively


def build_model(arguments: argparse.Namespace) -> int:
    request = BuildRequest(
        ref=arguments.source,
        store=arguments.store,
        id=arguments.id,
        task=arguments.task,
        adapter=arguments.adapter,
        recipe=_build_recipe(arguments),
        budget=BuildBudget(
            search_seconds=arguments.search_seconds,
            tune_seconds=arguments.tune_seconds,
            evaluation=arguments.eval,
            sampling=ExampleSampling(limit=arguments.eval_limit),
        ),
        force=arguments.force,
        pruning=_build_pruning(arguments),
    )
    with BuildProgress.on_stderr() as progress:
        _print_result(build(request, progress))
    return OK


def _build_recipe(arguments: argparse.Namespace) -> BuildRecipe:
    placed = with_gpu_placement(
        fit_to_host(SEARCH_PRESETS[arguments.search]),
        tensor_parallel_size=arguments.tensor_parallel_size,
        kv_offload=arguments.offload_kv_cache,
    )
    recipe = with_gpu_attention(placed, arguments.attention)
    return replace(recipe, gate=recipe.gate.model_copy(update=dict(arguments.gate)))


def _build_pruning(arguments: argparse.Namespace) -> Pruning | None:
    if arguments.prune is not None:
        return Pruning(fraction=arguments.prune, data=arguments.prune_data)
    if arguments.prune_data is not None:
        raise BuildError("`--prune-data` has no effect without `--prune`", hint="add `--prune`")
    return None


def _print_result(result: BuildResult) -> None:
    manifest = result.manifest
    state = "was built already" if result.already_built else "is built"
    print(f"{manifest.id} {manifest.version} {state}: {result.directory}", flush=True)


def pull_model(arguments: argparse.Namespace) -> int:
    """Build the model here, or wait for the process that builds it.

    Ctrl-C cancels the build if this command queued it and no other process runs it.
    """
    source = make_absolute(arguments.source)
    queue = BuildQueue(arguments.store)
    model_id = arguments.id or default_model_id(source)
    record, is_new = queue.submit(model_id, source)
    if record.source != source:
        raise BuildError(
            f"{model_id} is queued or runs as a build of `{record.source}`, not of `{source}`",
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


def drain_queue(arguments: argparse.Namespace) -> int:
    queue = BuildQueue(arguments.store)
    if arguments.for_server:
        end_with_standard_input(queue.interrupt)
        lower_priority()
    if arguments.max_memory_bytes:
        limit_memory(arguments.max_memory_bytes)
    with copy_stderr() as stream:
        failed = drain(queue, stream)
    if arguments.for_server:  # the records tell the server which builds failed
        return BUSY if failed is None else OK
    if failed is None:
        return print_error(f"another process already runs the queued builds of {arguments.store}")
    return FAILED if failed else OK


def demo(arguments: argparse.Namespace) -> int:
    with_gpu = not arguments.no_gpu and has_device(Device.GPU)
    if arguments.first:
        with copy_stderr() as stream:
            for built in build_first_demo_model(arguments.store, stream, with_gpu=with_gpu):
                _print_result(built)
        return OK
    with BuildProgress.on_stderr() as progress:
        if arguments.variants:
            for built in build_demo_variants(arguments.store, progress, with_gpu=with_gpu):
                _print_result(built)
            return OK
        for model in ALL_DEMO_MODELS if arguments.all else DEMO_MODELS:
            result = build_demo_model(model, arguments.store, progress, with_gpu=with_gpu)
            _print_result(result)
    return OK


def tune(arguments: argparse.Namespace) -> int:
    artifact = _find(arguments)
    manifest = ArtifactManifest.read(artifact)
    if manifest.head is ModelHead.NEXT_TOKEN:
        raise _encoders_only("tune", "generative graphs are measured by the build")
    device: Device = arguments.device
    if not has_device(device):
        raise BuildError(
            "`--device gpu` measures on a GPU, and this host has none that ONNX Runtime can use",
            hint="`hundredfold doctor` says why",
        )
    # The number of threads affects forward passes on the CPU only.
    usual = sorted({1, usable_cores()}) if device is Device.CPU else [1]
    counts = [arguments.threads] if arguments.threads else usual
    tables = []
    for threads in counts:
        target = TuningTarget(artifact, manifest, device, engine_settings(device, threads))
        seconds = arguments.tune_seconds / len(counts)
        costs = tune_exclusively(target, seconds, force=True, wait=True)
        if costs is None:
            raise AssertionError("bug: forced tuning returned no cost table")
        tables.append(costs)
        if not arguments.json:
            print(format_costs(costs), flush=True)
    return print_json([json.loads(costs.to_json()) for costs in tables]) if arguments.json else OK


def format_costs(table: CostTable) -> str:
    """Format latencies, a row per shape and a column per variant; `*` marks the served variant."""
    selection = dict(table.selection)
    rows = [["items x tokens", *(row.variant.name for row in table.rows)]]
    for shape in selection:
        cells = [str(shape)]
        for row in table.rows:
            ms = row.by_shape().get(shape)
            mark = "*" if row.variant == selection[shape] else " "
            cells.append("-" if ms is None else f"{ms:.2f}{mark}")
        rows.append(cells)
    threads = f"{table.threads} thread{'s' if table.threads > 1 else ''} a pass"
    head = f"{table.host.name}, {table.host.cores} cores, {threads}; milliseconds, * serves"
    rejected = [f"{name} violates the gate here: {why}" for name, why in table.rejected.items()]
    unmeasured = [f"{name} was not measured here: {why}" for name, why in table.unmeasured.items()]
    return "\n".join([head, format_table(rows, align_right=True), *rejected, *unmeasured])


def verify(arguments: argparse.Namespace) -> int:
    """Verify an artifact. Return FAILED if a candidate violates the accuracy gate on this host.

    For a generative model, only the digests are verified. Raises ArtifactError if a digest differs.
    """
    artifact = _find(arguments)
    manifest = ArtifactManifest.read(artifact)
    if manifest.head is ModelHead.NEXT_TOKEN:
        note = "every digest matches; the accuracy of generative graphs is checked by the build"
        if not arguments.json:
            return print_text(note)
        unchecked = [CandidateCheck(candidate, None, note) for candidate in manifest.candidates]
        return print_json([checked.to_json() for checked in unchecked])
    checks = []
    for checked in verify_candidates(artifact):
        checks.append(checked)
        if not arguments.json:
            print(checked.line, flush=True)
    if arguments.json:
        print_json([checked.to_json() for checked in checks])
    return FAILED if any(checked.has_failed for checked in checks) else OK


def report(arguments: argparse.Namespace) -> int:
    artifact = _find(arguments)
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
        sampling=ExampleSampling(limit=arguments.eval_limit),
        adapter=arguments.adapter,
        prune_data=arguments.prune_data,
    )
    with BuildProgress.on_stderr() as progress:
        _report_encoder(request, manifest, progress, force=arguments.force, as_json=arguments.json)
    return OK


# Options of `report` that change what is measured.
_MEASURING_OPTIONS = (
    *("force", "runs", "threads", "seconds"),
    *("eval", "eval_limit", "adapter", "prune_data"),
)


def _report_generator(
    artifact: Path, manifest: ArtifactManifest, arguments: argparse.Namespace
) -> int:
    """Print the measurements of a generative model from its build. Reject measuring options."""
    for name in _MEASURING_OPTIONS:
        value = getattr(arguments, name)
        if value is not None and value is not False:
            option = name.replace("_", "-")
            raise _encoders_only(f"report --{option}", "the build measures and evaluates them")
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
    if as_json:
        print_json(found.model_dump(mode="json"))
    else:
        print_text(format_stages(found))


def compact(arguments: argparse.Namespace) -> int:
    from build_artifacts.compaction.find import find

    with BuildProgress.on_stderr() as progress, open_temporary_workspace(arguments.store) as files:
        checkpoint = resolve(arguments.source, files.directory("sources"), HuggingFaceHub())
        head = find_head(select_tasks(checkpoint, None, None)[0])
        if head is ModelHead.NEXT_TOKEN:
            raise _encoders_only("compact", "the compiler compacts no generative models")
        checkpoint = unpack_weights(StepRunner(files, progress), checkpoint)
        compaction = find(load_model(checkpoint.weights, head=head, dtype="float32"))
    if arguments.json:
        return print_json(compaction.model_dump(mode="json"))
    rows = [
        (str(cut.layer), str(len(cut.heads)), str(len(cut.ffn_channels)))
        for cut in compaction.reductions
    ]
    table = format_table([("layer", "heads", "feed-forward channels"), *rows], align_right=True)
    return print_text(f"{compaction.describe()}\n{table}" if rows else compaction.describe())


def _encoders_only(command: str, reason: str) -> BuildError:
    return BuildError(
        f"`{command}` does not support models that generate text: {reason}",
        hint="show the measurements of the build with `hundredfold models report`",
    )


def _find(arguments: argparse.Namespace) -> Path:
    """Return the directory of the version named `arguments.model`.

    Raises ArtifactError, or BadSetting if the `plan.json` of the store is invalid.
    """
    return find_named(arguments.store, read_plan(arguments.store), arguments.model)
