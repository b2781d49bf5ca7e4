"""Who takes part: the others are opened one by one, and who cannot be is told, not waited for."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.local_model import LocalModel
from benchmarks.common.report import log_progress
from benchmarks.generation.checkpoints import SourceCheckpoint, checked_genai, has_same_weights
from benchmarks.generation.http import HttpGenerator
from benchmarks.generation.in_process import InProcessGenerator
from benchmarks.generation.other_engines import (
    GenaiSystem,
    LlamaCppSystem,
    PagedTransformersSystem,
    TransformersSystem,
)
from benchmarks.generation.streams import (
    GENAI,
    LLAMA,
    NO_DRAFTS,
    OVER_HTTP,
    PAGED,
    TRANSFORMERS,
    StreamingSystem,
    System,
)
from deployments.config import SchedulingSettings
from deployments.errors import ServeError


@dataclass(frozen=True, slots=True)
class SystemFactory:
    """What is needed to open a contender."""

    arguments: argparse.Namespace
    model: LocalModel
    origin: SourceCheckpoint
    runner: asyncio.Runner
    stack: ExitStack  # closes what was opened
    rows: int
    threads: int
    context: int  # tokens of prompt and answer
    notes: list[str] = field(default_factory=list)  # on how far they can be compared

    def served(self) -> System:
        """The server at `--url`."""
        here = self.model.manifest
        service = HttpGenerator.found(self.arguments.url, here.id)
        if service.version != here.version:
            self.notes.append(f"the server has version {service.version}, this is {here.version}")
        return StreamingSystem(OVER_HTTP, service, self.runner)

    def undrafted(self) -> System:
        """The same model in this process, a token a step."""
        service = InProcessGenerator(
            self.model,
            rows=self.rows,
            threads=self.threads,
            events=self.runner.get_loop(),
            rules=SchedulingSettings(max_draft_tokens=0),
        )
        self.stack.callback(service.close)
        return StreamingSystem(NO_DRAFTS, service, self.runner)

    def genai(self) -> System:
        """onnxruntime-genai on `--genai`, or on what its builder makes now."""
        given = self.arguments.genai
        if given is None:
            directory = self.origin.genai_directory(self.arguments.genai_precision)
        else:
            directory = checked_genai(given)
        if not has_same_weights(self.model, directory):
            self.notes.append(f"{GENAI} computes with other weights than the sealed graph")
        return GenaiSystem(directory, self.threads)

    def transformers(self) -> System:
        """`generate` on the checkpoint."""
        return TransformersSystem(self.origin.weights, self._end_tokens, self.threads)

    def paged(self) -> System:
        """Continuous batching of transformers on the checkpoint."""
        loop = PagedTransformersSystem(self.origin.weights, self._end_tokens, self.threads)
        self.stack.callback(loop.close)
        return loop

    @property
    def _end_tokens(self) -> Sequence[int]:
        generation_config = self.model.manifest.generation_config
        assert generation_config is not None, "this is a bug: a model that writes no text"
        return generation_config.eos_token_ids

    def llama(self) -> System:
        """llama.cpp on `--gguf`."""
        if self.arguments.gguf is None:
            raise BenchmarkError("no GGUF file was named", hint="name one with --gguf FILE")
        return LlamaCppSystem.opened(self.arguments.gguf, self.context, self.threads)


# By their names on the command line: what they are called in the result, and how they are opened.
BASELINES: Mapping[str, tuple[str, Callable[[SystemFactory], System]]] = {
    "undrafted": (NO_DRAFTS, SystemFactory.undrafted),
    "http": (OVER_HTTP, SystemFactory.served),
    "genai": (GENAI, SystemFactory.genai),
    "transformers": (TRANSFORMERS, SystemFactory.transformers),
    "paged": (PAGED, SystemFactory.paged),
    "llama": (LLAMA, SystemFactory.llama),
}


def open_baselines(
    entrance: SystemFactory, without: Collection[str]
) -> tuple[list[System], dict[str, str]]:
    """All that are wanted and can be opened, and why others cannot."""
    opened: list[System] = []
    missing: dict[str, str] = {}
    for name, (label, opens) in BASELINES.items():
        if name in without:
            continue
        try:
            opened.append(opens(entrance))
        except ServeError as exc:
            missing[label] = exc.message
            log_progress(f"{label} is not measured: {exc.message}")
    return opened, missing
