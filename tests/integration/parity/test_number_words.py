"""The demo model that writes numbers in words: equality with transformers, and accuracy."""

from __future__ import annotations

import io
import json
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer

from build_artifacts.checkpoints.checkpoint import content_digest
from build_artifacts.demo import find_demo_model
from build_artifacts.pipeline import build
from build_artifacts.progress import BuildProgress
from build_artifacts.recipes import DECODER_FP32
from build_artifacts.training.number_words import ExpressionWords, generate_pairs
from deployments.config import GeneratorSettings
from tests.support.in_process import InProcess
from tests.support.parity_models import UNTUNED

MODEL = find_demo_model("hundredfold/number-words")
CHECKPOINT = Path(MODEL.ref)
EXPRESSIONS = 60
RIGHT = 0.95  # minimum accuracy on held-out expressions; README.md of the checkpoint has figures
DATE, DATE_WORDS = "21 june 1984 14:30", "june twenty-first, nineteen eighty-four, fourteen thirty"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two builds: one as `hundredfold demo --all` makes it, and one in fp32."""
    store = tmp_path_factory.mktemp("words")
    request = replace(MODEL.request(store), budget=UNTUNED)
    fp32 = replace(request.recipe, decoders=(DECODER_FP32,))
    for model_id, recipe in ((MODEL.id, request.recipe), (f"{MODEL.id}-fp32", fp32)):
        build(replace(request, id=model_id, recipe=recipe), BuildProgress(io.StringIO()))
    return store


@pytest.fixture
async def http(store: Path) -> AsyncIterator[httpx.AsyncClient]:
    models = (MODEL.id, f"{MODEL.id}-fp32")
    writes = GeneratorSettings(kv_slots=4, max_context_tokens=128)
    async with InProcess(store, models=models, writes=writes).client() as client:
        yield client


@pytest.fixture(scope="module")
def pairs() -> list[ExpressionWords]:
    return list(islice(generate_pairs(random.Random(9), held_out=True), EXPRESSIONS))


async def write(http: httpx.AsyncClient, model_id: str, text: str, **parameters: Any) -> str:
    body = {"inputs": text, "parameters": parameters}
    response = await http.post(f"/models/{model_id}", json=body)
    assert response.status_code == 200, response.text
    answer: str = response.json()[0]["generated_text"]
    return answer


def test_revision_is_that_of_the_files() -> None:
    assert content_digest(CHECKPOINT) == MODEL.revision


@pytest.mark.parametrize("beams", [1, 4])
async def test_words_equal_those_of_transformers(
    beams: int, http: httpx.AsyncClient, pairs: list[ExpressionWords]
) -> None:
    from transformers import AutoModelForSeq2SeqLM

    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    model = AutoModelForSeq2SeqLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    for text, _ in pairs[:20]:
        ids = torch.tensor([tokenizer.encode(text).ids])
        with torch.inference_mode():
            (expected,) = model.generate(input_ids=ids, num_beams=beams).tolist()
        answer = await write(http, f"{MODEL.id}-fp32", text, num_beams=beams)
        assert answer == tokenizer.decode(expected)


@pytest.mark.parametrize("beams", [1, 4])
async def test_held_out_expressions_are_written_in_words(
    beams: int, http: httpx.AsyncClient, pairs: list[ExpressionWords]
) -> None:
    answers = [await write(http, MODEL.id, text, num_beams=beams) for text, _ in pairs]
    right = sum(answer == words for answer, (_, words) in zip(answers, pairs, strict=True))
    assert right >= RIGHT * len(pairs)


async def test_streamed_words_join_to_the_answer(http: httpx.AsyncClient) -> None:
    body = {"inputs": DATE, "parameters": {"max_new_tokens": 40}}
    path = f"/models/{MODEL.id}/generate_stream"
    async with http.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        lines = [line async for line in response.aiter_lines() if line.startswith("data:")]
    events = [json.loads(line.removeprefix("data:")) for line in lines]
    pieces = [event["token"]["text"] for event in events if not event["token"]["special"]]
    assert len(pieces) > 5
    assert "".join(pieces).strip() == DATE_WORDS
    assert events[-1]["generated_text"] == DATE_WORDS
