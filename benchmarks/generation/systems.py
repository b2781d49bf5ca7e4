"""The measured systems. A baseline that fails to open is skipped."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.local_model import LocalModel
from benchmarks.common.report import log_progress
from benchmarks.common.source_checkpoint import (
    SourceCheckpoint,
    has_same_weights,
    require_genai_directory,
)
from benchmarks.generation.http_system import HttpGenerator
from benchmarks.generation.in_process import InProcessGenerator
from benchmarks.generation.other_engines import (
    GenaiSystem,
    LlamaCppSystem,
    PagedTransformersSystem,
    TransformersSystem,
)
from benchmarks.generation.streams import (
    GENAI,
    LLAMA_CPP,
    NO_DRAFTS,
    OVER_HTTP,
    PAGED_TRANSFORMERS,
    TRANSFORMERS,
    StreamingSystem,
    System,
)
from deployments.config import SchedulingSettings
from deployments.errors import ServeError


@dataclass(frozen=True, slots=True)
class SystemFactory:
    """Factory that opens the measured systems from command line, model and checkpoint."""

    arguments: argparse.Namespace
    model: LocalModel
    checkpoint: SourceCheckpoint
    runner: asyncio.Runner
    stack: ExitStack  # closes the opened systems
    kv_slots: int
    threads: int
    context: int  # maximum number of tokens of a prompt and its answer together
    notes: list[str] = field(default_factory=list)  # differences between systems
    same_model: set[str] = field(default_factory=set)  # systems that run this version of the model

    def served(self) -> System:
        """Connect to the server at `--url`."""
        local = self.model.manifest
        generator = HttpGenerator.connect(self.arguments.url, local.id)
        if generator.version != local.version:
            self.notes.append(
                f"the server has version {generator.version}, this process has {local.version}"
            )
        else:
            self.same_model.add(OVER_HTTP)
        return StreamingSystem(OVER_HTTP, generator, self.runner)

    def no_drafts(self) -> System:
        """Open the same model in this process without speculative decoding."""
        generator = InProcessGenerator(
            self.model,
            kv_slots=self.kv_slots,
            threads=self.threads,
            events=self.runner.get_loop(),
            scheduling=SchedulingSettings(max_draft_tokens=0),
        )
        self.stack.callback(generator.close)
        self.same_model.add(NO_DRAFTS)
        return StreamingSystem(NO_DRAFTS, generator, self.runner)

    def genai(self) -> System:
        """Open the graph of `--genai` in onnxruntime-genai. Without `--genai`, build a graph."""
        named = self.arguments.genai
        if named is None:
            directory = self.checkpoint.genai_directory(self.arguments.genai_precision)
        else:
            directory = require_genai_directory(named)
        if not has_same_weights(self.model, directory):
            self.notes.append(f"the weights of {GENAI} differ from those of the sealed graph")
        return GenaiSystem(directory, self.threads)

    def transformers(self) -> System:
        """Open the checkpoint in transformers, to run `generate`."""
        return TransformersSystem(self.checkpoint.weights, self._eos_token_ids, self.threads)

    def paged(self) -> System:
        """Open the checkpoint in transformers, to run continuous batching."""
        system = PagedTransformersSystem(
            self.checkpoint.weights,
            self._eos_token_ids,
            self.threads,
            kv_slots=self.kv_slots,
            context=self.context,
        )
        self.stack.callback(system.close)
        return system

    @property
    def _eos_token_ids(self) -> Sequence[int]:
        generation_config = self.model.manifest.generation_config
        if generation_config is None:
            raise AssertionError("bug: the model does not generate text")
        return generation_config.eos_token_ids

    def llama(self) -> System:
        """Open the file of `--gguf` in llama.cpp."""
        if self.arguments.gguf is None:
            raise BenchmarkError("llama.cpp requires a GGUF file", hint="name one with --gguf FILE")
        return LlamaCppSystem.open(self.arguments.gguf, self.context, self.threads)


# Name on the command line -> (name in the results, function that opens the system).
BASELINES: Mapping[str, tuple[str, Callable[[SystemFactory], System]]] = {
    "no-drafts": (NO_DRAFTS, SystemFactory.no_drafts),
    "http": (OVER_HTTP, SystemFactory.served),
    "genai": (GENAI, SystemFactory.genai),
    "transformers": (TRANSFORMERS, SystemFactory.transformers),
    "paged": (PAGED_TRANSFORMERS, SystemFactory.paged),
    "llama": (LLAMA_CPP, SystemFactory.llama),
}


def open_baselines(
    factory: SystemFactory, skip: Collection[str]
) -> tuple[list[System], dict[str, str]]:
    """Open all baselines except `skip`.

    Return the opened baselines, and the error message of each baseline that failed, by its name.
    """
    opened: list[System] = []
    missing: dict[str, str] = {}
    for name, (label, open_system) in BASELINES.items():
        if name in skip:
            continue
        try:
            opened.append(open_system(factory))
        except ServeError as exc:
            missing[label] = exc.message
            log_progress(f"{label} is skipped: {exc.message}")
    return opened, missing
