"""Decoder models: causal language models that generate text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from build_artifacts.build_devices import has_device
from build_artifacts.checkpoints.checkpoint import Checkpoint
from build_artifacts.checkpoints.decoders import find_decoder_settings, read_chat_templates
from build_artifacts.checkpoints.metadata import CheckpointMetadata, read_decoder_metadata
from build_artifacts.checkpoints.models import estimate_memory
from build_artifacts.decoders.candidates import (
    DecoderGraphs,
    describe_recipe,
    digest_decoder_recipe,
    list_graph_files,
    open_for_gate,
)
from build_artifacts.decoders.gate_inputs import max_answer_tokens
from build_artifacts.decoders.generation_report import (
    GenerationReport,
    compare_samples,
)
from build_artifacts.decoders.graphs.export import check_graph
from build_artifacts.decoders.measurement import (
    LIMITS,
    DecoderThroughput,
    compare_decoder,
    generate_answers,
    measure_throughput,
)
from build_artifacts.decoders.reference import DecoderReference, write_reference
from build_artifacts.errors import BuildError
from build_artifacts.families.base import (
    Attempt,
    BuildContext,
    EvaluatedCandidate,
    GateResult,
    ModelBuild,
)
from build_artifacts.gpu_placement import without_program
from build_artifacts.recipes import DecoderRecipe
from build_artifacts.steps.seal import ArtifactContents, ArtifactIdentity
from build_artifacts.steps.unused_layers import report_unused_layers
from deployments.artifacts.manifest import (
    GENERATION_NAME,
    PERPLEXITY,
    TOKENIZER_NAME,
    Candidate,
)
from deployments.artifacts.types import Device, ModelHead
from deployments.engines.decoder import DecoderSpec
from deployments.errors import EngineFailed
from deployments.host.machine import usable_cores
from deployments.tasks import find_head
from deployments.tuning.host import read_host

# Maximum seconds to measure one graph: decode steps with one slot, decode steps in batches, and
# prefill. Each of these three measurements is steady after one second.
_MAX_MEASURE_SECONDS = 4.0

DecoderCandidate = EvaluatedCandidate[DecoderRecipe, DecoderSpec]


class DecoderFamily:
    def matches(self, checkpoint: Checkpoint, tasks: tuple[str, ...]) -> bool:
        return find_head(tasks[0]) is ModelHead.NEXT_TOKEN

    def read_metadata(self, checkpoint: Checkpoint, tasks: tuple[str, ...]) -> CheckpointMetadata:
        return read_decoder_metadata(checkpoint, tasks)

    def start(self, context: BuildContext) -> DecoderBuild:
        check_options(context)
        report_ineffective(context, find_decoder_settings(context.weights))
        return DecoderBuild(context, cached_reference(context))


def check_options(context: BuildContext) -> None:
    if context.budget.evaluation is not None:
        raise BuildError(
            "`--eval` is not supported for models that generate text: they have no metric",
            hint="omit `--eval`: the accuracy gate compares the perplexity with the reference",
        )
    if context.pruning is not None:
        raise BuildError(
            "`--prune` is not supported for models that generate text", hint="omit `--prune`"
        )
    if not context.recipe.decoders:
        raise BuildError(
            "`--search dynamic` is not supported for models that generate text: all its "
            "candidates are encoders",
            hint="use `--search quick` or `--search full`",
        )
    if unknown := sorted(context.recipe.gate.model_fields_set - set(LIMITS)):
        raise BuildError(
            f"`--gate {unknown[0]}` is not supported for models that generate text",
            hint=f"use one of {', '.join(LIMITS)}",
        )


def report_ineffective(context: BuildContext, settings: Sequence[str]) -> None:
    """Name the checkpoint's generation settings that the server does not apply."""
    if settings:
        names = ", ".join(f"`{name}`" for name in settings)
        context.steps.report(f"settings of the checkpoint without effect: {names}")


