"""Graphs of the candidates of a decoder. Graphs quantized per token share the fp32 export."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from build_artifacts.build_devices import engine_settings
from build_artifacts.checkpoints.checkpoint import CONFIG_NAME
from build_artifacts.checkpoints.metadata import CheckpointMetadata
from build_artifacts.decoders.calibration import CalibrationTexts
from build_artifacts.decoders.export import PROGRAM_NAME, export_decoder
from build_artifacts.decoders.gate_inputs import load_calibration_inputs, max_answer_tokens
from build_artifacts.decoders.graphs.export import ENCODER_NAME
from build_artifacts.decoders.int8_kv_cache import has_int8_kv_cache, quantize_kv_cache
from build_artifacts.decoders.logits_slicing import GRAPH_NAME, WEIGHTS_NAME
from build_artifacts.decoders.measurement import BATCH_SLOTS, throughput_context
from build_artifacts.decoders.per_token_int8 import quantize_per_token
from build_artifacts.decoders.reference import DecoderReference
from build_artifacts.graph_files import format_size, list_files
from build_artifacts.recipes import DecoderRecipe, short_digest
from build_artifacts.workspaces.step_runner import StepRunner
from deployments.engines.decoder import DecoderEngine, DecoderSpec
from deployments.engines.decoder_factory import find_decoder_factory
from deployments.host.machine import usable_cores


@dataclass(frozen=True, slots=True)
class DecoderGraphs:
    """Cached exports and quantized graphs of one build."""

    steps: StepRunner
    weights: Path  # directory of the checkpoint, with any adapter merged
    metadata: CheckpointMetadata

    def spec(self, recipe: DecoderRecipe) -> DecoderSpec:
        """Build the graph and describe how to open it.

        Raises UnsupportedModel if the model cannot be exported by this recipe.
        """
        graph = self._graph(recipe)
        is_int8 = recipe.kv_cache_dtype is not None and has_int8_kv_cache(graph)
        return DecoderSpec(
            path=graph,
            encoder=find_encoder_graph(graph),
            engine=recipe.engine,
            device=recipe.device,
            precision=recipe.precision,
            kv_cache_dtype=recipe.kv_cache_dtype if is_int8 else None,
            options=recipe.run,
            generation_config=self.metadata.required_generation_config,
            vocabulary=self.metadata.output_width,
            max_tokens=self.metadata.max_tokens,
        )

    def _graph(self, recipe: DecoderRecipe) -> Path:
        if recipe.per_token_int8:
            return self._quantize(recipe)

        name, weights = GRAPH_NAME, WEIGHTS_NAME
        if recipe.engine != "onnxruntime":
            name = weights = PROGRAM_NAME

        def work(into: Path) -> str:
            export_decoder(self.weights, self.metadata, recipe, into)
            return format_size(into / weights) + self._quantize_kv_cache(recipe, into)

        # Recipes that differ only in `compile` share a program, because torch compiles it later,
        # when an engine starts.
        run = recipe.run.model_copy(update={"compile": False})
        key = f"export-{digest_decoder_recipe(replace(recipe, run=run))}"
        return self.steps.run_cached(key, "export", describe_recipe(recipe), work) / name

    def _quantize(self, recipe: DecoderRecipe) -> Path:
        float_graph = self._graph(
            replace(
                recipe,
                name=f"{recipe.device}-fp32",
                precision="fp32",
                per_token_int8=False,
                kv_cache_dtype=None,
            )
        )

        def work(into: Path) -> str:
            encoder = find_encoder_graph(float_graph)
            if encoder is None:
                quantize_per_token(float_graph, into / GRAPH_NAME, self._calibration())
                return format_size(into / WEIGHTS_NAME) + self._quantize_kv_cache(recipe, into)
            quantize_per_token(float_graph, into / GRAPH_NAME)
            quantize_per_token(encoder, into / encoder.name)
            return format_size(into / WEIGHTS_NAME)

        key = f"quantize-{digest_decoder_recipe(recipe)}"
        return self.steps.run_cached(key, "quantize", describe_recipe(recipe), work) / GRAPH_NAME

    def _calibration(self) -> CalibrationTexts:
        texts = load_calibration_inputs(self.weights, self.metadata.max_tokens)
        return CalibrationTexts(texts, self.metadata.required_generation_config)

    def _quantize_kv_cache(self, recipe: DecoderRecipe, directory: Path) -> str:
        """Convert the KV cache, if any, to int8 if the recipe demands it and the graph allows it.

        Return what the progress adds if the graph does not.
        """
        if not recipe.kv_cache_dtype:
            return ""
        if not self.metadata.required_generation_config.layers:
            return ", it has no KV cache"
        quantize_kv_cache(directory / GRAPH_NAME, self._calibration())
        return "" if has_int8_kv_cache(directory / GRAPH_NAME) else ", its KV cache stays float"


def open_for_gate(spec: DecoderSpec, reference: DecoderReference) -> DecoderEngine:
    """Open the graph with slots for the gate inputs and for the throughput measurement.

    Raises EngineFailed if the engine cannot open the graph.
    """
    prompts = reference.gate_inputs.prompts
    longest_prompt = max(map(len, prompts))
    longest = max(*map(len, reference.texts), longest_prompt + max_answer_tokens(spec.max_tokens))
    # Nothing else runs during the evaluation, so the engine may use all cores.
    settings = engine_settings(spec.device, usable_cores())
    context = max(longest, throughput_context(spec.max_tokens))
    return find_decoder_factory(spec)(
        spec, settings, slots=max(BATCH_SLOTS, len(prompts)), context=context
    )


def find_encoder_graph(graph: Path) -> Path | None:
    """Return the encoder graph next to a decoder graph, None for decoder-only models."""
    path = graph.with_name(ENCODER_NAME)
    return path if path.is_file() else None


def list_graph_files(path: Path, recipe: DecoderRecipe) -> list[Path]:
    """List the graph at `path` and its weight or config files."""
    if recipe.engine == "transformers":
        return [path, path.with_name(CONFIG_NAME)]
    return list_files(path)


def describe_recipe(recipe: DecoderRecipe) -> str:
    kv_cache = [f"{recipe.kv_cache_dtype} KV cache"] if recipe.kv_cache_dtype else []
    return ", ".join((recipe.name, *recipe.options, *kv_cache))


def digest_decoder_recipe(recipe: DecoderRecipe) -> str:
    """Return a digest of the recipe fields that determine the graph and its gate result."""
    return short_digest(replace(recipe, name="", other_options=()))
