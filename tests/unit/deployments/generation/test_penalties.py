from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from deployments.errors import UnknownToken
from deployments.generation.logits_rules import MAX_ABS_LOGIT, Penalties
from deployments.messages import SamplingParams

LOGITS = np.array([0.0, 2.0, -2.0, 1.0, -np.inf], np.float32)
SIZE = len(LOGITS)


def changed(
    sampling: SamplingParams,
    prompt: list[int],
    answer: list[int],
    logits: NDArray[np.float32] = LOGITS,
) -> list[float]:
    """Return the logits after `answer` with all penalties of `sampling` applied."""
    penalties = Penalties.from_params(sampling, prompt, len(logits))
    assert penalties is not None
    for token in answer:
        penalties.count(token)
    values: list[float] = penalties.apply(logits).tolist()
    return values


@pytest.mark.parametrize(
    ("sampling", "prompt", "answer", "values"),
    [
        (SamplingParams(repetition_penalty=2.0), [1, 1], [], [0, 1, -2, 1]),
        (SamplingParams(repetition_penalty=2.0), [2], [], [0, 2, -4, 1]),
        (SamplingParams(repetition_penalty=0.5), [], [2, 1, 1], [0, 4, -1, 1]),
        (SamplingParams(frequency_penalty=0.5), [1, 2, 3], [1, 1, 2], [0, 1, -2.5, 1]),
        (SamplingParams(presence_penalty=0.5), [2], [1, 1], [0, 1.5, -2, 1]),
        (
            SamplingParams(presence_penalty=0.5, repetition_penalty=2.0),
            [1, 3],
            [3],
            [0, 1, -2, 0],
        ),
        (SamplingParams(frequency_penalty=-1.0), [], [1, 2], [0, 3, -1, 1]),
        (
            SamplingParams(frequency_penalty=0.5, repetition_penalty=2.0),
            [1, 3],
            [1],
            [0, 0.5, -2, 0.5],
        ),
        (SamplingParams(logit_bias=((1, 3.0), (2, -1.5))), [], [], [0, 5, -3.5, 1]),
        (SamplingParams(logit_bias=((1, 3.0), (1, -3.0))), [], [], [0, -1, -2, 1]),
        (
            SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, logit_bias=((1, 3.0),)),
            [],
            [1],
            [0, 2 / 2 - 0.5 + 3, -2, 1],
        ),
    ],
)
def test_penalties_and_biases_change_the_logits(
    sampling: SamplingParams, prompt: list[int], answer: list[int], values: list[float]
) -> None:
    assert changed(sampling, prompt, answer) == [*values, -np.inf]


def test_from_params_without_penalties_is_none() -> None:
    assert Penalties.from_params(SamplingParams(temperature=0.3, top_k=5), [1, 2], SIZE) is None


def test_apply_does_not_modify_its_input() -> None:
    logits = LOGITS.copy()
    logits.setflags(write=False)
    changed(SamplingParams(repetition_penalty=2.0, logit_bias=((0, 1.0),)), [1], [2], logits)
    assert (logits == LOGITS).all()


def test_id_table_grows_with_the_answer() -> None:
    logits = np.zeros(2000, np.float32)
    answer = [*range(1999), *range(1000)]
    values = changed(SamplingParams(frequency_penalty=1.0), [], answer, logits)
    assert values == [-2.0] * 1000 + [-1.0] * 999 + [0.0]


def test_prompt_tokens_without_logits_are_ignored() -> None:
    assert changed(SamplingParams(repetition_penalty=2.0), [1, 9, -3], [])[:4] == [0, 1, -2, 1]


@pytest.mark.parametrize("token", [-1, SIZE])
def test_bias_of_unknown_token_is_rejected(token: int) -> None:
    with pytest.raises(UnknownToken, match=str(token)) as raised:
        Penalties.from_params(SamplingParams(logit_bias=((0, 1.0), (token, 1.0))), [], SIZE)
    assert raised.value.field == "logit_bias"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(logit_bias=tuple((token, 1e300) for token in range(SIZE))),
        SamplingParams(logit_bias=tuple((token, -1e300) for token in range(SIZE))),
        SamplingParams(repetition_penalty=1e-300),
        SamplingParams(repetition_penalty=1e300),
        SamplingParams(frequency_penalty=1e300, presence_penalty=1e300),
    ],
)
def test_huge_penalties_stay_finite_and_keep_minus_infinity(
    sampling: SamplingParams,
) -> None:
    values = changed(sampling, [0, 1, 2, 3, 4], [1, 2, 4])
    assert np.abs(values[:4]).max() <= np.float32(MAX_ABS_LOGIT)
    assert values[4] == -np.inf
