"""Who may be sealed: decoders' graphs made, held against the original, and made otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from build_artifacts.checkpoints.metadata import CheckpointMetadata
from build_artifacts.decoders.calibration import CalibrationTexts
from build_artifacts.decoders.export import PROGRAM_NAME, export_decoder
from build_artifacts.decoders.gate_inputs import Tokens, load_calibration_inputs, max_answer_tokens
from build_artifacts.decoders.graphs.export import ENCODER_NAME
from build_artifacts.decoders.int8_kv_cache import has_int8_kv_cache, quantize_kv_cache
from build_artifacts.decoders.logits_slicing import GRAPH_NAME, WEIGHTS_NAME
from build_artifacts.decoders.measurement import (
    BATCH_SLOTS,
    compare_decoder,
    generate_answers,
    throughput_context,
)
from build_artifacts.decoders.per_token_int8 import quantize_per_token
from build_artifacts.decoders.reference import DecoderReference
from build_artifacts.errors import BuildError, GateFailed, UnsupportedModel
from build_artifacts.recipes import DecoderRecipe, digest_of
from build_artifacts.search.screening_settings import engine_settings
from build_artifacts.storage.workspace import StepRunner, megabytes
from deployments.artifacts.manifest import Gate, Parity
from deployments.engines.decoder import DecoderEngine, DecoderSpec
from deployments.engines.decoder_factory import find_decoder_factory
from deployments.errors import EngineFailed
from deployments.machine import usable_cores

_JUDGEMENT_NAME = "judgement.json"


class DecoderGateResult(BaseModel):
    """What the gate found; kept, so that an interrupted build need not look again."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    parity: Parity | None  # None when there were no usable numbers at all
    perplexity: float | None
    reasons: tuple[str, ...]  # empty: it passed
    answers: tuple[Tokens, ...] = ()  # to the prompts

    def told(self) -> str:
        """One line for people."""
        if self.parity is None or self.reasons:
            return f"left out, {'; '.join(self.reasons)}"
        return (
            f"passed, perplexity {self.perplexity:.2f}, choices {self.parity.top1_agreement:.1%}, "
            f"cosine {self.parity.cosine_mean:.4f} mean {self.parity.cosine_worst:.4f} worst"
        )


@dataclass(frozen=True, slots=True)
class DecoderCandidate:
    """A graph in the workspace, and what the gate found."""

    recipe: DecoderRecipe
    spec: DecoderSpec
    judgement: DecoderGateResult


