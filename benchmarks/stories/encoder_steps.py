"""Embedding steps of story a, "10 and 100 times" in docs/stories.md.

Each step adds one technique to the previous step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.agreement import CosineCheck, required_cosine
from benchmarks.common.engine_timing import SENTENCES_PER_BATCH, SortedBatches
from benchmarks.common.errors import BenchmarkError
from benchmarks.common.local_model import LocalModel
from build_artifacts.encoders.candidates import CandidateGraphs
from build_artifacts.progress import BuildProgress
from build_artifacts.report.rebuild import rebuild_prepared
from build_artifacts.report.stages import RebuiltStages, Stage, build_served_stage
from build_artifacts.report.values import (
    BASELINE,
    ReportRequest,
    TimingModes,
    read_served_variants,
)
from build_artifacts.sources.hub import HuggingFaceHub
from build_artifacts.workspaces.step_runner import StepRunner
from build_artifacts.workspaces.workspace import Workspace
from deployments.artifacts.types import Device
from deployments.batching.batch_policy import collate
from deployments.engines import EncoderEngine
from deployments.engines.forward_pass import Batch, Outputs
from deployments.messages import TokenizedItem
from deployments.tokenization.encodings import open_tokenizer
from deployments.tuning.costs import TuningTarget
from deployments.tuning.measure import wait_until_idle

Tokenize = Callable[[str], TokenizedItem]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderStep:
    """One way to compute the embeddings of a sequence of requests with one text each."""

    name: str
    what: str
    tokenize: Tokenize
    engine: EncoderEngine
    min_cosine: float  # to the embeddings of the first step, which computes with fp32 torch
    padded_tokens: int = 0  # each text is padded to this length; 0: no padding
    has_cache: bool = False  # whether repeated texts need no forward pass
    passes: int = 0  # number of concurrent batches; 0: one request at a time, without batches

    def time_requests(self, texts: Sequence[str]) -> float:
        """Compute all requests once, with an empty cache at the start. Return the seconds."""
        wait_until_idle()
        started_s = time.perf_counter()
        self._run(list(dict.fromkeys(texts)) if self.has_cache else texts)
        return time.perf_counter() - started_s

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the embeddings [texts, width], computed as `time_requests` computes them."""
        order, outputs = self._run(texts)
        rows = np.concatenate([each.items for each in outputs])
        embeddings = np.empty_like(rows)
        embeddings[order] = rows
        return embeddings

    def _run(self, texts: Sequence[str]) -> tuple[list[int], list[Outputs]]:
        """Compute `texts`. Row r of the concatenated outputs belongs to text order[r]."""
        if not self.passes:
            outputs = [self.engine.run(self._pad(collate([self.tokenize(t)]))) for t in texts]
            return list(range(len(texts))), outputs
        batches = SortedBatches.build([self.tokenize(t) for t in texts], SENTENCES_PER_BATCH)
        with ThreadPoolExecutor(self.passes) as pool:
            return list(batches.order), list(pool.map(self.engine.run, batches.batches))

    def _pad(self, batch: Batch) -> Batch:
        missing = self.padded_tokens - batch.input_ids.shape[1]
        if missing <= 0:
            return batch
        sides = ((0, 0), (0, missing))
        return replace(
            batch,
            input_ids=np.pad(batch.input_ids, sides),
            attention_mask=np.pad(batch.attention_mask, sides),
            token_type_ids=np.pad(batch.token_type_ids, sides),
        )


