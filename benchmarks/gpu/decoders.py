"""Decoder cases: parity of every GPU candidate, streams, memory, cost of CUDA graph captures."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common.random_checkpoints import (
    LLAMA_1B,
    MOE_LAYERS,
    SMALL_LLAMA,
    SMOLLM_135M,
    TINY_DEEPSEEK,
    TINY_GEMMA2,
    TINY_GEMMA4,
    TINY_GPT_OSS,
    TINY_LLAMA,
    TINY_MOE,
    TINY_QWEN3_5,
    LlamaSizes,
    RandomDecoder,
    write_bart,
    write_decoder,
    write_gpt2,
    write_llama,
)
from benchmarks.gpu.cases import Bench, Case, Target, require
from benchmarks.gpu.checkpoints import find_smollm, open_steps, read_checkpoint
from benchmarks.gpu.device import release_memory, summarize_ms, used_bytes
from benchmarks.gpu.transformers_generation import GENERATION_BASELINES, generate
from build_artifacts.checkpoints.metadata import CheckpointMetadata
from build_artifacts.gpu_placement import without_program
from build_artifacts.presets import (
    DECODER_BF16_TORCH,
    DECODER_FP16,
    DECODER_FP16_COMPILED,
    DECODER_FP16_TORCH,
    DECODER_FP16_TRANSFORMERS,
    DECODER_GPU_INT4,
    DECODER_GPU_INT8,
    DECODER_GPU_INT8_BNB,
    DECODER_GPU_NF4_BNB,
)
from build_artifacts.recipes import DecoderRecipe
from deployments.artifacts.manifest import EngineOptions, Gate
from deployments.artifacts.types import Dtype, EngineName, Precision, TaskName
from deployments.engines import missing_requirement
from deployments.engines.decoder import DecoderEngine, DecoderSpec
from deployments.engines.decoder_factory import find_decoder_factory, kv_bytes_per_token

DECODER_OFFLOADED = replace(
    DECODER_FP16_TRANSFORMERS, name="gpu-fp16-offloaded", run=EngineOptions(kv_offload=True)
)
DECODER_FLASH = replace(
    DECODER_FP16_TRANSFORMERS, name="gpu-fp16-flash", run=EngineOptions(attention="flash")
)
DECODER_EAGER = replace(
    DECODER_FP16_TRANSFORMERS, name="gpu-fp16-eager", run=EngineOptions(attention="eager")
)
# Candidates on torch come first, because they need no export to ONNX.
CANDIDATES = (
    DECODER_FP16_TORCH, DECODER_FP16_COMPILED, DECODER_FP16_TRANSFORMERS, DECODER_FLASH,
    DECODER_EAGER, DECODER_OFFLOADED, DECODER_BF16_TORCH,
    DECODER_GPU_INT8_BNB, DECODER_GPU_NF4_BNB, DECODER_FP16, DECODER_GPU_INT8, DECODER_GPU_INT4,
)  # fmt: skip
_BY_NAME = {recipe.name: recipe for recipe in CANDIDATES}
_STREAMS = (1, 8, 32, 128)
_PROMPT_TOKENS, _NEW_TOKENS = 128, 128
_WriteCheckpoint = Callable[[Path, Bench], Path]


def _sized(sizes: LlamaSizes) -> _WriteCheckpoint:
    return lambda directory, bench: write_llama(directory, sizes, bench.target.seed)


def _written(decoder: RandomDecoder) -> _WriteCheckpoint:
    return lambda directory, bench: write_decoder(directory, decoder, bench.target.seed)


# Checkpoints by name. Parity cases use small sizes, because their fp32 reference runs on the CPU.
_CHECKPOINTS: Mapping[str, _WriteCheckpoint] = {
    "llama": lambda directory, bench: write_llama(
        directory, bench.target.choose(SMALL_LLAMA, TINY_LLAMA), bench.target.seed
    ),
    "gpt2": lambda directory, bench: write_gpt2(directory, bench.target.seed),
    "bart": lambda directory, bench: write_bart(directory, bench.target.seed),
    "gemma2": _written(TINY_GEMMA2),
    "gpt-oss": _written(TINY_GPT_OSS),
    "qwen3-moe": _written(TINY_MOE),
    "qwen3.5": _written(TINY_QWEN3_5),
    "gemma4": _written(TINY_GEMMA4),
    "deepseek-v3": _written(TINY_DEEPSEEK),
    "135m": _sized(SMOLLM_135M),
    "1b": _sized(LLAMA_1B),
    "moe": _written(MOE_LAYERS),
    "smollm2": lambda _, bench: find_smollm(bench),
}
# What a dry run measures in place of larger models. It exports each only once.
_DRY_MODELS = {"135m": "llama", "1b": "llama", "moe": "qwen3-moe"}


class _Needs(NamedTuple):
    """The fields of a recipe that decide, before the export, whether an engine can run it."""

    engine: EngineName
    precision: Precision
    options: EngineOptions


@dataclass(frozen=True)
class _DecoderModel:
    weights: Path
    metadata: CheckpointMetadata
    graphs: Any  # DecoderGraphs, which is imported on use

    @classmethod
    def build(cls, bench: Bench, name: str, root: Path) -> _DecoderModel:
        from build_artifacts.decoders.candidates import DecoderGraphs

        (root / "checkpoint").mkdir()
        weights = _CHECKPOINTS[name](root / "checkpoint", bench)
        task = TaskName.TEXT2TEXT_GENERATION if name == "bart" else TaskName.TEXT_GENERATION
        metadata = read_checkpoint(weights, task)
        return cls(weights, metadata, DecoderGraphs(open_steps(root / "build"), weights, metadata))

    def spec(self, recipe: DecoderRecipe, target: Target) -> DecoderSpec:
        """Export the candidate. Raises MissingRequirement if this machine cannot run it."""
        needs = _Needs(recipe.engine, recipe.precision, recipe.run)
        require(missing_requirement(needs, target.generator_settings()))
        if recipe.engine == "onnxruntime" and self.metadata.architecture.startswith("Llama"):
            import onnxruntime_genai  # noqa: F401  the export needs its model builder
        spec: DecoderSpec = self.graphs.spec(recipe)
        return spec


def _model(bench: Bench, name: str) -> _DecoderModel:
    name = bench.target.choose(name, _DRY_MODELS.get(name, name))
    return bench.once(f"decoder/{name}", lambda root: _DecoderModel.build(bench, name, root))


def _open(spec: DecoderSpec, target: Target, *, slots: int, context: int) -> DecoderEngine:
    factory = find_decoder_factory(spec)
    return factory(spec, target.generator_settings(), slots=slots, context=context)


def _check(bench: Bench, name: str, recipe: DecoderRecipe) -> Mapping[str, Any]:
    """Compare a candidate with fp32 torch as the accuracy gate does: prefill and batched steps."""
    from build_artifacts.decoders.measurement import BATCH_SLOTS, compare_decoder
    from build_artifacts.decoders.reference import DecoderReference, write_reference

    model = _model(bench, name)
    spec = model.spec(recipe, bench.target)

    def write(into: Path) -> DecoderReference:
        write_reference(model.weights, model.metadata, into)
        return DecoderReference.read(into, model.metadata.required_generation_config)

    reference = bench.once(f"reference/{name}", write)
    slots = max(BATCH_SLOTS, len(reference.gate_inputs.prompts))
    with closing(_open(spec, bench.target, slots=slots, context=spec.max_tokens)) as engine:
        found = compare_decoder(engine, reference, Gate())
    parity = {} if found.parity is None else found.parity.model_dump(mode="json")
    return {**parity, "perplexity": found.perplexity, "reasons": list(found.reasons)}


def parity_cases(_target: Target) -> list[Case]:
    """Return cases for every candidate on a Llama, and for some on other architectures."""
    pairs = [("llama", recipe) for recipe in CANDIDATES]
    pairs += [("gemma2", DECODER_FP16_TORCH), ("gemma2", DECODER_FLASH)]
    pairs += [("gpt-oss", DECODER_BF16_TORCH), ("qwen3-moe", DECODER_BF16_TORCH)]
    pairs += [("qwen3.5", without_program(DECODER_BF16_TORCH))]
    pairs += [("gemma4", DECODER_BF16_TORCH), ("deepseek-v3", DECODER_BF16_TORCH)]
    pairs += [("gpt2", DECODER_FP16_TORCH), ("gpt2", DECODER_FP16)]
    pairs += [("bart", DECODER_FP16), ("bart", DECODER_GPU_INT8)]
    return [
        Case(f"{name}/{recipe.name}", partial(_check, name=name, recipe=recipe))
        for name, recipe in pairs
    ]


def measure_streams(
    engine: DecoderEngine, prompts: Sequence[Sequence[int]], new_tokens: int
) -> Mapping[str, Any]:
    """Prefill all prompts, then decode greedily. The host selects tokens, as in the server."""
    started_s = time.perf_counter()
    last = np.array([engine.prefill(s, ids, 0).argmax() for s, ids in enumerate(prompts)])
    prefill_s = time.perf_counter() - started_s
    lengths = np.array([len(ids) for ids in prompts])
    times: list[float] = []
    for _ in range(new_tokens - 1):
        step_s = time.perf_counter()
        last = engine.decode(last, lengths).argmax(axis=1)
        times.append(time.perf_counter() - step_s)
        lengths += 1
    quarter = max(1, len(times) // 4)
    early, late = np.median(times[:quarter]), np.median(times[-quarter:])
    return {
        **summarize_ms(times),
        "tokens_per_s": len(prompts) / (sum(times) / len(times)),
        "prefill_tokens_per_s": sum(map(len, prompts)) / prefill_s,
        "late_to_early_step": float(late / early),  # 1.0: steps stay equally fast as answers grow
        "total_tokens_per_s": len(prompts) * new_tokens / (prefill_s + sum(times)),
    }


def draw_prompts(count: int, tokens: int, vocabulary: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    prompts: list[list[int]] = rng.integers(3, vocabulary, (count, tokens)).tolist()
    return prompts


def _measure_streams(bench: Bench, name: str, system: str, streams: int) -> Mapping[str, Any]:
    """Measure `system`, a candidate or a baseline. All systems get the same random prompts."""
    target, model = bench.target, _model(bench, name)
    prompt_tokens, new_tokens = target.choose((_PROMPT_TOKENS, _NEW_TOKENS), (8, 6))
    vocabulary = model.metadata.output_width
    prompts = draw_prompts(streams, prompt_tokens, vocabulary, target.seed)
    if system in GENERATION_BASELINES:
        is_bf16 = model.metadata.required_generation_config.has_experts
        dtype: Dtype = "bfloat16" if is_bf16 else "float16"  # that of our candidates
        return generate(system, model.weights, dtype, target, prompts, new_tokens)
    spec = model.spec(_BY_NAME[system], target)
    context = prompt_tokens + new_tokens
    with closing(_open(spec, target, slots=streams, context=context)) as engine:
        # The warm-up captures CUDA graphs, allocates memory and compiles.
        measure_streams(engine, prompts, new_tokens)
        return measure_streams(engine, prompts, new_tokens)


def stream_cases(target: Target) -> list[Case]:
    """Return cases of candidates and transformers baselines on SmolLM2 and on a Llama of 1B.

    Compiled, flash, quantized and offloaded candidates run at only one or two numbers of streams.
    The quantized and offloaded candidates run on the Llama only. A mixture of experts has one
    candidate.
    """
    systems = [DECODER_FP16_TORCH.name, DECODER_FP16_TRANSFORMERS.name, DECODER_FP16.name,
               *GENERATION_BASELINES]  # fmt: skip
    compiled = [DECODER_FP16_COMPILED.name, DECODER_FLASH.name]
    quantized = [DECODER_GPU_INT8_BNB.name, DECODER_GPU_NF4_BNB.name, DECODER_GPU_INT4.name,
                 DECODER_OFFLOADED.name]  # fmt: skip
    experts = [DECODER_BF16_TORCH.name, *GENERATION_BASELINES]
    counts = target.choose(_STREAMS, (1, 2))
    few = target.choose((1, 32), (2,))
    models = ("smollm2", "1b")
    combinations = [
        *((name, system, n) for name in models for n in counts for system in systems),
        *((name, system, n) for name in models for system in compiled for n in few),
        *(("1b", system, n) for system in quantized for n in few),
        *(("moe", system, n) for n in counts for system in experts),
    ]
    return [
        Case(
            f"{name}/{system}/{streams}",
            partial(_measure_streams, name=name, system=system, streams=streams),
        )
        for name, system, streams in combinations
    ]


def _account_memory(bench: Bench, recipe: DecoderRecipe) -> Mapping[str, Any]:
    """Measure memory after opening, prefill, captures and closing, and the time of each capture."""
    target, model = bench.target, _model(bench, "135m")
    spec = model.spec(recipe, target)
    slots, context = target.choose((32, 1_024), (4, 64))
    release_memory(target)
    before = used_bytes(target)
    started_s = time.perf_counter()
    engine = _open(spec, target, slots=slots, context=context)
    opened_s, opened = time.perf_counter() - started_s, used_bytes(target)
    kv_tokens = engine.info.slots * engine.info.context  # the model may have a shorter context
    captures = []
    with closing(engine):
        engine.prefill(0, [5] * 16, 0)
        prefilled = used_bytes(target)
        for count in sorted({1, 2, slots // 2, slots}):
            ids, lengths = np.full(count, 5), np.full(count, 16)
            first_s, second_s = (_time_step(engine, ids, lengths) for _ in range(2))
            captures.append({"slots": count, "first_s": first_s, "next_s": second_s})
        captured = used_bytes(target)
    del engine
    release_memory(target)
    weights = sum(path.stat().st_size for path in spec.path.parent.glob("*") if path.is_file())
    kv_bytes = kv_tokens * kv_bytes_per_token(spec)
    return {
        "weight_file_bytes": weights,
        "kv_cache_bytes": kv_bytes,
        "open_s": opened_s,
        "open_bytes": opened - before,
        "prefill_bytes": prefilled - opened,
        "capture_bytes": captured - prefilled,
        "left_bytes": used_bytes(target) - before,
        "steps": captures,
    }


def _time_step(engine: DecoderEngine, ids: Any, lengths: Any) -> float:
    started_s = time.perf_counter()
    engine.decode(ids, lengths)
    return time.perf_counter() - started_s


def memory_cases(_target: Target) -> list[Case]:
    return [
        Case(recipe.name, partial(_account_memory, recipe=recipe))
        for recipe in CANDIDATES
        if recipe not in (DECODER_EAGER, DECODER_FLASH)
    ]
