"""Beam search equals `generate` of transformers on tiny models with random weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from deployments.generation.beam_search import BeamSearch
from deployments.messages import BeamSearchParams

VOCABULARY = 40
END = 3
PROMPT = [5, 9, 11]
FILLER_SCORE = -1e8  # beams that `generate` never filled have scores below this value


@pytest.fixture(scope="module", params=range(4))
def model(request: pytest.FixtureRequest) -> GPT2LMHeadModel:
    torch.manual_seed(request.param)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=2,
        bos_token_id=1, eos_token_id=END, pad_token_id=0, initializer_range=0.6,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


def run_search(model: GPT2LMHeadModel, params: BeamSearchParams, max_tokens: int) -> BeamSearch:
    """Run the search. Compute each step with the model, without a KV cache."""
    search = BeamSearch(params, max_tokens, (END,))
    while not search.is_over:
        rows = torch.tensor([[*PROMPT, *tokens] for tokens in search.running])
        with torch.inference_mode():
            logits = model(rows).logits[:, -1]
        before = search.running
        steps = search.advance(logits.log_softmax(-1).numpy().astype(np.float32))
        for step, tokens in zip(steps, search.running, strict=False):
            if not search.is_over:
                assert tokens == (*before[step.parent], step.token)
    return search


@pytest.mark.parametrize("beams", [2, 3, 4])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("new_tokens", [1, 4, 12])
def test_beam_search_equals_generate(
    model: GPT2LMHeadModel, beams: int, length_penalty: float, early_stopping, new_tokens: int
) -> None:
    with torch.inference_mode():
        expected = model.generate(
            torch.tensor([PROMPT]),
            num_beams=beams,
            num_return_sequences=beams,
            max_new_tokens=new_tokens,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
    params = BeamSearchParams(beams, length_penalty, early_stopping)
    results = run_search(model, params, new_tokens).best
    scores = [score for score in expected.sequences_scores.tolist() if score >= FILLER_SCORE]
    assert len(results) == len(scores) > 0
    for result, sequence, score in zip(results, expected.sequences.tolist(), scores, strict=False):
        tokens = sequence[len(PROMPT) :]
        tokens = tokens[: tokens.index(END) + 1] if END in tokens else tokens[:new_tokens]
        assert list(result.tokens) == tokens
        assert result.score == pytest.approx(score, rel=1e-4, abs=1e-4)
