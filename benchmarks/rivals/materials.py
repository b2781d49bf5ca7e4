"""Files that rivals serve: checkpoint, fp32 graph, graph of the artifact, generative models."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import orjson

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.local_model import LocalModel, find_source
from benchmarks.common.source_checkpoint import SourceCheckpoint
from build_artifacts.checkpoints.checkpoint import Checkpoint
from deployments.artifacts.manifest import TOKENIZER_NAME

FASTEMBED_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
PROGRAMS = Path(__file__).with_name("programs")
GENAI_PRECISION = "int4"  # precision of the weights that genai's model builder writes
MLSERVER_MODEL = "embedder"


@dataclass(frozen=True)
class Materials:
    """Files and directories that the commands of rivals refer to, prepared on first use.

    All prepared files go to `scratch`. Every property may raise ServeError.
    """

    model: LocalModel
    generator: LocalModel | None
    scratch: Path
    logs: Path  # directory for the logs of all servers

    @cached_property
    def programs(self) -> Path:
        """Directory with the server scripts of this package."""
        return PROGRAMS

    @cached_property
    def graph(self) -> Path:
        """ONNX file of the artifact that Hundredfold serves."""
        return (self.model.directory / self.model.candidate.graph).resolve()

    @cached_property
    def tokenizer(self) -> Path:
        return (self.model.directory / TOKENIZER_NAME).resolve()

    @cached_property
    def checkpoint(self) -> Path:
        """Directory of the checkpoint that the artifact was built from."""
        return self._checkpoint.weights

    @cached_property
    def float_graph(self) -> Path:
        """Exported fp32 ONNX graph of the checkpoint, whose first output is the pooled vectors."""
        from build_artifacts.checkpoints.models import load_model
        from build_artifacts.families import read_metadata
        from build_artifacts.recipes import ExportRecipe
        from build_artifacts.steps.export import export

        metadata = read_metadata(self._checkpoint, self.model.manifest.tasks)
        model = load_model(self.checkpoint, head=metadata.loaded_head, dtype="float32")
        directory = self._directory("float")
        return export(model, metadata, ExportRecipe(dtype="float32"), directory / "model.onnx")

    @cached_property
    def fastembed(self) -> Path:
        """Directory with the fp32 graph and the tokenizer in the layout of fastembed."""
        directory = self._directory("fastembed")
        os.link(self.float_graph, directory / "model.onnx")
        for name in FASTEMBED_FILES:
            os.symlink(self.checkpoint / name, directory / name)
        return directory

    @cached_property
    def mlserver(self) -> Path:
        """Model repository of MLServer with one model that runs the artifact's graph."""
        directory = self._directory("mlserver")
        extra = {
            "engine": "onnxruntime",
            "model": str(self.graph),
            "tokenizer": str(self.tokenizer),
        }
        settings = {
            "name": MLSERVER_MODEL,
            "implementation": "mlserver_runtime.EmbeddingRuntime",
            "parameters": {"extra": extra},
        }
        (directory / "model-settings.json").write_bytes(orjson.dumps(settings))
        return directory

    @cached_property
    def gguf(self) -> Path:
        """GGUF file that the generative artifact was built from."""
        from build_artifacts.sources.gguf import resolve_gguf
        from build_artifacts.sources.hub import HuggingFaceHub

        source = find_source(self._generator.manifest)
        file = resolve_gguf(source, self._directory("gguf"), HuggingFaceHub()).packed
        assert file is not None, "bug: a GGUF source has no file"
        return file

    @cached_property
    def genai(self) -> Path:
        """Output directory of onnxruntime-genai's model builder."""
        source = SourceCheckpoint(self._generator, None, self._directory("genai"))
        return source.genai_directory(GENAI_PRECISION)

    @cached_property
    def _checkpoint(self) -> Checkpoint:
        from build_artifacts.sources.hub import HuggingFaceHub
        from build_artifacts.steps.resolve import resolve

        source = find_source(self.model.manifest)
        return resolve(source, self._directory("source"), HuggingFaceHub())

    @property
    def _generator(self) -> LocalModel:
        if self.generator is None:
            raise BenchmarkError(
                "the store has no generative model", hint="name one with --generator ID"
            )
        return self.generator

    def _directory(self, name: str) -> Path:
        """Return an empty directory. Delete files that a failed preparation left there."""
        directory = self.scratch / name
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        return directory
