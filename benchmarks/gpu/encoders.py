"""Encoder cases: parity of every GPU candidate for every task, latency, and BERT-large."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.random_checkpoints import (
    BERT_LARGE,
    MINILM,
    TINY_BERT,
    BertSizes,
    write_bert,
)
from benchmarks.gpu.cases import Bench, Case, Target, require
from benchmarks.gpu.checkpoints import open_steps, read_checkpoint
from benchmarks.gpu.device import matrix_rate, summarize_ms, time_calls
from build_artifacts.presets import FULL
from build_artifacts.recipes import CandidateRecipe, TorchProgramRecipe
from deployments.artifacts.manifest import Gate
from deployments.artifacts.types import Device, TaskName
from deployments.engines import EncoderEngine, missing_requirement, open_engine
from deployments.messages import TokenizedItem
from deployments.tuning.costs import Shape
from deployments.tuning.measure import build_batch

CANDIDATES = FULL.candidates_for(Device.GPU)
# One task per model head and kind of input. Every other task has the graph of one of these tasks.
TASKS = (
    TaskName.FEATURE_EXTRACTION,
    TaskName.TEXT_CLASSIFICATION,
    TaskName.ZERO_SHOT_CLASSIFICATION,
    TaskName.TEXT_RANKING,
    TaskName.TOKEN_CLASSIFICATION,
    TaskName.QUESTION_ANSWERING,
    TaskName.FILL_MASK,
    TaskName.SPARSE_EMBEDDINGS,
)
_DRY_EXPORTS = (TASKS[0], TaskName.TOKEN_CLASSIFICATION, TaskName.FILL_MASK)
EAGER, COMPILED = "transformers-eager", "transformers-compiled"
_SPEED_NAMES = (*(recipe.name for recipe in CANDIDATES), EAGER, COMPILED)
_ITEMS, _TOKENS = (1, 2, 4, 8, 16, 32, 64), (32, 64, 128, 256, 512)
# Few shapes, because torch.compile takes up to a minute per shape.
_COMPILED_SHAPES = (Shape(items=32, tokens=128), Shape(items=1, tokens=128))
_DRY_BUCKETS = (Shape(items=1, tokens=64),)
_LARGE_ITEMS = (1, 8, 32, 64, 128)
_COMPILED_LARGE_ITEMS = (1, 32)
_LARGE_TOKENS = 384
# Samples/s of BERT-large on one H100: an eighth of the 70,690 samples/s that MLPerf Inference 3.1
# (closed division, offline) lists for eight H100s with 8-bit engines, at 99 % of the reference
# accuracy on SQuAD. Results are stated as a share of the rate below.
KNOWN_LARGE_SAMPLES_PER_S = 8_836


@dataclass(frozen=True)
class _EncoderModel:
    """A prepared checkpoint and the graphs that the compiler builds from it."""

    prepared: Any  # PreparedModel, which is imported on use
    graphs: Any  # CandidateGraphs, which is imported on use

    def open(self, recipe: CandidateRecipe, target: Target) -> EncoderEngine:
        """Build and open the graph of a candidate. A dry run uses the CPU provider.

        Raises MissingRequirement if this machine cannot run the candidate.
        """
        from build_artifacts.encoders.candidates import build_graph_spec

        if not target.is_cuda:
            recipe = replace(recipe, options=recipe.options.model_copy(update={"providers": ()}))
        settings = target.encoder_settings()
        planned = build_graph_spec(recipe, Path(recipe.name), self.prepared)
        require(missing_requirement(planned, settings))
        graph = self.graphs.graph(recipe)
        return open_engine(build_graph_spec(recipe, graph, self.prepared), settings)


def _model(bench: Bench, sizes: BertSizes, task: TaskName) -> _EncoderModel:
    build = partial(_build, bench, sizes, task)
    return bench.once(f"encoder/{task}/{sizes[0]}", build)


def _build(bench: Bench, sizes: BertSizes, task: TaskName, root: Path) -> _EncoderModel:
    """Write and prepare a checkpoint, without reference outputs."""
    from build_artifacts.checkpoints.models import load_model
    from build_artifacts.compaction.find import find_compaction
    from build_artifacts.encoders.candidates import CandidateGraphs
    from build_artifacts.encoders.preparation import COMPACTION_NAME, PreparedModel

    weights = root / "checkpoint"
    weights.mkdir()
    write_bert(weights, sizes, task, bench.target.seed)
    metadata = read_checkpoint(weights, task)
    model = load_model(weights, head=metadata.loaded_head, dtype="float32")
    compaction = find_compaction(model).model_dump_json()
    (root / COMPACTION_NAME).write_text(compaction, encoding="utf-8")
    prepared = PreparedModel(weights, metadata, root, None)
    return _EncoderModel(prepared, CandidateGraphs(open_steps(root / "build"), prepared))


def _check(bench: Bench, task: TaskName, recipe: CandidateRecipe) -> Mapping[str, Any]:
    """Compare a candidate with fp32 torch, unbatched and batched, as the accuracy gate does."""
    from build_artifacts.encoders.preparation import cached_prepare
    from deployments.tuning.parity import ReferenceOutputs, check_engine

    model = _model(bench, bench.target.choose(MINILM, TINY_BERT), task)
    weights, metadata = model.prepared.weights, model.prepared.metadata

    def compute(into: Path) -> ReferenceOutputs:
        return cached_prepare(open_steps(into), weights, metadata, None).reference

    reference = bench.once(f"reference/{task}", compute)
    if not bench.target.is_cuda:
        recipe = _with_buckets(recipe, _DRY_BUCKETS)
    with closing(model.open(recipe, bench.target)) as engine:
        found = check_engine(engine, reference, Gate(), metadata.head)
    parity = {} if found.parity is None else found.parity.model_dump(mode="json")
    return {**parity, "reasons": list(found.reasons)}


def parity_cases(target: Target) -> list[Case]:
    """Return cases for every candidate and task.

    Compiled candidates run one task only, because compiling nine buckets takes minutes. In a dry
    run, ONNX candidates run one task per output layout, to save exports.
    """
    return [
        Case(f"{task}/{recipe.name}", partial(_check, task=task, recipe=recipe))
        for task in TASKS
        for recipe in CANDIDATES
        if task is TASKS[0] or not recipe.options.compile
        if target.is_cuda or task in _DRY_EXPORTS or recipe.engine == "torch"
    ]


def _with_buckets(recipe: CandidateRecipe, shapes: Sequence[Shape]) -> CandidateRecipe:
    """Replace the buckets of a recipe, if it has buckets."""
    if not recipe.options.buckets:
        return recipe
    buckets = tuple((shape.items, shape.tokens) for shape in shapes)
    return replace(recipe, options=recipe.options.model_copy(update={"buckets": buckets}))


def _shapes(name: str, target: Target) -> tuple[Shape, ...]:
    if not target.is_cuda:
        shapes = (Shape(items=1, tokens=32), Shape(items=2, tokens=32))
        return shapes[:1] if _is_compiled(name) else shapes
    if _is_compiled(name):
        return _COMPILED_SHAPES
    return tuple(Shape(items=items, tokens=tokens) for items in _ITEMS for tokens in _TOKENS)


def _is_compiled(name: str) -> bool:
    """Return whether torch compiles the model for each shape, which takes half a minute or more."""
    return name.endswith("-compiled")


def _time_shapes(
    call: Callable[[Shape], Callable[[], object]], shapes: Sequence[Shape], target: Target
) -> list[dict[str, Any]]:
    rows = []
    for shape in shapes:
        times = time_calls(call(shape), target, seconds=target.choose(0.5, 0.05))
        timing = summarize_ms(times)
        items_per_s = shape.items / (timing["mean_ms"] / 1e3)
        rows.append({"shape": str(shape), **timing, "items_per_s": items_per_s})
    return rows


def _time_candidate(
    bench: Bench, model: _EncoderModel, recipe: CandidateRecipe, shapes: Sequence[Shape]
) -> list[dict[str, Any]]:
    items = _tokenize(model)
    with closing(model.open(recipe, bench.target)) as engine:

        def call(shape: Shape) -> Callable[[], object]:
            batch = build_batch(items, shape, bench.target.seed)
            return lambda: engine.run(batch)

        return _time_shapes(call, shapes, bench.target)


def _time_transformers(
    bench: Bench, model: _EncoderModel, shapes: Sequence[Shape], *, is_compiled: bool
) -> list[dict[str, Any]]:
    """Time transformers in FP16 with mean pooling. Include copies to and from the device."""
    import torch
    from transformers import AutoModel

    target = bench.target
    weights = model.prepared.weights
    loaded = AutoModel.from_pretrained(weights, dtype=torch.float16, local_files_only=True)
    loaded = loaded.eval().to(target.device)
    run = torch.compile(loaded, dynamic=False, mode="reduce-overhead") if is_compiled else loaded
    items = _tokenize(model)

    def call(shape: Shape) -> Callable[[], object]:
        batch = build_batch(items, shape, target.seed)

        def compute() -> object:
            ids, mask = (
                torch.from_numpy(array).to(target.device)
                for array in (batch.input_ids, batch.attention_mask)
            )
            with torch.inference_mode():
                states = run(input_ids=ids, attention_mask=mask).last_hidden_state
            return states.mean(dim=1).float().cpu().numpy()

        return compute

    return _time_shapes(call, shapes, target)


def _tokenize(model: _EncoderModel) -> tuple[TokenizedItem, ...]:
    from build_artifacts.encoders.probes import tokenize_probes

    return tokenize_probes(model.prepared.weights, model.prepared.metadata)


def _measure(
    bench: Bench, name: str, sizes: BertSizes, shapes: Sequence[Shape], *, has_buckets: bool = False
) -> list[dict[str, Any]]:
    """Time a candidate or a baseline. With `has_buckets`, `shapes` replace the recipe's buckets."""
    model = _model(bench, sizes, TaskName.FEATURE_EXTRACTION)
    if name in (EAGER, COMPILED):
        return _time_transformers(bench, model, shapes, is_compiled=name == COMPILED)
    (recipe,) = (candidate for candidate in CANDIDATES if candidate.name == name)
    if has_buckets:
        recipe = _with_buckets(recipe, shapes)
    return _time_candidate(bench, model, recipe, shapes)


