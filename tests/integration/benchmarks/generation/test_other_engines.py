"""Baselines of the generation benchmark: transformers, onnxruntime-genai, a fake llama.cpp."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.local_model import LocalModel
from benchmarks.common.source_checkpoint import (
    SourceCheckpoint,
    has_same_weights,
    require_genai_directory,
)
from benchmarks.generation.other_engines import (
    GenaiSystem,
    LlamaCppSystem,
    PagedTransformersSystem,
    TransformersSystem,
)
from deployments.artifacts.manifest import MANIFEST_NAME
from tests.support.decoder_artifacts import DECODER, seal_tiny_decoder, write_byte_tokenizer

END = 2
PROMPTS = [(5, 6, 7, 8), (9, 10, 11, 12)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights that almost always predicts its end-of-sequence token."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("source") / "tiny"
    tokenizer = write_byte_tokenizer(directory / "tokenizer.json")
    (directory / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}'
    )
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=END,
        bos_token_id=1,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[END] = 10 * model.model.norm.weight
        model.lm_head.weight.abs_()
        model.model.embed_tokens.weight.abs_()
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def model(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    """A decoder artifact whose manifest names `checkpoint` as its source."""
    store = tmp_path_factory.mktemp("store")
    directory = seal_tiny_decoder(store)
    path = directory / MANIFEST_NAME
    path.write_text(path.read_text().replace('"seeded"', f'"{checkpoint}"'))
    return LocalModel.open(store, DECODER)


def right_answers(checkpoint: Path, new_tokens: int, dtype: str) -> list[tuple[int, ...]]:
    """Decode PROMPTS greedily without a KV cache. Never choose the end-of-sequence token."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()
    answers = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(new_tokens):
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -1]
            logits[END] = -torch.inf
            ids.append(int(logits.argmax()))
        answers.append(tuple(ids[len(prompt) :]))
    return answers


def test_transformers_ignores_the_end_of_sequence(checkpoint: Path) -> None:
    loop = TransformersSystem(checkpoint, [END], threads=1)
    group = loop.run(PROMPTS, 6)
    assert [answer.tokens for answer in group.answers] == [6, 6]
    assert all(END not in answer.ids for answer in group.answers)
    alone = loop.run(PROMPTS[:1], 6)
    assert alone.answers[0].ids[:1] == right_answers(checkpoint, 1, "bfloat16")[0]
    assert list(group.answers[0].arrivals_s) == sorted(set(group.answers[0].arrivals_s))
    assert group.answers[0].submitted_s < group.answers[0].arrivals_s[0]


def test_paged_transformers_answers_have_the_requested_length(checkpoint: Path) -> None:
    loop = PagedTransformersSystem(checkpoint, [END], threads=1, kv_slots=2, context=64)
    group = loop.run(PROMPTS, 6)
    loop.close()
    assert [answer.tokens for answer in group.answers] == [6, 6]
    first = [answer.ids[0] for answer in group.answers]
    assert first == [END, END], "the end-of-sequence token was suppressed"
    for answer in group.answers:
        assert list(answer.arrivals_s) == sorted(answer.arrivals_s)
        assert answer.submitted_s < answer.arrivals_s[0]


def test_transformers_without_continuous_batching_is_a_missing_baseline(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    # `transformers` imports its names lazily, so a deleted attribute would come back.
    monkeypatch.setattr(transformers, "ContinuousBatchingConfig", None)
    with pytest.raises(BenchmarkError, match="has no ContinuousBatchingConfig"):
        PagedTransformersSystem(checkpoint, [END], threads=1, kv_slots=2, context=64)


@pytest.mark.slow
def test_genai_directory_is_built_from_the_source(
    checkpoint: Path, model: LocalModel, tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime_genai")
    directory = require_genai_directory(
        SourceCheckpoint(model, None, tmp_path).genai_directory(None)
    )
    assert not has_same_weights(model, directory)
    group = GenaiSystem(directory, threads=1).run(PROMPTS, 6)
    assert [answer.ids for answer in group.answers] == right_answers(checkpoint, 6, "float32")


class TalkingLlama:
    """A fake llama.cpp that counts up from the last prompt token.

    It keeps the prompt until `reset`, and fails if the next prompt comes without a reset.
    """

    def __init__(self) -> None:
        self.read: list[int] = []

    def reset(self) -> None:
        self.read = []

    def generate(
        self, tokens: Sequence[int], *, temp: float, top_k: int, repeat_penalty: float
    ) -> Iterator[int]:
        assert (temp, top_k, repeat_penalty, self.read) == (0.0, 1, 1.0, [])
        self.read += tokens
        return count(tokens[-1] + 1)


def test_llama_resets_before_each_stream() -> None:
    loop = LlamaCppSystem(TalkingLlama())
    assert loop.max_streams == 1
    for prompt in PROMPTS:
        (answer,) = loop.run([prompt], 3).answers
        assert answer.ids == (prompt[-1] + 1, prompt[-1] + 2, prompt[-1] + 3)


def test_llama_open_passes_file_and_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[dict[str, Any]] = []

    class Opening(TalkingLlama):
        def __init__(self, **given: Any) -> None:
            super().__init__()
            opened.append(given)
            if not Path(given["model_path"]).is_file():
                raise ValueError("Model path does not exist")

    package = ModuleType("llama_cpp")
    package.Llama = Opening
    monkeypatch.setitem(sys.modules, "llama_cpp", package)
    file = tmp_path / "model.gguf"
    with pytest.raises(BenchmarkError, match=r"llama.cpp failed: Model path does not exist"):
        LlamaCppSystem.open(file, 256, threads=3)
    file.touch()
    LlamaCppSystem.open(file, 256, threads=3)
    assert (opened[1]["n_ctx"], opened[1]["n_threads"]) == (256, 3)


def test_missing_package_raises_with_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(BenchmarkError, match="`llama_cpp` is not installed") as raised:
        LlamaCppSystem.open(tmp_path / "model.gguf", 256, threads=1)
    assert raised.value.hint == "pip install llama-cpp-python"


def test_require_genai_directory_rejects_other_directories(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"has no genai_config.json"):
        require_genai_directory(tmp_path)
