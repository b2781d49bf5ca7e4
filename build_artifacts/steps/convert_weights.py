"""Cached steps on the weights of a checkpoint of any family: convert them, merge an adapter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from build_artifacts.checkpoints.adapter import PROBLEM_TYPES, Adapter
from build_artifacts.checkpoints.checkpoint import CONFIG_NAME, Checkpoint, read_field
from build_artifacts.checkpoints.early_checks import check_architecture
from build_artifacts.checkpoints.models import estimate_memory
from build_artifacts.checkpoints.text_models import is_reduced_to_text
from build_artifacts.steps.dequantize import dequantize
from build_artifacts.steps.dequantize_gguf import dequantize_gguf
from build_artifacts.steps.dequantize_onnx import dequantize_onnx
from build_artifacts.steps.merge import merge
from build_artifacts.steps.text_model import extract_text_model
from build_artifacts.weight_formats.reading import read_float_dtype, read_weight_format
from build_artifacts.workspaces.step_runner import StepRunner
from deployments.artifacts.types import TaskName
from deployments.builds.sources import is_onnx


def convert_weights(
    steps: StepRunner, checkpoint: Checkpoint, tasks: tuple[str, ...]
) -> Checkpoint:
    """Return a checkpoint without packed files, quantized weights and image inputs.

    Weights in a GGUF or ONNX file are converted to fp32 safetensors, quantized weights to fp16 or
    bf16. A checkpoint with image inputs is reduced to its text model, unless sentence-transformers
    saved it. Others are returned unchanged. `tasks[0]` is the main task of the build. Raises
    UnsupportedModel if the weights cannot be converted.
    """
    file = checkpoint.packed
    if file is not None:
        unpack = partial(dequantize_onnx if is_onnx(file.name) else dequantize_gguf, checkpoint)
        detail = f"weights of {file.name} to fp32"
        return _run_cached(steps, "dequantize", "unpack", detail, checkpoint, unpack)
    if (weight_format := read_weight_format(checkpoint.weights)) is not None:
        # Before gigabytes are written. An adapter for another task may change the class.
        if tasks[0] == TaskName.TEXT_GENERATION:
            check_architecture(checkpoint, tasks)
        dtype = read_float_dtype(checkpoint.weights)
        convert = partial(dequantize, checkpoint, weight_format, dtype)
        detail = f"weights in {weight_format.title} to {'fp16' if dtype == 'F16' else 'bf16'}"
        checkpoint = _run_cached(steps, "dequantize", "unpack", detail, checkpoint, convert)
    if is_reduced_to_text(checkpoint):
        detail = "the text model, without image inputs"
        extract = partial(extract_text_model, checkpoint)
        return _run_cached(steps, "text-model", "extract", detail, checkpoint, extract)
    return checkpoint


def merge_adapter(steps: StepRunner, checkpoint: Checkpoint, adapter: Adapter) -> Checkpoint:
    """Merge the adapter into the checkpoint. Raises BuildError if they do not fit.

    The adapter of another model of the same shape fits, so the progress names its base model. It
    names the problem type of a classifier, because peft does not store that of the training.
    """
    steps.warn_of_memory(estimate_memory(checkpoint.weights))
    convert = partial(merge, checkpoint, adapter)
    base = "" if adapter.base is None else f", trained with {adapter.base}"
    problem = ""
    if adapter.task is TaskName.TEXT_CLASSIFICATION:
        stated = read_field(checkpoint.weights / CONFIG_NAME, "problem_type", str)
        problem = f", for {adapter.problem_type or stated or PROBLEM_TYPES[0]}"
    detail = f"LoRA adapter {adapter.name}{base}{problem}"
    return _run_cached(steps, "merge", "merge", detail, checkpoint, convert)


def _run_cached(
    steps: StepRunner,
    key: str,
    name: str,
    detail: str,
    checkpoint: Checkpoint,
    convert: Callable[[Path], object],
) -> Checkpoint:
    """Return `checkpoint` as `convert` wrote it, to the directory of the cached step `key`."""

    def work(into: Path) -> str:
        convert(into)
        return ""

    directory = steps.run_cached(key, name, detail, work)
    return Checkpoint(directory, checkpoint.source, checkpoint.default_id)
