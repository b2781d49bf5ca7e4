"""Baselines that run the same model: onnxruntime-genai, transformers and llama.cpp.

Every baseline runs as its documentation recommends. All baselines use the same cores, prompt tokens
and number of new tokens.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.continuous_batching import ContinuousBatching
from benchmarks.common.errors import BenchmarkError
from benchmarks.generation.streams import (
    GENAI,
    LLAMA_CPP,
    PAGED_TRANSFORMERS,
    TRANSFORMERS,
    StreamGroup,
    StreamResult,
)
from build_artifacts.types import Tokens

_MAX_BATCH_TOKENS = 512  # tokens per forward pass; enough for eight prompts of 64 tokens


class TokenTimes:
    """Tokens of a batch with the time of each step."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()
        self._times_s: list[float] = []
        self._tokens: list[NDArray[np.int64]] = []  # one array per step, [streams]

    def add(self, tokens: Sequence[int] | NDArray[np.integer]) -> None:
        """Record one token of each stream with the current time."""
        self._times_s.append(time.perf_counter())
        self._tokens.append(np.array(tokens, np.int64))

    def to_group(self) -> StreamGroup:
        columns = np.stack(self._tokens, axis=1).tolist()
        times_s = tuple(self._times_s)
        return StreamGroup(
            tuple(StreamResult(self._started_s, times_s, len(ids), tuple(ids)) for ids in columns)
        )


class GenaiSystem:
    """Baseline that runs onnxruntime-genai. All prompts of a batch have equal lengths.

    `directory` is the output of onnxruntime-genai's model builder.
    """

    name = GENAI
    max_streams: int | None = None

    def __init__(self, directory: Path, threads: int) -> None:
        genai = _import_package("onnxruntime_genai", ".[build]")
        options = {"session_options": {"intra_op_num_threads": threads}}
        with translate_errors(self.name):
            config = genai.Config(str(directory))
            config.overlay(json.dumps({"model": {"decoder": options}}))
            self._genai = genai
            self._model = genai.Model(config)

    def run(self, prompts: Sequence[Tokens], new_tokens: int) -> StreamGroup:
        with translate_errors(self.name):
            return self._batch(prompts, len(prompts[0]) + new_tokens).to_group()

    def _batch(self, prompts: Sequence[Tokens], length: int) -> TokenTimes:
        steps = TokenTimes()
        parameters = self._genai.GeneratorParams(self._model)
        parameters.set_search_options(
            do_sample=False, batch_size=len(prompts), min_length=length, max_length=length
        )
        generator = self._genai.Generator(self._model, parameters)
        generator.append_tokens(np.array(prompts, np.int32))
        while not generator.is_done():
            generator.generate_next_token()
            steps.add(generator.get_next_tokens())
        return steps


class TransformersSystem:
    """Baseline that runs `generate` of transformers: eager mode, bf16, CPU."""

    name = TRANSFORMERS
    max_streams: int | None = None

    def __init__(
        self,
        weights: Path,
        eos_token_ids: Sequence[int],
        threads: int,
        *,
        use_kv_cache: bool = True,
    ) -> None:
        torch = _import_package("torch", ".[build]")
        transformers = _import_package("transformers", ".[build]")
        torch.set_num_threads(threads)
        self._torch = torch
        self._transformers = transformers
        self._eos_token_ids = list(eos_token_ids)
        self._use_kv_cache = use_kv_cache
        with translate_errors(self.name):
            self._model = transformers.AutoModelForCausalLM.from_pretrained(
                weights, dtype=torch.bfloat16, local_files_only=True, use_safetensors=True
            ).eval()

    def run(self, prompts: Sequence[Tokens], new_tokens: int) -> StreamGroup:
        torch = self._torch
        ids = torch.tensor(prompts)
        settings = self._transformers.GenerationConfig(
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            eos_token_id=self._eos_token_ids,
            pad_token_id=self._eos_token_ids[0],
            use_cache=self._use_kv_cache,
        )
        streamer = _Streamer()
        with translate_errors(self.name), torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=settings,
                streamer=streamer,
            )
        return streamer.steps.to_group()