@dataclass(frozen=True, slots=True)
class DecoderAccuracyGate:
    """Makes and judges the graphs of one build."""

    steps: StepRunner
    weights: Path
    metadata: CheckpointMetadata
    original: DecoderReference
    gate: Gate
    # What came of all that was tried so far: a graph with its judgement, or why there is none.
    _tried: list[DecoderCandidate | UnsupportedModel] = field(default_factory=list, init=False)

    def admit(self, recipe: DecoderRecipe) -> DecoderCandidate | None:
        """The first graph of the recipe that passes; None when there is none."""
        if self.metadata.required_generation_config.encoder_decoder is not None:
            recipe = replace(
                recipe, kv_cache_dtype=None
            )  # the decoder behind an encoder has two memories
        return next((each for each in self._judged(recipe) if not each.judgement.reasons), None)

    def failure(self) -> BuildError:
        """Why nothing of what was tried may be sealed; the most accurate was tried last."""
        assert self._tried, "something is tried before it fails; this is a bug"
        error_responses = [each for each in self._tried if isinstance(each, UnsupportedModel)]
        if len(error_responses) == len(self._tried):
            return error_responses[-1]
        latest = self._tried[-1]
        message = f"no graph of `{self.metadata.architecture}` for the CPU passed the accuracy gate"
        if isinstance(latest, UnsupportedModel):
            return GateFailed(message, hint=f"a more accurate one cannot be made: {latest.message}")
        return GateFailed(
            f"{message} ({latest.recipe.precision}: {'; '.join(latest.judgement.reasons)})",
            hint=f"with weights in {latest.recipe.precision} the graph does not compute what the "
            "model does: whatever writes it may not know this variant of the architecture; if you "
            "passed `--gate`, its limits may be too tight for any graph",
        )

    def _judged(self, recipe: DecoderRecipe) -> Iterator[DecoderCandidate]:
        """Its graphs, each made when it is asked for; the most accurate comes last."""
        latest = None
        for options in (recipe.options, *recipe.other_options):
            judged = self._attempt(replace(recipe, options=options))
            if judged is not None:
                yield judged
                latest = judged
        # Int8 in memory costs little accuracy: only the most accurate is tried without.
        if latest is not None and latest.spec.kv_cache_dtype is not None:
            judged = self._attempt(replace(latest.recipe, kv_cache_dtype=None))
            if judged is not None:
                yield judged

    def _attempt(self, recipe: DecoderRecipe) -> DecoderCandidate | None:
        """The graph of these options; None where there is none for such a model."""
        try:
            graph = self._graph(recipe)
        except UnsupportedModel as exc:
            with self.steps.run_uncached("skip", _named(recipe)) as step:
                step.set_outcome(exc.message)
            self._tried.append(exc)
            return None
        spec = self._spec(recipe, graph)
        judged = DecoderCandidate(recipe, spec, self._judgement(recipe, spec))
        self._tried.append(judged)
        return judged

    def _graph(self, recipe: DecoderRecipe) -> Path:
        if recipe.rowwise:
            return self._quantised(recipe)

        name, weights = GRAPH_NAME, WEIGHTS_NAME
        if recipe.engine != "onnxruntime":
            name = weights = PROGRAM_NAME

        def work(into: Path) -> str:
            export_decoder(self.weights, self.metadata, recipe, into)
            self._round_memory(recipe, into)
            return megabytes(into / weights)

        key = f"export-{_key(recipe)}"
        return self.steps.run_cached(key, "export", _named(recipe), work) / name

    def _quantised(self, recipe: DecoderRecipe) -> Path:
        floating = self._graph(
            replace(
                recipe,
                name=f"{recipe.device}-fp32",
                precision="fp32",
                rowwise=False,
                kv_cache_dtype=None,
            )
        )

        def work(into: Path) -> str:
            encoder = find_encoder_graph(floating)
            if encoder is None:
                quantize_per_token(floating, into / GRAPH_NAME, self._calibration())
                self._round_memory(recipe, into)
            else:
                quantize_per_token(floating, into / GRAPH_NAME)
                quantize_per_token(encoder, into / encoder.name)
            return megabytes(into / WEIGHTS_NAME)

        key = f"quantise-{_key(recipe)}"
        return self.steps.run_cached(key, "quantise", _named(recipe), work) / GRAPH_NAME

    def _calibration(self) -> CalibrationTexts:
        texts = load_calibration_inputs(self.weights, self.metadata.max_tokens)
        return CalibrationTexts(texts, self.metadata.required_generation_config)

    def _round_memory(self, recipe: DecoderRecipe, made: Path) -> None:
        """Let the graph in `made` keep int8 where the recipe says so, and the graph allows it."""
        if recipe.kv_cache_dtype:
            quantize_kv_cache(made / GRAPH_NAME, self._calibration())

    def _spec(self, recipe: DecoderRecipe, graph: Path) -> DecoderSpec:
        return DecoderSpec(
            path=graph,
            encoder=find_encoder_graph(graph),
            engine=recipe.engine,
            device=recipe.device,
            precision=recipe.precision,
            kv_cache_dtype=recipe.kv_cache_dtype
            if recipe.kv_cache_dtype and has_int8_kv_cache(graph)
            else None,
            options=recipe.run,
            generation_config=self.metadata.required_generation_config,
            vocabulary=self.metadata.output_width,
            max_tokens=self.metadata.max_tokens,
        )

    def _judgement(self, recipe: DecoderRecipe, spec: DecoderSpec) -> DecoderGateResult:
        def work(into: Path) -> str:
            judgement = self._judge(spec)
            (into / _JUDGEMENT_NAME).write_text(judgement.model_dump_json(), encoding="utf-8")
            return judgement.told()

        key = f"verify-{_key(recipe)}"
        detail = f"{_named(recipe)} against fp32 torch"
        found = self.steps.run_cached(key, "verify", detail, work) / _JUDGEMENT_NAME
        return DecoderGateResult.model_validate_json(found.read_bytes())

    def _judge(self, spec: DecoderSpec) -> DecoderGateResult:
        try:
            engine = opened(spec, self.original)
            try:
                found = compare_decoder(engine, self.original, self.gate)
                most = max_answer_tokens(spec.max_tokens)
                ends = spec.generation_config.eos_token_ids
                answers = generate_answers(engine, self.original.gate_inputs.prompts, ends, most)
            finally:
                engine.close()
        except EngineFailed as exc:
            return DecoderGateResult(parity=None, perplexity=None, reasons=(exc.message,))
        return DecoderGateResult(
            parity=found.parity,
            perplexity=found.perplexity,
            reasons=found.reasons,
            answers=answers,
        )


def opened(spec: DecoderSpec, original: DecoderReference) -> DecoderEngine:
    """The graph with room for what the original was asked. Raises EngineFailed."""
    prompts = original.gate_inputs.prompts
    longest_prompt = max(map(len, prompts))
    longest = max(*map(len, original.texts), longest_prompt + max_answer_tokens(spec.max_tokens))
    # Nothing else runs while a graph is looked at, so all cores may help.
    hardware = engine_settings(spec.device, usable_cores())
    context = max(longest, throughput_context(spec.max_tokens))
    slots = max(BATCH_SLOTS, len(prompts))
    return find_decoder_factory(spec)(spec, hardware, slots=slots, context=context)


def find_encoder_graph(graph: Path) -> Path | None:
    """The graph of the encoder, where there is one."""
    path = graph.with_name(ENCODER_NAME)
    return path if path.is_file() else None


def _named(recipe: DecoderRecipe) -> str:
    memory = [f"memory in {recipe.kv_cache_dtype}"] if recipe.kv_cache_dtype else []
    return ", ".join((recipe.name, *recipe.options, *memory))


def _key(recipe: DecoderRecipe) -> str:
    unnamed = replace(recipe, name="", other_options=())
    return digest_of(unnamed)[:12]
