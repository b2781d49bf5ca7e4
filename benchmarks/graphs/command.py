"""Benchmark of all graphs of a model, in latency and accuracy.

Graphs are torch, ONNX fp32, two recipes of dynamic int8 (one is COMMON_RECIPE), OpenVINO and the
candidates of the sealed artifact. There are two runs of several rounds. Every round measures all
graphs in one process. The first run uses one forward pass on all threads. The second run splits
each batch over one pass per core, as an idle encoder does. A host with one core has no second run.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.common.engine_timing import CoreSplit, cap_shapes, list_core_splits
from benchmarks.common.local_model import LocalModel
from benchmarks.common.options import (
    DEFAULT_MODEL,
    add_rounds_option,
    add_run_options,
    parse_shape,
)
from benchmarks.common.report import log_progress, publish, start_run
from benchmarks.common.statistics import Goal
from benchmarks.graphs.candidates import (
    COMMON_RECIPE,
    DYNAMIC,
    OPENVINO_BASELINES,
    SEALED,
    TORCH,
    GraphCandidate,
    collect_candidates,
)
from benchmarks.graphs.results import (
    CoreSplitResults,
    GraphResults,
    build_tables,
    compute_ratios,
    describe,
    require_accurate,
    speed_goals,
)
from benchmarks.graphs.run import (
    CoreSplitRun,
    RunInputs,
    compare_with_reference,
    encoder_settings_for,
    open_run,
)
from build_artifacts.evaluation import Evaluation, score_engine
from build_artifacts.report.build import load_report_evaluation
from build_artifacts.report.values import ReportRequest, read_served_variants
from build_artifacts.workspaces.opening import open_temporary_workspace
from deployments.artifacts.manifest import REFERENCE_NAME, Gate
from deployments.artifacts.types import Device
from deployments.engines import EncoderEngine
from deployments.host.machine import usable_cores
from deployments.terminal.command_line import positive_count
from deployments.terminal.console import add_store_option
from deployments.tuning.costs import TuningTarget
from deployments.tuning.parity import ReferenceOutputs

ROUNDS = 7
SHAPES = tuple(map(parse_shape, ("1x16", "1x128", "8x128", "32x64")))
SCORED = (TORCH, COMMON_RECIPE, SEALED, DYNAMIC, *OPENVINO_BASELINES)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help="ID or ID@VERSION (default: %(default)s)",
    )
    add_store_option(parser)
    add_run_options(parser)
    add_rounds_option(parser, ROUNDS)
    parser.add_argument(
        "--threads", type=positive_count, metavar="N", help="default: all usable cores"
    )
    parser.add_argument(
        "--shapes",
        type=parse_shape,
        nargs="+",
        default=SHAPES,
        metavar="BxT",
        help=f"items x tokens (default: {' '.join(map(str, SHAPES))})",
    )
    parser.add_argument(
        "--eval", type=Path, metavar="FILE", help="labeled data, as for `hundredfold build`"
    )
    parser.add_argument(
        "--adapter", type=Path, metavar="DIR", help="the LoRA adapter that the build merged"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and write the results.

    Raises ServeError for a failure, or if a graph that must pass the accuracy gate violates it.
    """
    metadata = start_run("graphs", arguments.command_line, arguments.seed)
    results = measure(arguments)
    publish(arguments, metadata, results, build_tables(results), text=describe(results))
    require_accurate(results)
    return 0


