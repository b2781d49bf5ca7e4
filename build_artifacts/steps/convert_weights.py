"""Cached steps on the weights of a checkpoint of any family: unpack a file, merge an adapter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from build_artifacts.checkpoints.adapter import Adapter
from build_artifacts.checkpoints.checkpoint import Checkpoint
from build_artifacts.sources.onnx_file import is_onnx
from build_artifacts.steps.dequantize import dequantize
from build_artifacts.steps.dequantize_onnx import dequantize_onnx
from build_artifacts.steps.merge import merge
from build_artifacts.workspaces.step_runner import StepRunner


def unpack_weights(steps: StepRunner, checkpoint: Checkpoint) -> Checkpoint:
    """Convert a checkpoint with weights in a GGUF or ONNX file to safetensors in fp32.

    Return other checkpoints unchanged. Raises UnsupportedModel if the weights cannot be converted.
    """
    file = checkpoint.packed
    if file is None:
        return checkpoint
    convert = partial(dequantize_onnx if is_onnx(file.name) else dequantize, checkpoint)
    detail = f"weights of {file.name} to fp32"
    return _run_cached(steps, "dequantize", "unpack", detail, checkpoint, convert)


def merge_adapter(steps: StepRunner, checkpoint: Checkpoint, adapter: Adapter) -> Checkpoint:
    """Merge the adapter into the checkpoint. Raises BuildError if they do not fit.

    The adapter of another model of the same shape fits, so the progress names its base model.
    """
    convert = partial(merge, checkpoint, adapter)
    base = "" if adapter.base is None else f", trained with {adapter.base}"
    detail = f"LoRA adapter {adapter.name}{base}"
    return _run_cached(steps, "merge", "merge", detail, checkpoint, convert)


def _run_cached(
    steps: StepRunner,
    key: str,
    name: str,
    detail: str,
    checkpoint: Checkpoint,
    convert: Callable[[Path], Checkpoint],
) -> Checkpoint:
    """Return `checkpoint` as `convert` wrote it, to the directory of the cached step `key`."""

    def work(into: Path) -> str:
        convert(into)
        return ""

    directory = steps.run_cached(key, name, detail, work)
    return Checkpoint(directory, checkpoint.source, checkpoint.default_id)