def cached_reference(context: BuildContext) -> DecoderReference:
    """Return the outputs of the checkpoint on the gate inputs, computed once in fp32 torch.

    Raises the errors of `check_graph` and `write_reference`.
    """
    metadata = context.metadata
    config = metadata.required_generation_config

    def work(into: Path) -> str:
        write_reference(context.weights, metadata, into)
        report_unused_layers(context.steps, context.weights, metadata)
        perplexity = DecoderReference.read(into, config).perplexity()
        return f"{metadata.architecture}, {metadata.max_tokens} tokens, perplexity {perplexity:.2f}"

    check_graph(context.weights)  # no build succeeds without it, and the reference takes long
    context.steps.warn_of_memory(estimate_memory(context.weights))
    detail = "fp32 torch on passages and prompts"
    done = context.steps.run_cached("reference", "reference", detail, work)
    return DecoderReference.read(done, config)


class DecoderBuild(ModelBuild[DecoderRecipe, DecoderSpec]):
    gate_failed_hint = (
        "the fp32 graph does not compute what the model computes: the exporter may not support "
        "this variant of the architecture; limits of `--gate` may be too tight for any graph"
    )

    def __init__(self, context: BuildContext, reference: DecoderReference) -> None:
        super().__init__(context)
        self._reference = reference
        self._graphs = DecoderGraphs(context.steps, context.weights, context.metadata)
        self._specs: dict[DecoderRecipe, DecoderSpec] = {}  # graphs exported so far

    def candidates(self, device: Device) -> Sequence[DecoderRecipe]:
        recipes = [each for each in self.context.recipe.decoders if each.device is device]
        if not self.context.metadata.required_generation_config.state_values:
            return recipes
        if not has_device(device):  # on a CPU, the gate of a whole checkpoint takes many minutes
            return []
        # Programs have no loops over the tokens of a prompt, which recurrent layers need.
        return list(dict.fromkeys(map(without_program, recipes)))

    @property
    def fallback(self) -> DecoderRecipe:
        return self.context.recipe.decoder_fallback

    def attempts(self, recipe: DecoderRecipe) -> Iterator[Attempt[DecoderRecipe]]:
        """Yield the recipe, then the recipe with each of its `other_options`.

        If the last exported graph has an int8 KV cache, the final attempt repeats its recipe with a
        float KV cache.
        """
        exported = None
        for options in (recipe.options, *recipe.other_options):
            tried = replace(recipe, options=options)
            yield _build_attempt(tried)
            exported = tried if tried in self._specs else exported
        # An int8 KV cache costs little accuracy, so only the last attempt drops the int8 KV cache.
        if exported is not None and self._specs[exported].kv_cache_dtype is not None:
            yield _build_attempt(replace(exported, kv_cache_dtype=None))

    def export(self, attempt: Attempt[DecoderRecipe]) -> DecoderSpec:
        spec = self._specs[attempt.recipe] = self._graphs.spec(attempt.recipe)
        return spec

    def evaluate(self, spec: DecoderSpec) -> GateResult:
        try:
            engine = open_for_gate(spec, self._reference)
            try:
                found = compare_decoder(engine, self._reference, self.context.recipe.gate)
                samples = generate_answers(
                    engine,
                    self._reference.gate_inputs.prompts,
                    spec.generation_config.eos_token_ids,
                    max_answer_tokens(spec.max_tokens),
                )
            finally:
                engine.close()
        except EngineFailed as exc:
            return GateResult(parity=None, reasons=(exc.message,))
        scores = {} if found.perplexity is None else {PERPLEXITY: found.perplexity}
        return GateResult(
            parity=found.parity, scores=scores, reasons=found.reasons, samples=samples
        )

    def package(
        self, accepted: Sequence[DecoderCandidate], identity: ArtifactIdentity
    ) -> ArtifactContents:
        throughput = self._measure(accepted)
        by_rank = sorted(accepted, key=lambda c: _rank(throughput.get(c.recipe.name)))
        ranked = drop_slower_compiled(by_rank)
        weights = self.context.weights
        report = self._build_report(accepted, throughput)
        return ArtifactContents(
            identity=identity,
            metadata=self.context.metadata,
            candidates=tuple(map(_describe_candidate, ranked)),
            gate=self.context.recipe.gate,
            scores={PERPLEXITY: self._reference.perplexity()},
            files={TOKENIZER_NAME: weights / TOKENIZER_NAME, **_collect_files(ranked)},
            texts={GENERATION_NAME: report, **read_chat_templates(weights)},
        )

    def _measure(self, accepted: Sequence[DecoderCandidate]) -> dict[str, DecoderThroughput]:
        """Measure the graphs whose device this host has. Return their throughput by name.

        Graphs that fail have no entry. Without tuning time the result is empty.
        """
        here = [candidate for candidate in accepted if has_device(candidate.recipe.device)]
        tune_seconds = self.context.budget.tune_seconds
        throughput: dict[str, DecoderThroughput] = {}
        for candidate in here if tune_seconds else ():
            name = candidate.recipe.name
            seconds = min(tune_seconds / len(here), _MAX_MEASURE_SECONDS)
            with self.context.steps.run_uncached("tune", name) as step:
                try:
                    throughput[name] = self._measure_one(candidate.spec, seconds)
                    step.set_outcome(str(throughput[name]))
                except EngineFailed as exc:
                    step.set_outcome(exc.message)
        return throughput

    def _measure_one(self, spec: DecoderSpec, seconds: float) -> DecoderThroughput:
        engine = open_for_gate(spec, self._reference)
        try:
            return measure_throughput(engine, seconds)
        finally:
            engine.close()

    def _build_report(
        self, accepted: Sequence[DecoderCandidate], throughput: Mapping[str, DecoderThroughput]
    ) -> str:
        report = GenerationReport(
            host=read_host(Device.CPU).name,
            threads=usable_cores(),
            throughput=dict(throughput),
            samples=compare_samples(
                self.context.weights / TOKENIZER_NAME,
                self._reference.gate_inputs.prompts,
                self._reference.answers,
                {candidate.recipe.name: candidate.result.samples for candidate in accepted},
            ),
        )
        return report.model_dump_json(indent=2) + "\n"


