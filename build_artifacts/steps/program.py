"""Export of an encoder model to a traced torch program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from build_artifacts.checkpoints.architectures import min_trace_tokens
from build_artifacts.checkpoints.export_wrapper import input_names, wrap_for_export
from build_artifacts.checkpoints.metadata import CheckpointMetadata
from build_artifacts.checkpoints.models import TorchModel
from build_artifacts.errors import convert_library_error
from build_artifacts.steps.export import build_example_inputs, fast_tracing
from deployments.engines.pytorch.program import write_program

if TYPE_CHECKING:
    import torch


def save_program(model: TorchModel, metadata: CheckpointMetadata, path: Path) -> None:
    """Write the program of `model` to `path`; `model` stays unchanged.

    Raises UnsupportedModel if the model cannot be traced, OSError if `path` cannot be written.
    """
    from transformers.exporters import DynamoConfig, DynamoExporter

    names = input_names(model, metadata)
    inputs, shapes = build_example_inputs(
        names, min_trace_tokens(model.config), metadata.max_tokens
    )
    config = DynamoConfig(dynamic=True, dynamic_shapes=shapes)
    rows = wrap_for_export(model, metadata)

    def trace() -> torch.export.ExportedProgram:
        exported = DynamoExporter().export(rows, inputs, config=config)
        # transformers 5.17 returns the program itself. `bench gpu` supports that version too.
        return getattr(exported, "program", exported)

    write_traced(trace, metadata, path)


def write_traced(
    trace: Callable[[], torch.export.ExportedProgram],
    metadata: CheckpointMetadata,
    path: Path,
    *,
    in_place: bool = False,
) -> None:
    """Write the program that `trace` returns to `path`.

    With `in_place` the program may modify its inputs, as the KV cache of a decoder requires.
    Raises OSError if the file cannot be written, and UnsupportedModel for any other failure.
    """
    import torch

    try:
        with torch.no_grad(), fast_tracing():
            write_program(trace(), path, in_place=in_place)
    except OSError:
        raise
    except Exception as exc:  # tracing runs model code, which may raise any exception
        raise convert_library_error(
            exc,
            f"`{metadata.architecture}` cannot be traced to a torch program",
            hint="the build log has the details; use its ONNX graphs",
        ) from exc
