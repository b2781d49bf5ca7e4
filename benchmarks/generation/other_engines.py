"""What others make of the same model: onnxruntime-genai, transformers and llama.cpp.

Each as its own documentation has it, on the same cores, with the same tokens in and as many out.
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

from benchmarks.common.errors import BenchmarkError
from benchmarks.generation.streams import (
    GENAI,
    LLAMA,
    PAGED,
    TRANSFORMERS,
    StreamGroup,
    StreamResult,
    Tokens,
)

_NO_TOKEN = -1  # nothing ends an answer but its length
_TIMEOUT_S = 120.0


class TokenTimes:
    """Notes the tokens of a batch, step by step."""

    def __init__(self) -> None:
        self._asked_s = time.perf_counter()
        self._times_s: list[float] = []
        self._tokens: list[NDArray[np.int64]] = []  # each [n]

    def add(self, tokens: Sequence[int] | NDArray[np.integer]) -> None:
        """The next token of each stream, just now."""
        self._times_s.append(time.perf_counter())
        self._tokens.append(np.array(tokens, np.int64))

    def heat(self) -> StreamGroup:
        """An answer for each stream."""
        columns = np.stack(self._tokens, axis=1).tolist()
        times_s = tuple(self._times_s)
        return StreamGroup(
            tuple(StreamResult(self._asked_s, times_s, len(ids), tuple(ids)) for ids in columns)
        )


class GenaiSystem:
    """onnxruntime-genai's `Generator`: all prompts of a batch have one length, and stay to the end.

    `directory` is what its model builder wrote.
    """

    name = GENAI
    max_streams: int | None = None

    def __init__(self, directory: Path, threads: int) -> None:
        genai = _imported("onnxruntime_genai", ".[build]")
        options = {"session_options": {"intra_op_num_threads": threads}}
        with translate_errors(self.name):
            config = genai.Config(str(directory))
            config.overlay(json.dumps({"model": {"decoder": options}}))
            self._genai = genai
            self._model = genai.Model(config)

    def run(self, prompts: Sequence[Tokens], new_tokens: int) -> StreamGroup:
        """One batch."""
        with translate_errors(self.name):
            return self._batch(prompts, len(prompts[0]) + new_tokens).heat()

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
    """`generate` of transformers: eager, bf16, on the CPU."""

    name = TRANSFORMERS
    max_streams: int | None = None

    def __init__(self, weights: Path, eos_token_ids: Sequence[int], threads: int) -> None:
        torch = _imported("torch", ".[build]")
        transformers = _imported("transformers", ".[build]")
        torch.set_num_threads(threads)
        self._torch = torch
        self._transformers = transformers
        self._end_tokens = list(eos_token_ids)
        with translate_errors(self.name):
            self._model = transformers.AutoModelForCausalLM.from_pretrained(
                weights, dtype=torch.bfloat16, local_files_only=True, use_safetensors=True
            ).eval()

    def run(self, prompts: Sequence[Tokens], new_tokens: int) -> StreamGroup:
        """One batch."""
        torch = self._torch
        ids = torch.tensor(prompts)
        settings = self._transformers.GenerationConfig(
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            eos_token_id=self._end_tokens,
            pad_token_id=self._end_tokens[0],
        )
        listener = _Listener()
        with translate_errors(self.name), torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=settings,
                streamer=listener,
            )
        return listener.steps.heat()


class PagedTransformersSystem(TransformersSystem):
    """Continuous batching of transformers over paged memory: eager, bf16, on the CPU."""

    name = PAGED

    def __init__(self, weights: Path, eos_token_ids: Sequence[int], threads: int) -> None:
        super().__init__(weights, eos_token_ids, threads)
        settings = self._transformers.GenerationConfig(do_sample=False, eos_token_id=_NO_TOKEN)
        with translate_errors(self.name):
            self._manager = self._model.init_continuous_batching(generation_config=settings)
            self._manager.start()

    def run(self, prompts: Sequence[Tokens], new_tokens: int) -> StreamGroup:
        """All at once, each from the moment it was asked."""
        answers: dict[str, StreamResult] = {}
        with translate_errors(self.name):
            asked = self._manager.add_requests(
                [list(prompt) for prompt in prompts],
                max_new_tokens=new_tokens,
                record_timestamps=True,
            )
            while len(answers) < len(asked):
                found = self._manager.get_result(timeout=_TIMEOUT_S)
                if found is None or found.error is not None:
                    raise RuntimeError(found.error if found else "no answer in time")
                ids = tuple(found.generated_tokens)
                times_s = tuple(found.timestamps)
                answers[found.request_id] = StreamResult(found.created_time, times_s, len(ids), ids)
        return StreamGroup(tuple(answers[each] for each in asked))

    def close(self) -> None:
        """Stop its thread."""
        self._manager.stop(block=True)


class _Listener:
    """What `generate` calls a streamer; the first thing that it is told is the prompts."""

    def __init__(self) -> None:
        self.steps = TokenTimes()
        self._has_prompts = False

    def put(self, tokens: Any) -> None:
        """Tokens, a torch tensor."""
        if self._has_prompts:
            self.steps.add(tokens.reshape(-1).numpy())
        self._has_prompts = True

    def end(self) -> None:
        """Nothing more comes."""


class Llama(Protocol):
    """What is needed of `llama_cpp.Llama`."""

    def reset(self) -> None:
        """Forget what was read."""

    def generate(
        self, tokens: Sequence[int], *, temp: float, top_k: int, repeat_penalty: float
    ) -> Iterator[int]:
        """Tokens, also behind an end token."""
        ...


class LlamaCppSystem:
    """llama.cpp through llama-cpp-python, which has one stream."""

    name = LLAMA
    max_streams: int | None = 1

    def __init__(self, llama: Llama) -> None:
        self._llama = llama

    @classmethod
    def opened(cls, file: Path, context: int, threads: int) -> LlamaCppSystem:
        """Over a GGUF file. Raises BenchmarkError where llama-cpp-python is not installed."""
        package = _imported("llama_cpp", "llama-cpp-python")
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
        """The one prompt."""
        (prompt,) = prompts
        with translate_errors(self.name):
            self._llama.reset()
            steps = TokenTimes()
            tokens = self._llama.generate(list(prompt), temp=0.0, top_k=1, repeat_penalty=1.0)
            for token in islice(tokens, new_tokens):
                steps.add([token])
            return steps.heat()


@contextmanager
def translate_errors(name: str) -> Iterator[None]:
    """Give somebody else's failures a name of ours: who fails is left out, the others go on."""
    try:
        yield
    except (RuntimeError, ValueError, OSError) as exc:
        raise BenchmarkError(f"{name} fails: {exc}", hint="leave it out with --without") from exc


def _imported(package: str, hint: str) -> Any:
    """A package that need not be there. Raises BenchmarkError."""
    try:
        return import_module(package)
    except ImportError as exc:
        raise BenchmarkError(f"`{package}` is not installed", hint=f"pip install {hint}") from exc
