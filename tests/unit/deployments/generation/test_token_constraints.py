from __future__ import annotations

import pytest

from deployments.generation.logits_rules import TokenConstraints

END = 9


def rules(**given: object) -> TokenConstraints:
    return TokenConstraints(
        **{"max_new_tokens": 6, "min_new_tokens": 0, "eos_token_ids": (END,)} | given
    )


@pytest.mark.parametrize(
    ("given", "answer", "forbidden"),
    [
        pytest.param({}, [1, 2], [], id="nothing"),
        pytest.param({"min_new_tokens": 3}, [1, 2], [END], id="not the end yet"),
        pytest.param({"min_new_tokens": 3}, [1, 2, 3], [], id="long enough to end"),
        pytest.param({"suppressed": (4, 5)}, [], [4, 5], id="never"),
        pytest.param({"no_repeat_ngram_size": 2}, [1, 2, 1], [2], id="a pair that came"),
        pytest.param(
            {"no_repeat_ngram_size": 2}, [1, 2, 1, 3, 1], [2, 3], id="both pairs that came"
        ),
        pytest.param({"no_repeat_ngram_size": 3}, [1, 2, 3, 1, 2], [3], id="three that came"),
        pytest.param({"no_repeat_ngram_size": 2}, [5, 5], [5], id="a pair of equal tokens"),
        pytest.param({"no_repeat_ngram_size": 1}, [1, 2], [1, 2], id="no token twice"),
        pytest.param({"no_repeat_ngram_size": 1}, [5], [5], id="not the first token again"),
        pytest.param({"no_repeat_ngram_size": 3}, [1, 2], [], id="too short to repeat"),
        pytest.param(
            {"no_repeat_ngram_size": 2, "prefix": (7,)}, [1, 7], [1], id="after the start"
        ),
    ],
)
def test_find_forbidden(given: dict, answer: list[int], forbidden: list[int]) -> None:
    assert rules(**given).find_forbidden(answer) == forbidden


@pytest.mark.parametrize(
    ("given", "answer", "forced"),
    [
        pytest.param({}, [], None, id="nothing"),
        pytest.param({"forced_bos_token_id": 4}, [], 4, id="the first"),
        pytest.param({"forced_bos_token_id": 4}, [4], None, id="only the first"),
        pytest.param({"forced_eos_token_id": END}, [1] * 4, None, id="before the last"),
        pytest.param({"forced_eos_token_id": END}, [1] * 5, END, id="the last"),
    ],
)
def test_find_forced(given: dict, answer: list[int], forced: int | None) -> None:
    assert rules(**given).find_forced(answer) == forced