def measure(arguments: argparse.Namespace) -> GraphResults:
    """Measure every core split. Compute the task metrics only once, with the split of one pass.

    Raise BuildError if the source checkpoint is missing or has changed.
    """
    model = LocalModel.open(arguments.store, arguments.model)
    manifest = model.manifest
    request = ReportRequest(
        artifact=model.directory,
        store=arguments.store,
        threads=arguments.threads,
        evaluation=arguments.eval,
        adapter=arguments.adapter,
    )
    evaluation = load_report_evaluation(request, manifest)
    inputs = RunInputs(
        manifest=manifest,
        reference=ReferenceOutputs.read(model.directory / REFERENCE_NAME),
        shapes=cap_shapes(manifest.max_tokens, arguments.shapes),
        seed=arguments.seed,
    )
    runs: list[CoreSplitResults] = []
    scores: dict[str, dict[str, float]] = {}
    with open_temporary_workspace(arguments.store) as directory:
        collected = collect_candidates(request, manifest, directory)
        for split in reversed(list_core_splits(arguments.threads or usable_cores())):
            candidates, run_inputs = select_systems(collected.candidates, split, inputs)
            if not run_inputs.shapes:
                continue
            with open_run(candidates, split, run_inputs) as run:
                run_rounds(run, arguments.rounds)
                runs.append(build_results(run, candidates, run_inputs, model))
                if evaluation is not None and split.passes == 1:
                    scores = score_systems(run.engines, evaluation)
    single_pass = next(run for run in runs if run.split.passes == 1)
    return GraphResults(
        model_id=manifest.id,
        version=manifest.version,
        systems={candidate.name: candidate.what for candidate in collected.candidates},
        runs=tuple(runs),
        metric=evaluation.metric if evaluation else None,
        scores=scores,
        missing=collected.missing,
        goals=(
            *speed_goals(single_pass.ratios, manifest.max_tokens),
            *(score_goals(evaluation, scores, manifest.gate) if evaluation else ()),
        ),
    )


def select_systems(
    candidates: Sequence[GraphCandidate], split: CoreSplit, inputs: RunInputs
) -> tuple[Sequence[GraphCandidate], RunInputs]:
    """Select the candidates and shapes of a run.

    A run with concurrent passes splits batches. It therefore leaves out shapes of one item and
    candidates whose `can_split` is False.
    """
    if split.passes == 1:
        return candidates, inputs
    shapes = [shape for shape in inputs.shapes if shape.items > 1]
    return [c for c in candidates if c.can_split], replace(inputs, shapes=shapes)


def run_rounds(run: CoreSplitRun, rounds: int) -> None:
    for number in range(rounds):
        run.run_round(number, f"round {number + 1}/{rounds}")


def build_results(
    run: CoreSplitRun, candidates: Sequence[GraphCandidate], inputs: RunInputs, model: LocalModel
) -> CoreSplitResults:
    """Summarize the rounds and compare the outputs of every open engine with the reference."""
    latencies = tuple(timing.latency() for timing in run.timings)
    settings = encoder_settings_for(run.split)
    served = read_served_variants(
        TuningTarget(model.directory, model.manifest, Device.CPU, settings)
    )
    if served is None:
        raise AssertionError(f"bug: {SEALED} was measured, but no variant is served")
    return CoreSplitResults(
        split=run.split,
        served=tuple(variant.name for variant in served.variants),
        latencies=latencies,
        ratios=compute_ratios(latencies),
        parity=tuple(
            compare_with_reference(run.engines[candidate.name], candidate, inputs)
            for candidate in candidates
            if candidate.name in run.engines
        ),
        missing=run.failed,
    )


def score_systems(
    engines: Mapping[str, EncoderEngine], evaluation: Evaluation
) -> dict[str, dict[str, float]]:
    """Compute the task metric of every open engine whose name is in SCORED."""
    scores = {}
    for name in SCORED:
        if name in engines:
            log_progress(f"scoring {name}")
            scores[name] = score_engine(engines[name], evaluation)
    return scores


def score_goals(
    evaluation: Evaluation, scores: Mapping[str, Mapping[str, float]], gate: Gate
) -> list[Goal]:
    """Build the goals for the task metric of the artifact.

    The metric may be lower than that of torch by the limit of the accuracy gate. It must not be
    lower than that of OpenVINO.
    """
    limits = {TORCH: gate.metric_drop} | dict.fromkeys(OPENVINO_BASELINES, 0.0)
    return [
        Goal.at_most(
            f"drop of {evaluation.metric} from {name} to {SEALED}",
            evaluation.metric_drop(scores[name], scores[SEALED]) if name in scores else None,
            limit,
        )
        for name, limit in limits.items()
    ]
