"""Where the rivals get the model from: the checkpoint that the sealed artifact was built from."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.local_model import LocalModel, find_source
from build_artifacts.decoders.builder import run_builder
from build_artifacts.decoders.logits_slicing import WEIGHTS_NAME
from deployments.artifacts.store import file_sha256
from deployments.artifacts.types import Device

WEIGHTS_SUFFIX = ".data"
CONFIG_NAME = "genai_config.json"


class SourceCheckpoint:
    """The checkpoint, fetched when somebody asks for it; what must be unpacked is under `scratch`.

    `source` is what `build_artifacts build` takes; None: the artifact's own.
    """

    def __init__(self, model: LocalModel, source: str | None, scratch: Path) -> None:
        self._model = model
        self._source = source
        self._scratch = scratch

    @cached_property
    def weights(self) -> Path:
        """A directory of safetensors, config and tokenizer. Raises a BuildError."""
        from build_artifacts.sources.hub import HuggingFaceHub
        from build_artifacts.steps.dequantize import dequantize
        from build_artifacts.steps.resolve import resolve

        source = self._source or find_source(self._model.manifest)
        checkpoint = resolve(source, self._scratch, HuggingFaceHub())
        if checkpoint.gguf is not None:
            into = self._scratch / "dequantised"
            into.mkdir()
            checkpoint = dequantize(checkpoint, into)
        return checkpoint.weights

    def genai_directory(self, precision: str | None) -> Path:
        """What onnxruntime-genai's model builder makes of it; None: in the artifact's precision.

        Raises BenchmarkError or a BuildError.
        """
        made = self._scratch / "genai"
        precision = precision or self._model.candidate.precision
        ran = run_builder(self.weights, made, precision=precision, device=Device.CPU)
        if ran.failure is not None:
            raise BenchmarkError(
                f"onnxruntime-genai's model builder fails: {ran.failure}",
                hint="name a directory that it made elsewhere: --genai DIR",
            )
        return made


def has_same_weights(model: LocalModel, directory: Path) -> bool:
    """Whether the graph in `directory` computes with the very weights of the sealed one."""
    sealed = model.manifest.files.get(model.candidate.graph + WEIGHTS_SUFFIX)
    weights = directory / WEIGHTS_NAME
    return sealed is not None and weights.is_file() and file_sha256(weights) == sealed.sha256


def checked_genai(directory: Path) -> Path:
    """The directory itself. Raises BenchmarkError when the model builder did not write it."""
    if not (directory / CONFIG_NAME).is_file():
        raise BenchmarkError(
            f"`{directory}` has no {CONFIG_NAME}",
            hint="name the output directory of onnxruntime-genai's model builder: --genai DIR",
        )
    return directory
