from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import BaseModel, ConfigDict, Field

from deployments.errors import EmptyInput, InvalidField, ServeError, UnknownParameter
from deployments.tasks.inputs import (
    Inputs,
    NonEmptyText,
    describe_json_type,
    one_or_many,
    parse_parameters,
    text_or,
)


class Question(BaseModel):
    """An object with a required, an optional and a nested part."""

    text: NonEmptyText
    context: NonEmptyText | None = None
    choices: Annotated[list[NonEmptyText], Field(min_length=1)] = ["yes", "no"]


class Wishes(BaseModel):
    """Parameters of a made-up task."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    top_k: int | None = Field(None, ge=1)
    targets: list[NonEmptyText] | None = None


TEXTS: Inputs[Any] = Inputs(one_or_many(NonEmptyText), "a string or a list of strings")
QUESTIONS: Inputs[Any] = Inputs(one_or_many(text_or(Question)), "a string, an object, or a list")
OBJECT: Inputs[Question] = Inputs(Question, "an object with `text`")


@pytest.mark.parametrize("value", ["a", " ", ["a"], ["a", "b"]])
def test_texts_come_alone_or_in_a_list(value: Any) -> None:
    assert TEXTS.read(value) == value


@pytest.mark.parametrize(
    ("value", "error", "field", "said"),
    [
        ("", EmptyInput, "inputs", "`inputs` is empty"),
        ([], EmptyInput, "inputs", "`inputs` is an empty list"),
        (["a", ""], EmptyInput, "inputs[1]", "`inputs[1]` is empty"),
        (7, InvalidField, "inputs", "`inputs` must be a string or a list of strings"),
        (None, InvalidField, "inputs", "`inputs` must be a string or a list of strings"),
        ({"text": "a"}, InvalidField, "inputs", "`inputs` must be a string or a list of strings"),
        (["a", 7], InvalidField, "inputs[1]", "`inputs[1]` must be a string, not a number"),
        (["a", 7.5], InvalidField, "inputs[1]", "`inputs[1]` must be a string, not a number"),
        (["a", True], InvalidField, "inputs[1]", "`inputs[1]` must be a string, not a boolean"),
        (["a", None], InvalidField, "inputs[1]", "`inputs[1]` must be a string, not null"),
        (["a", ["b"]], InvalidField, "inputs[1]", "`inputs[1]` must be a string, not a list"),
        (["a", {}], InvalidField, "inputs[1]", "`inputs[1]` must be a string, not an object"),
    ],
)
def test_what_is_no_text_is_refused_where_it_stands(
    value: Any, error: type[ServeError], field: str, said: str
) -> None:
    with pytest.raises(error) as refusal:
        TEXTS.read(value)
    assert (refusal.value.field, refusal.value.message) == (field, said)


def test_objects_stand_beside_texts() -> None:
    assert QUESTIONS.read({"text": "a"}) == Question(text="a")
    assert QUESTIONS.read(["a", {"text": "b", "context": "c"}]) == [
        "a",
        Question(text="b", context="c"),
    ]


@pytest.mark.parametrize(
    ("value", "error", "field", "said"),
    [
        ({}, InvalidField, "inputs.text", "Error in `inputs.text`: field required"),
        (["a", {}], InvalidField, "inputs[1].text", "Error in `inputs[1].text`: field required"),
        ({"text": ""}, EmptyInput, "inputs.text", "`inputs.text` is empty"),
        ({"text": 1}, InvalidField, "inputs.text", "`inputs.text` must be a string, not a number"),
        (
            {"text": "a", "choices": "b"},
            InvalidField,
            "inputs.choices",
            "`inputs.choices` must be a list, not a string",
        ),
        (
            [{"text": "a", "choices": ["b", None]}],
            InvalidField,
            "inputs[0].choices[1]",
            "`inputs[0].choices[1]` must be a string, not null",
        ),
        (
            {"text": "a", "choices": []},
            EmptyInput,
            "inputs.choices",
            "`inputs.choices` is an empty list",
        ),
        ([["a"]], InvalidField, "inputs[0]", "`inputs[0]` must be a string, not a list"),
        (7, InvalidField, "inputs", "`inputs` must be a string, an object, or a list"),
    ],
)
def test_a_part_of_an_object_is_named_by_its_path(
    value: Any, error: type[ServeError], field: str, said: str
) -> None:
    with pytest.raises(error) as refusal:
        QUESTIONS.read(value)
    assert (refusal.value.field, refusal.value.message) == (field, said)


def test_inputs_may_stand_elsewhere_in_a_body() -> None:
    with pytest.raises(InvalidField, match="`question` must be an object with `text`") as refusal:
        OBJECT.read("a", "question")
    assert refusal.value.field == "question"
    with pytest.raises(InvalidField, match="Error in `text`: field required") as refusal:
        OBJECT.read({}, "")
    assert refusal.value.field == "text"


def test_a_lone_surrogate_is_refused_by_name() -> None:
    # JSON can spell it, no UTF-8 and so no tokenizer can.
    with pytest.raises(InvalidField) as refusal:
        TEXTS.read(["a", "\ud800"])
    assert refusal.value.field == "inputs[1]"
    refusal.value.message.encode()


def test_the_schema_says_what_is_read_and_holds_its_own_definitions() -> None:
    schema = QUESTIONS.schema()
    assert schema["description"] == "a string, an object, or a list"
    assert "Question" in schema["$defs"]
    assert "<" not in str(schema), "names of branches are for paths of errors"


@pytest.mark.parametrize(
    ("raw", "wishes"),
    [
        ({}, Wishes()),
        ({"top_k": None, "targets": None}, Wishes()),
        ({"top_k": 3, "targets": ["a"]}, Wishes(top_k=3, targets=["a"])),
    ],
)
def test_null_is_not_given(raw: dict[str, Any], wishes: Wishes) -> None:
    assert parse_parameters(Wishes, raw) == wishes


@pytest.mark.parametrize(
    ("raw", "error", "field"),
    [
        ({"top_k": 0}, InvalidField, "parameters.top_k"),
        ({"top_k": "3"}, InvalidField, "parameters.top_k"),
        ({"top_k": True}, InvalidField, "parameters.top_k"),
        ({"top_k": 3.0}, InvalidField, "parameters.top_k"),
        ({"targets": ["a", 3]}, InvalidField, "parameters.targets[1]"),
        ({"targets": [""]}, EmptyInput, "parameters.targets[0]"),
        ({"poetry": 1}, UnknownParameter, "parameters.poetry"),
        ({"top_k": 0, "poetry": 1}, UnknownParameter, "parameters.poetry"),
        ({"<one>": 1}, UnknownParameter, "parameters.<one>"),
    ],
)
def test_a_parameter_that_cannot_be_met_is_named(
    raw: dict[str, Any], error: type[ServeError], field: str
) -> None:
    with pytest.raises(error) as refusal:
        parse_parameters(Wishes, raw)
    assert refusal.value.field == field
    assert f"`{field}`" in refusal.value.message


def test_an_unknown_parameter_hears_which_ones_are_known() -> None:
    with pytest.raises(UnknownParameter, match="known: `top_k`, `targets`"):
        parse_parameters(Wishes, {"poetry": 1})


def test_parameters_may_have_another_name() -> None:
    with pytest.raises(InvalidField) as refusal:
        parse_parameters(Wishes, {"top_k": 0}, path="options")
    assert refusal.value.field == "options.top_k"


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({}, "an object"),
        ([], "a list"),
        (True, "a boolean"),
        (1, "a number"),
        (1.5, "a number"),
        ("a", "a string"),
        (None, "null"),
    ],
)
def test_types_are_called_what_json_calls_them(value: Any, name: str) -> None:
    assert describe_json_type(value) == name
