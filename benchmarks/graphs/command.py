"""Every graph of a model side by side: torch, plain ONNX, the usual recipe, ours, OpenVINO.

One process, interleaved rounds. Passes of all threads first, then as an encoder runs on an idle
machine: a batch shared out over passes of one thread at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.common.engine_timing import CoreSplit, Shape, cap_shapes, list_core_splits
from benchmarks.common.local_model import LocalModel
from benchmarks.common.options import (
    DEFAULT_MODEL,
    add_rounds_option,
    add_run_options,
    add_store_option,
    positive_count,
    shape,
)
from benchmarks.common.report import log_progress, start_run, write_result
from benchmarks.common.statistics import Goal
from benchmarks.graphs.candidates import (
    COMMON_RECIPE,
    OPENVINO_BASELINES,
    SEALED,
    TORCH,
    GraphCandidate,
    collect_candidates,
)
from benchmarks.graphs.results import (
    GraphResults,
    PlacementResults,
    describe,
    ratios,
    require_accurate,
    speed_goals,
)
from benchmarks.graphs.run import (
    PlacementRun,
    RunInputs,
    compare_with_reference,
    encoder_settings_for,
    open_run,
)
from build_artifacts.evaluation import Evaluation, score_engine
from build_artifacts.report.build import evaluation_for
from build_artifacts.report.values import ReportRequest, serving
from build_artifacts.storage.workspace import workspace
from deployments.artifacts.manifest import REFERENCE_NAME, Gate
from deployments.artifacts.types import Device
from deployments.engines import EncoderEngine
from deployments.machine import usable_cores
from deployments.tuning import costs as tuning
from deployments.tuning.parity import ReferenceOutputs

ROUNDS = 7
SHAPES = (Shape(1, 16), Shape(1, 128), Shape(8, 128), Shape(32, 64))
SCORED = (TORCH, COMMON_RECIPE, SEALED, *OPENVINO_BASELINES)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks graphs`."""
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help="ID or ID:VERSION (default: %(default)s)",
    )
    add_store_option(parser)
    add_run_options(parser)
    add_rounds_option(parser, ROUNDS)
    parser.add_argument(
        "--threads", type=positive_count, metavar="N", help="default: all usable cores"
    )
    parser.add_argument(
        "--shapes",
        type=shape,
        nargs="+",
        default=SHAPES,
        metavar="BxT",
        help=f"items x tokens (default: {' '.join(one.name for one in SHAPES)})",
    )
    parser.add_argument(
        "--eval", type=Path, metavar="FILE", help="labelled data, as for `build_artifacts build`"
    )
    parser.add_argument(
        "--adapter", type=Path, metavar="DIR", help="the LoRA adapter that the build merged"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, compare, print, write. Raises BenchmarkError, also when an answer was wrong."""
    command: str = arguments.command_line
    facts = start_run("graphs", command, arguments.seed)
    figures = measure(arguments)
    print(describe(figures))
    print(write_result(arguments.out, facts, figures))
    require_accurate(figures)
    return 0


def measure(arguments: argparse.Namespace) -> GraphResults:
    """Both heats; answers are compared after the rounds of each, scored after those of the first.

    Raises BuildError when the checkpoint cannot be found again.
    """
    model = LocalModel.named(arguments.store, arguments.model)
    manifest = model.manifest
    request = ReportRequest(
        artifact=model.directory,
        store=arguments.store,
        threads=arguments.threads,
        evaluation=arguments.eval,
        adapter=arguments.adapter,
    )
    evaluation = evaluation_for(request, manifest)
    ground = RunInputs(
        manifest=manifest,
        reference=ReferenceOutputs.read(model.directory / REFERENCE_NAME),
        shapes=cap_shapes(manifest.max_tokens, arguments.shapes),
        seed=arguments.seed,
    )
    heats: list[PlacementResults] = []
    scores: dict[str, dict[str, float]] = {}
    with workspace(arguments.store) as place:
        found = collect_candidates(request, manifest, place)
        for placement in reversed(list_core_splits(arguments.threads or usable_cores())):
            entered, own = select_systems(found.entered, placement, ground)
            if not own.shapes:
                continue
            with open_run(entered, placement, own) as heat:
                rounds(heat, arguments.rounds)
                heats.append(build_results(heat, entered, own, model))
                if evaluation is not None and not scores:
                    scores = score_systems(heat.engines, evaluation)
    return GraphResults(
        model_id=manifest.id,
        version=manifest.version,
        contenders={contender.name: contender.what for contender in found.entered},
        heats=tuple(heats),
        metric=evaluation.metric if evaluation else None,
        scores=scores,
        missing=found.missing,
        goals=(
            *speed_goals(heats[0].ratios, manifest.max_tokens),
            *(score_goals(evaluation, scores, manifest.gate) if evaluation else ()),
        ),
    )


def select_systems(
    contenders: Sequence[GraphCandidate], placement: CoreSplit, ground: RunInputs
) -> tuple[Sequence[GraphCandidate], RunInputs]:
    """The contenders and shapes of a heat: with passes at once, those that can be shared out."""
    if placement.runs == 1:
        return contenders, ground
    shapes = [one for one in ground.shapes if one.batch > 1]
    own = RunInputs(
        manifest=ground.manifest, reference=ground.reference, shapes=shapes, seed=ground.seed
    )
    return [one for one in contenders if one.shares_out], own


def rounds(heat: PlacementRun, count: int) -> None:
    """All rounds of a heat."""
    for number in range(count):
        heat.run_round(number, f"round {number + 1}/{count}")


def build_results(
    heat: PlacementRun, entered: Sequence[GraphCandidate], ground: RunInputs, model: LocalModel
) -> PlacementResults:
    """What the rounds gave, and how right everybody is."""
    latencies = tuple(cell.latency() for cell in heat.cells)
    settings = encoder_settings_for(heat.placement)
    served = serving(tuning.TuningTarget(model.directory, model.manifest, Device.CPU, settings))
    assert served is not None, f"{SEALED} ran, so something is served; this is a bug"
    return PlacementResults(
        placement=heat.placement,
        served=tuple(variant.name for variant in served.variants),
        latencies=latencies,
        ratios=ratios(latencies),
        answer_agreements=tuple(
            compare_with_reference(heat.engines[one.name], one, ground)
            for one in entered
            if one.name in heat.engines
        ),
        missing=heat.failed,
    )


def score_systems(
    engines: Mapping[str, EncoderEngine], evaluation: Evaluation
) -> dict[str, dict[str, float]]:
    """The task's metrics of those that are worth the time."""
    found = {}
    for name in SCORED:
        if name in engines:
            log_progress(f"scoring {name}")
            found[name] = score_engine(engines[name], evaluation)
    return found


def score_goals(
    evaluation: Evaluation, scores: Mapping[str, Mapping[str, float]], gate: Gate
) -> list[Goal]:
    """What is sealed loses little to torch, and nothing to who else is fast."""
    limits = {TORCH: gate.metric_drop} | dict.fromkeys(OPENVINO_BASELINES, 0.0)
    return [
        Goal.at_most(
            f"points of {evaluation.metric} that {SEALED} is below {name}",
            evaluation.metric_drop(scores[name], scores[SEALED]) if name in scores else None,
            most,
        )
        for name, most in limits.items()
    ]