def _measure_latency(bench: Bench, name: str) -> Mapping[str, Any]:
    target = bench.target
    sizes, shapes = target.choose(MINILM, TINY_BERT), _shapes(name, target)
    # Compiled candidates compile only these shapes. All other candidates keep the buckets of their
    # recipe, except in a dry run.
    has_buckets = _is_compiled(name) or not target.is_cuda
    rows = _measure(bench, name, sizes, shapes, has_buckets=has_buckets)
    return {"shapes": rows}


def _measure_large(bench: Bench, name: str) -> Mapping[str, Any]:
    """Measure samples/s of BERT-large's shape.

    Also state each rate as a share of KNOWN_LARGE_SAMPLES_PER_S, and its floating-point operations
    per second as a share of the card's matrix rate.
    """
    target = bench.target
    sizes = target.choose(BERT_LARGE, TINY_BERT)
    items, tokens = target.choose((_LARGE_ITEMS, _LARGE_TOKENS), ((1, 2), 48))
    shapes = [
        Shape(items=count, tokens=tokens)
        for count in items
        if not _is_compiled(name) or count in _COMPILED_LARGE_ITEMS
    ]
    rows = _measure(bench, name, sizes, shapes, has_buckets=True)
    rate = bench.once("matrix-rate", lambda _: matrix_rate(target))
    flops = count_flops(sizes, tokens)
    for row in rows:
        row["share_of_matrix_rate"] = row["items_per_s"] * flops / rate
        row["share_of_known"] = row["items_per_s"] / KNOWN_LARGE_SAMPLES_PER_S
    return {"flops_per_sample": flops, "matrix_tflops": rate / 1e12, "shapes": rows}


def count_flops(sizes: BertSizes, tokens: int) -> int:
    """Count the floating-point operations of all matrix products for an item of `tokens` tokens."""
    hidden, layers, _, inner = sizes
    weights = 4 * hidden * hidden + 2 * hidden * inner
    return layers * (2 * tokens * weights + 4 * tokens * tokens * hidden)


def latency_cases(_target: Target) -> list[Case]:
    return [Case(name, partial(_measure_latency, name=name)) for name in _SPEED_NAMES]


def large_cases(_target: Target) -> list[Case]:
    """Return cases for BERT-large. Candidates on torch come first: they need no export to ONNX."""
    in_torch = {r.name for r in CANDIDATES if isinstance(r.source, TorchProgramRecipe)}
    names = sorted(_SPEED_NAMES, key=lambda name: name not in {*in_torch, EAGER, COMPILED})
    return [Case(name, partial(_measure_large, name=name)) for name in names]