@contextmanager
def open_encoder_steps(
    model: LocalModel, store: Path, scratch: Path, texts: Sequence[str]
) -> Iterator[list[EncoderStep]]:
    """Rebuild the graphs that a build makes before the served graph. Open and yield all steps.

    Leave out the steps `graph` and `fusion` if the model does not support their graphs. Raises
    ServeError if another stage cannot be built, or if the slow and the fast tokenizer disagree.
    """
    request = ReportRequest(artifact=model.directory, store=store)
    modes = TimingModes.of(request)
    with ExitStack() as stack:
        stages = _build_stages(model, scratch, modes)
        engines = {
            name: stack.enter_context(_open(stage, batched=False)) for name, stage in stages.items()
        }
        slow, fast = _open_slow_tokenizer(model, scratch), _open_fast_tokenizer(model)
        _check_equal(slow, fast, texts)
        naive = EncoderStep(
            name="naive",
            what="Python tokenizer, every text padded to the maximum, PyTorch eager, "
            "one text at a time",
            tokenize=slow,
            engine=engines[BASELINE],
            min_cosine=required_cosine(model, is_sealed=False),
            padded_tokens=model.manifest.max_tokens,
        )
        steps = [naive]

        def add(name: str, what: str, **changes: Any) -> None:
            steps.append(replace(steps[-1], name=name, what=what, **changes))

        add("fast tokenizer", "compiled tokenizer", tokenize=fast)
        add("no padding", "texts keep their length", padded_tokens=0)
        add("cache", "repeated texts are not computed again", has_cache=True)
        for name, stage in (("graph", "onnx"), ("fusion", "optimized"), ("quantization", "served")):
            if stage in engines:
                bound = required_cosine(model, is_sealed=stage == "served")
                add(name, stages[stage].what, engine=engines[stage], min_cosine=bound)
        batched = stack.enter_context(_open(stages["served"], batched=True))
        add(
            "batching",
            f"batches of {SENTENCES_PER_BATCH} by length, one pass per core",
            engine=batched,
            passes=modes.throughput.concurrent_passes,
        )
        yield steps


def compare_embeddings(
    steps: Sequence[EncoderStep], texts: Sequence[str]
) -> tuple[CosineCheck, ...]:
    """Compare the embeddings of each step with those of the first step."""
    distinct = list(dict.fromkeys(texts))
    expected = steps[0].embed(distinct)
    return tuple(
        CosineCheck.compare(
            f"{step.name} against {steps[0].name}", step.embed(distinct), expected, step.min_cosine
        )
        for step in steps[1:]
    )


def _build_stages(model: LocalModel, scratch: Path, modes: TimingModes) -> dict[str, Stage]:
    """Rebuild the stages of the model's build report, by name. `served` is what a server runs."""
    target = TuningTarget(model.directory, model.manifest, Device.CPU, modes.single_pass)
    served = read_served_variants(target)
    if served is None:
        raise BenchmarkError(
            f"this host cannot serve `{model.manifest.id}`", hint="build the model again"
        )
    with BuildProgress.on_stderr() as progress:
        steps = StepRunner(Workspace(scratch), progress)
        prepared = rebuild_prepared(model.manifest, steps, HuggingFaceHub())
        rebuilt = RebuiltStages(prepared, CandidateGraphs(steps, prepared), modes)
        stages = {stage.name: stage for stage in rebuilt.build_baselines(served, {})}
    return stages | {"served": build_served_stage(served, modes)}


@contextmanager
def _open(stage: Stage, *, batched: bool) -> Iterator[EncoderEngine]:
    engine = stage.open(stage.throughput if batched else stage.single_pass)
    try:
        yield engine
    finally:
        engine.close()


def _open_fast_tokenizer(model: LocalModel) -> Tokenize:
    tokenizer = open_tokenizer(model.directory)
    tokenizer.enable_truncation(model.manifest.max_tokens)

    def tokenize(text: str) -> TokenizedItem:
        ids = np.array(tokenizer.encode(text).ids, np.int32)
        return TokenizedItem(ids, len(ids))

    return tokenize


def _open_slow_tokenizer(model: LocalModel, scratch: Path) -> Tokenize:
    """Open the pure-Python tokenizer of transformers with the model's vocabulary."""
    from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

    vocabulary = open_tokenizer(model.directory).get_vocab()
    file = scratch / "vocab.txt"
    file.write_text("\n".join(sorted(vocabulary, key=vocabulary.__getitem__)), encoding="utf-8")
    tokenizer = BertTokenizerLegacy(str(file))
    max_tokens = model.manifest.max_tokens

    def tokenize(text: str) -> TokenizedItem:
        ids = tokenizer(text, truncation=True, max_length=max_tokens)["input_ids"]
        return TokenizedItem(np.array(ids, np.int32), len(ids))

    return tokenize


def _check_equal(slow: Tokenize, fast: Tokenize, texts: Sequence[str]) -> None:
    for text in dict.fromkeys(texts):
        if not np.array_equal(slow(text).ids, fast(text).ids):
            raise BenchmarkError(
                f"the tokenizers disagree on `{text[:60]}`",
                hint="name an uncased model of BERT's vocabulary with --embedder ID",
            )
