from __future__ import annotations

import pytest

from deployments.generation.prompt_lookup import (
    MAX_INDEXED_TOKENS,
    PromptLookupDrafter,
    VerifyCost,
)

CHEAP = 0.01
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


def drafter(answer: list[int], longest: int = 100) -> PromptLookupDrafter:
    return PromptLookupDrafter(PROMPT, answer, longest)


def test_draft_continues_an_earlier_ngram() -> None:
    assert drafter([20, 2, 3]).draft(4, CHEAP) == [4, 5, 6, 7]
    assert drafter([20, 3, 2]).draft(4, CHEAP) == []
    assert drafter([3]).draft(4, CHEAP) == [], "a single token says too little"


def test_draft_prefers_longer_then_later_ngrams() -> None:
    assert drafter([2, 3, 30, 9, 2, 3]).draft(1, CHEAP) == [30], "the latest 2 3"
    assert drafter([2, 3, 30, 1, 2, 3]).draft(1, CHEAP) == [4], "1 2 3 came once, in the prompt"


def test_draft_uses_ngrams_of_the_growing_answer() -> None:
    answer = [30, 31, 32]
    guesses = drafter(answer)
    assert guesses.draft(4, CHEAP) == []
    answer += [33, 30, 31]
    assert guesses.draft(4, CHEAP) == [32, 33, 30, 31]
    answer += [32, 40]
    assert guesses.draft(4, CHEAP) == []


def test_step_indexes_a_part_of_a_long_prompt() -> None:
    """The drafts in the end are those of a drafter that indexes all tokens at once."""
    prompt = [n % 7 + n // 5_000 for n in range(4 * MAX_INDEXED_TOKENS)]
    answer = [30, 31, *prompt[-3:]]
    guesses = PromptLookupDrafter(prompt, answer, 100)
    drafts = []
    for _ in range(5):
        known = guesses._indexed
        drafts.append(guesses.draft(4, CHEAP))
        assert guesses._indexed - known <= MAX_INDEXED_TOKENS
    whole: dict[tuple[int, ...], int] = {}
    tokens = [*prompt, *answer]
    for position in range(len(tokens)):
        for length in (3, 2):
            if position >= length:
                whole[tuple(tokens[position - length : position])] = position
    assert guesses._positions == whole
    start = whole[tuple(answer[-3:])]
    assert drafts[-1] == tokens[start : start + 4]


@pytest.mark.parametrize(("longest", "most"), [(2, 0), (3, 0), (4, 1), (5, 2), (50, 4)])
def test_draft_is_limited_by_max_new_tokens(longest: int, most: int) -> None:
    """The token that a verification step adds to an accepted draft counts toward the limit."""
    assert len(drafter([2, 3], longest).draft(4, CHEAP)) == most


def test_rejected_drafts_shorten_the_next_ones() -> None:
    guesses = drafter([20, 2, 3])
    first = len(guesses.draft(8, 0.1))
    guesses.update(drafted=4, accepted=0)
    guesses.update(drafted=4, accepted=0)
    assert 0 < len(guesses.draft(8, 0.1)) < first


def test_accepted_drafts_lengthen_the_next_ones() -> None:
    guesses = drafter([20, 2, 3])
    first = len(guesses.draft(5, 0.1))
    guesses.update(drafted=4, accepted=4)
    guesses.update(drafted=4, accepted=4)
    assert len(guesses.draft(5, 0.1)) > first


def test_drafting_stops_after_failures_and_resumes() -> None:
    guesses = drafter([20, 2, 3])
    while proposed := guesses.draft(8, 0.1):
        guesses.update(drafted=len(proposed), accepted=0)
    pauses = 1
    while not guesses.draft(8, 0.1):
        pauses += 1
        assert pauses < 50, "drafting never resumed"
    assert pauses > 1


def test_draft_length_follows_token_cost() -> None:
    lengths = [len(drafter([20, 2, 3]).draft(5, cost)) for cost in (0.7, 0.5, 0.3, 0.2, 0.01)]
    assert lengths == [0, 1, 2, 3, 5], "acceptance probabilities are 0.6, 0.36, 0.216, ..."


def test_verify_cost_is_measured() -> None:
    cost = VerifyCost()
    for _ in range(60):
        cost.update(50, 1, 0.010)
        cost.update(50, 5, 0.022)
        cost.update(50, 5, 0.022)
    assert cost.token_share(50) == pytest.approx(0.3, abs=0.05), (
        "12 ms for four more tokens, beside 10 ms for one"
    )


def test_verify_cost_depends_on_slot_size() -> None:
    cost = VerifyCost()
    first = cost.token_share(1_000)
    for _ in range(30):
        cost.update(50, 1, 0.010)
        cost.update(50, 5, 0.034)
    assert cost.token_share(40) > 0.4
    assert cost.token_share(1_000) == first


def test_verify_cost_recovers_after_a_slow_step() -> None:
    cost = VerifyCost()
    cost.update(50, 1, 0.010)
    for _ in range(50):
        cost.update(50, 5, 10.0)
    assert cost.token_share(50) > 0.9
    for _ in range(150):
        cost.update(50, 1, 0.010)
    assert cost.token_share(50) < 0.2