def _build_attempt(recipe: DecoderRecipe) -> Attempt[DecoderRecipe]:
    return Attempt(recipe=recipe, label=describe_recipe(recipe), key=digest_decoder_recipe(recipe))


def _rank(throughput: DecoderThroughput | None) -> float:
    """Return the sort key: highest batched throughput first, unmeasured graphs last."""
    return -throughput.batched if throughput is not None else 0.0


def drop_slower_compiled(ranked: Sequence[DecoderCandidate]) -> list[DecoderCandidate]:
    """Drop torch.compile candidates, which start slowly, unless they rank first on their device."""
    devices: set[Device] = set()
    kept = []
    for candidate in ranked:
        is_first = candidate.recipe.device not in devices
        devices.add(candidate.recipe.device)
        if is_first or not candidate.recipe.run.compile:
            kept.append(candidate)
    return kept


def _directory(candidate: DecoderCandidate) -> str:
    """Return a separate artifact directory per graph, because the files of graphs share names."""
    return f"graphs/{candidate.recipe.name}"


def _collect_files(candidates: Sequence[DecoderCandidate]) -> dict[str, Path]:
    return {
        f"{_directory(candidate)}/{file.name}": file
        for candidate in candidates
        for path in (candidate.spec.path, candidate.spec.encoder)
        if path is not None
        for file in list_graph_files(path, candidate.recipe)
    }


def _describe_candidate(candidate: DecoderCandidate) -> Candidate:
    recipe, spec, directory = candidate.recipe, candidate.spec, _directory(candidate)
    return Candidate(
        name=recipe.name,
        device=recipe.device,
        precision=recipe.precision,
        engine=recipe.engine,
        kv_cache_dtype=spec.kv_cache_dtype,
        graph=f"{directory}/{spec.path.name}",
        encoder=None if spec.encoder is None else f"{directory}/{spec.encoder.name}",
        options=recipe.run,
        parity=candidate.parity,
        scores=dict(candidate.result.scores),
    )
