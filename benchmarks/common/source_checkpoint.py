"""Checkpoint from which the measured artifact was built. The baselines run this checkpoint."""

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
    """Checkpoint that is fetched on first use. Unpacked files go to `scratch`.

    `source` has the form that `hundredfold build` takes. None means the artifact's source.
    """

    def __init__(self, model: LocalModel, source: str | None, scratch: Path) -> None:
        self._model = model
        self._source = source
        self._scratch = scratch

    @cached_property
    def weights(self) -> Path:
        """Directory of safetensors, config and tokenizer. Raises BuildError if unavailable."""
        from build_artifacts.sources.hub import HuggingFaceHub
        from build_artifacts.steps.dequantize_gguf import dequantize_gguf
        from build_artifacts.steps.resolve import resolve

        source = self._source or find_source(self._model.manifest)
        checkpoint = resolve(source, self._scratch, HuggingFaceHub())
        if checkpoint.packed is not None:
            directory = self._scratch / "dequantized"
            directory.mkdir()
            dequantize_gguf(checkpoint, directory)
            return directory
        return checkpoint.weights

    def genai_directory(self, precision: str | None) -> Path:
        """Run onnxruntime-genai's model builder. Return its output directory.

        `precision` None means the artifact's precision. Raises BenchmarkError if the builder fails,
        or BuildError if the checkpoint is unavailable.
        """
        output = self._scratch / "genai"
        precision = precision or self._model.candidate.precision
        result = run_builder(self.weights, output, precision=precision, device=Device.CPU)
        if result.failure is not None:
            raise BenchmarkError(
                f"onnxruntime-genai's model builder failed: {result.failure}",
                hint="name an existing output directory of the builder: --genai DIR",
            )
        return output


def has_same_weights(model: LocalModel, directory: Path) -> bool:
    """Return whether the weights file in `directory` has the digest of the artifact's weights."""
    sealed = model.manifest.files.get(model.candidate.graph + WEIGHTS_SUFFIX)
    weights = directory / WEIGHTS_NAME
    return sealed is not None and weights.is_file() and file_sha256(weights) == sealed.sha256


def require_genai_directory(directory: Path) -> Path:
    """Return `directory`. Raise BenchmarkError if the model builder did not write it."""
    if not (directory / CONFIG_NAME).is_file():
        raise BenchmarkError(
            f"`{directory}` has no {CONFIG_NAME}",
            hint="name the output directory of onnxruntime-genai's model builder: --genai DIR",
        )
    return directory
