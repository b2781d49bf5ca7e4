from __future__ import annotations

import pytest

from deployments.artifacts.pair_template import PairTemplate

RERANKER = PairTemplate(
    start="Task: ",
    instruction="find answers",
    before_first="\nQ: ",
    before_second="\nD: ",
    end=" =",
)


@pytest.mark.parametrize(
    ("instruction", "text"),
    [
        (None, "Task: find answers\nQ:  what?\nD: this\n ="),
        ("find proofs", "Task: find proofs\nQ:  what?\nD: this\n ="),
    ],
)
def test_contents_stand_between_the_fixed_parts(instruction: str | None, text: str) -> None:
    assert RERANKER.join(" what?", "this\n", instruction) == text


def test_white_space_around_contents_is_removed_if_the_template_does() -> None:
    pair = RERANKER.model_copy(update={"strips": True})
    assert pair.join(" what?", "this\n", "\tfind ") == "Task: \tfind \nQ: what?\nD: this ="
    instruction = RERANKER.model_copy(update={"strips_instruction": True})
    assert instruction.join("what?", " this", "\tfind ") == "Task: find\nQ: what?\nD:  this ="


def test_template_without_an_instruction() -> None:
    template = PairTemplate(before_first="Q: ", before_second=" D: ", end="")
    assert template.join("what?", "this") == "Q: what? D: this"


def test_characters_are_those_of_a_pair_without_text() -> None:
    assert RERANKER.characters == len("Task: find answers\nQ: \nD:  =")