class PagedTransformersSystem(TransformersSystem):
    """Baseline that runs continuous batching of transformers: eager mode, bf16, CPU.

    The paged KV cache has pages for `kv_slots` streams of `context` tokens.
    """

    name = PAGED_TRANSFORMERS

    def __init__(
        self,
        weights: Path,
        eos_token_ids: Sequence[int],
        threads: int,
        *,
        kv_slots: int,
        context: int,
    ) -> None:
        super().__init__(weights, eos_token_ids, threads)
        with translate_errors(self.name):
            self._batching = ContinuousBatching(
                self._model,
                streams=kv_slots,
                context=context,
                max_batch_tokens=_MAX_BATCH_TOKENS,
            )

    def run(self, prompts: Sequence[Tokens], new_tokens: int) -> StreamGroup:
        with translate_errors(self.name):
            results = self._batching.answer(prompts, new_tokens, record_times=True)
        return StreamGroup(
            tuple(
                StreamResult(
                    submitted_s=result.created_time,
                    arrivals_s=tuple(result.timestamps),
                    tokens=len(result.generated_tokens),
                    ids=tuple(result.generated_tokens),
                )
                for result in results
            )
        )

    def close(self) -> None:
        self._batching.close()


class _Streamer:
    """Streamer for `generate` of transformers. The first `put`, with the prompts, is ignored."""

    def __init__(self) -> None:
        self.steps = TokenTimes()
        self._has_prompts = False

    def put(self, tokens: Any) -> None:
        """Record one decode step. `tokens` is a torch tensor with the new tokens."""
        if self._has_prompts:
            self.steps.add(tokens.reshape(-1).numpy())
        self._has_prompts = True

    def end(self) -> None:
        """Do nothing. `generate` calls this method after the last token."""


class Llama(Protocol):
    """The methods of `llama_cpp.Llama` that this benchmark uses."""

    def reset(self) -> None:
        """Clear the KV cache."""

    def generate(
        self, tokens: Sequence[int], *, temp: float, top_k: int, repeat_penalty: float
    ) -> Iterator[int]:
        """Yield tokens endlessly, even after an end-of-sequence token."""
        ...


class LlamaCppSystem:
    """Baseline that runs llama.cpp through llama-cpp-python, one stream at a time."""

    name = LLAMA_CPP
    max_streams: int | None = 1

    def __init__(self, llama: Llama) -> None:
        self._llama = llama

    @classmethod
    def open(cls, file: Path, context: int, threads: int) -> LlamaCppSystem:
        """Open a GGUF file. Raise BenchmarkError if the file or llama-cpp-python is unusable."""
        package = _import_package("llama_cpp", "llama-cpp-python")
        with translate_errors(cls.name):
            llama = package.Llama(
                model_path=str(file),
                n_ctx=context,
                n_threads=threads,
                n_threads_batch=threads,
                verbose=False,
            )
        return cls(llama)

    def run(self, prompts: Sequence[Tokens], new_tokens: int) -> StreamGroup:
        """Run the single prompt in `prompts`."""
        (prompt,) = prompts
        with translate_errors(self.name):
            self._llama.reset()
            steps = TokenTimes()
            tokens = self._llama.generate(list(prompt), temp=0.0, top_k=1, repeat_penalty=1.0)
            for token in islice(tokens, new_tokens):
                steps.add([token])
            return steps.to_group()


@contextmanager
def translate_errors(name: str) -> Iterator[None]:
    """Raise RuntimeError, ValueError and OSError of a baseline as BenchmarkError.

    The benchmark then drops this baseline and measures the others.
    """
    try:
        yield
    except (RuntimeError, ValueError, OSError) as exc:
        raise BenchmarkError(f"{name} failed: {exc}", hint="leave it out with --skip") from exc


def _import_package(package: str, hint: str) -> Any:
    """Import an optional package. Raises BenchmarkError if it is not installed."""
    try:
        return import_module(package)
    except ImportError as exc:
        raise BenchmarkError(f"`{package}` is not installed", hint=f"pip install {hint}") from exc
