"""The order of the steps between a checkpoint that generates and its artifact."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from build_artifacts.checkpoints.checkpoint import CONFIG_NAME
from build_artifacts.checkpoints.decoders import read_chat_template
from build_artifacts.checkpoints.metadata import CheckpointMetadata
from build_artifacts.decoders.gate import DecoderAccuracyGate, DecoderCandidate, opened
from build_artifacts.decoders.generation_report import (
    GENERATION_NAME,
    PERPLEXITY,
    GenerationReport,
    compare_samples,
)
from build_artifacts.decoders.measurement import DecoderThroughput, measure_throughput
from build_artifacts.decoders.reference import DecoderReference, write_reference
from build_artifacts.recipes import BuildRecipe, DecoderRecipe
from build_artifacts.search.screening_settings import has_device
from build_artifacts.steps.seal import ArtifactContents, ArtifactIdentity, write_artifact
from build_artifacts.storage.workspace import StepRunner
from deployments.artifacts.manifest import CHAT_TEMPLATE_NAME, TOKENIZER_NAME, Candidate
from deployments.artifacts.types import Device
from deployments.errors import EngineFailed
from deployments.machine import usable_cores
from deployments.tuning.host import read_host

# Of measuring one graph: the medians of such loops are steady after a second each.
_MOST_PACE_SECONDS = 4.0


@dataclass(frozen=True, slots=True)
class DecoderBuild:
    """One build of a model that generates, at work in its workspace."""

    steps: StepRunner
    recipe: BuildRecipe
    tune_seconds: float  # for measuring all graphs; 0: do not
    search_seconds: float  # per device, after which no further candidate is begun

    def artifact(
        self, weights: Path, metadata: CheckpointMetadata, identity: ArtifactIdentity
    ) -> Path:
        """A directory that holds the whole artifact. Raises BuildError."""
        original = self._original(weights, metadata)
        admission = DecoderAccuracyGate(self.steps, weights, metadata, original, self.recipe.gate)
        passed = [*self._for_cpu(admission), *self._best(admission, Device.GPU)]
        paces = self._paces(passed, original)
        ranked = sorted(passed, key=lambda p: _rank(paces.get(p.recipe.name)))
        return self._sealed(admission, ranked, paces, identity)

    def _original(self, weights: Path, metadata: CheckpointMetadata) -> DecoderReference:
        def work(into: Path) -> str:
            write_reference(weights, metadata, into)
            perplexity = DecoderReference.read(
                into, metadata.required_generation_config
            ).perplexity()
            return f"{metadata.architecture}, {metadata.max_tokens} tokens, perplexity {perplexity:.2f}"

        detail = "fp32 torch on passages and prompts"
        gate_inputs = self.steps.run_cached("reference", "reference", detail, work)
        return DecoderReference.read(gate_inputs, metadata.required_generation_config)

    def _for_cpu(self, admission: DecoderAccuracyGate) -> list[DecoderCandidate]:
        passed = self._best(admission, Device.CPU)
        if passed:
            return passed
        fallback = admission.admit(self.recipe.decoder_fallback)
        if fallback is None:
            raise admission.failure()
        return [fallback]

    def _best(self, admission: DecoderAccuracyGate, device: Device) -> list[DecoderCandidate]:
        """The first graphs for `device` that pass; one where nothing here tells which is faster.

        However long it takes, candidates are tried until one has passed.
        """
        keep = self.recipe.keep if has_device(device) else 1
        end_s = time.monotonic() + self.search_seconds
        passed: list[DecoderCandidate] = []
        for recipe in self.recipe.decoders:
            if recipe.device is not device or len(passed) >= keep:
                continue
            if passed and time.monotonic() > end_s:
                with self.steps.run_uncached("skip", recipe.name) as step:
                    step.set_outcome(f"the search has taken its {self.search_seconds:.0f} s")
                continue
            found = admission.admit(recipe)
            passed += [found] if found is not None else []
        return passed

    def _paces(
        self, passed: Sequence[DecoderCandidate], original: DecoderReference
    ) -> dict[str, DecoderThroughput]:
        here = [graph for graph in passed if has_device(graph.recipe.device)]
        paces: dict[str, DecoderThroughput] = {}
        for graph in here if self.tune_seconds else ():
            seconds = min(self.tune_seconds / len(here), _MOST_PACE_SECONDS)
            with self.steps.run_uncached("tune", graph.recipe.name) as step:
                try:
                    paces[graph.recipe.name] = pace = _pace(graph, original, seconds)
                    step.set_outcome(str(pace))
                except EngineFailed as exc:
                    step.set_outcome(exc.message)
        return paces

    def _sealed(
        self,
        admission: DecoderAccuracyGate,
        passed: Sequence[DecoderCandidate],
        paces: Mapping[str, DecoderThroughput],
        identity: ArtifactIdentity,
    ) -> Path:
        original, metadata = admission.original, admission.metadata
        tokenizer = admission.weights / TOKENIZER_NAME
        answers = {graph.recipe.name: graph.judgement.answers for graph in passed}
        generation = GenerationReport(
            host=read_host(Device.CPU).name,
            threads=usable_cores(),
            throughput=dict(paces),
            samples=compare_samples(
                tokenizer, original.gate_inputs.prompts, original.answers, answers
            ),
        )

        def work(into: Path) -> str:
            written = _write_texts(generation, read_chat_template(admission.weights), into)
            contents = ArtifactContents(
                identity=identity,
                metadata=metadata,
                candidates=tuple(_candidate(graph) for graph in passed),
                gate=admission.gate,
                scores={PERPLEXITY: original.perplexity()},
                files={TOKENIZER_NAME: tokenizer, **written, **_graph_files(passed)},
            )
            write_artifact(contents, into)
            return ""

        detail = f"{identity.id} version {identity.version}"
        return self.steps.run_cached("artifact", "seal", detail, work)


def _rank(pace: DecoderThroughput | None) -> float:
    """The fastest in company first; those that were not measured stay behind, in their order."""
    return -pace.batched if pace is not None else 0.0


def _pace(graph: DecoderCandidate, original: DecoderReference, seconds: float) -> DecoderThroughput:
    engine = opened(graph.spec, original)
    try:
        return measure_throughput(engine, seconds)
    finally:
        engine.close()


def _place(graph: DecoderCandidate) -> str:
    """A directory of its own: nothing but its weights may lie beside a graph."""
    return f"graphs/{graph.recipe.name}"


def _graph_files(passed: Sequence[DecoderCandidate]) -> dict[str, Path]:
    return {
        f"{_place(graph)}/{file.name}": file
        for graph in passed
        for path in (graph.spec.path, graph.spec.encoder)
        if path is not None
        for file in _files_of(path, graph.recipe)
    }


def _files_of(path: Path, recipe: DecoderRecipe) -> list[Path]:
    if recipe.engine == "transformers":
        return [path, path.with_name(CONFIG_NAME)]
    weights = path.with_name(f"{path.name}.data")
    return [path, weights] if weights.is_file() else [path]  # a torch program has them in it


def _candidate(graph: DecoderCandidate) -> Candidate:
    recipe, judgement, encoder = graph.recipe, graph.judgement, graph.spec.encoder
    assert judgement.parity is not None, "it passed, so there are numbers; this is a bug"
    assert judgement.perplexity is not None, "it passed, so there are numbers; this is a bug"
    return Candidate(
        name=recipe.name,
        device=recipe.device,
        precision=recipe.precision,
        engine=recipe.engine,
        kv_cache_dtype=graph.spec.kv_cache_dtype,
        graph=f"{_place(graph)}/{graph.spec.path.name}",
        encoder=None if encoder is None else f"{_place(graph)}/{encoder.name}",
        options=recipe.run,
        parity=judgement.parity,
        scores={PERPLEXITY: judgement.perplexity},
    )


def _write_texts(generation: GenerationReport, template: str | None, into: Path) -> dict[str, Path]:
    """Files that are written rather than copied, by their names."""
    texts = {GENERATION_NAME: generation.model_dump_json(indent=2) + "\n"}
    if template is not None:
        texts[CHAT_TEMPLATE_NAME] = template
    for name, text in texts.items():
        (into / name).write_text(text, encoding="utf-8")
    return {name: into / name for name in texts}
