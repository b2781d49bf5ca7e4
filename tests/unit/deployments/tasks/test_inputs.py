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
    """An input object with a required field, an optional field and a list."""

    text: NonEmptyText
    context: NonEmptyText | None = None
    choices: Annotated[list[NonEmptyText], Field(min_length=1)] = ["yes", "no"]


class ExampleParameters(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    top_k: int | None = Field(None, ge=1)
    targets: list[NonEmptyText] | None = None


TEXTS: Inputs[Any] = Inputs(one_or_many(NonEmptyText), "a string or a list of strings")
QUESTIONS: Inputs[Any] = Inputs(one_or_many(text_or(Question)), "a string, an object, or a list")
OBJECT: Inputs[Question] = Inputs(Question, "an object with `text`")


@pytest.mark.parametrize("value", ["a", " ", ["a"], ["a", "b"]])
def test_texts_are_a_string_or_a_list(value: Any) -> None:
    assert TEXTS.read(value) == value


@pytest.mark.parametrize(
    ("value", "error", "field", "message"),
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
def test_invalid_text_is_rejected_with_its_path(
    value: Any, error: type[ServeError], field: str, message: str
) -> None:
    with pytest.raises(error) as caught:
        TEXTS.read(value)
    assert (caught.value.field, caught.value.message) == (field, message)


def test_texts_and_objects_may_be_mixed() -> None:
    assert QUESTIONS.read({"text": "a"}) == Question(text="a")
    assert QUESTIONS.read(["a", {"text": "b", "context": "c"}]) == [
        "a",
        Question(text="b", context="c"),
    ]


@pytest.mark.parametrize(
    ("value", "error", "field", "message"),
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
def test_invalid_key_of_an_object_is_rejected_with_its_path(
    value: Any, error: type[ServeError], field: str, message: str
) -> None:
    with pytest.raises(error) as caught:
        QUESTIONS.read(value)
    assert (caught.value.field, caught.value.message) == (field, message)


def test_inputs_may_have_another_path() -> None:
    with pytest.raises(InvalidField, match="`question` must be an object with `text`") as caught:
        OBJECT.read("a", "question")
    assert caught.value.field == "question"
    with pytest.raises(InvalidField, match="Error in `text`: field required") as caught:
        OBJECT.read({}, "")
    assert caught.value.field == "text"


def test_lone_surrogate_is_rejected() -> None:
    # JSON can encode a lone surrogate, but UTF-8 and therefore tokenizers cannot.
    with pytest.raises(InvalidField) as caught:
        TEXTS.read(["a", "\ud800"])
    assert caught.value.field == "inputs[1]"
    caught.value.message.encode()


def test_schema_describes_inputs_and_includes_definitions() -> None:
    schema = QUESTIONS.schema()
    assert schema["description"] == "a string, an object, or a list"
    assert "Question" in schema["$defs"]
    assert "<" not in str(schema), "names of branches are for paths of errors"


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({}, ExampleParameters()),
        ({"top_k": None, "targets": None}, ExampleParameters()),
        ({"top_k": 3, "targets": ["a"]}, ExampleParameters(top_k=3, targets=["a"])),
    ],
)
def test_null_parameter_is_the_default(raw: dict[str, Any], expected: ExampleParameters) -> None:
    assert parse_parameters(ExampleParameters, raw) == expected


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
def test_invalid_parameter_is_rejected_with_its_path(
    raw: dict[str, Any], error: type[ServeError], field: str
) -> None:
    with pytest.raises(error) as caught:
        parse_parameters(ExampleParameters, raw)
    assert caught.value.field == field
    assert f"`{field}`" in caught.value.message


def test_unknown_parameter_error_lists_the_known_ones() -> None:
    with pytest.raises(UnknownParameter, match="known: `top_k`, `targets`"):
        parse_parameters(ExampleParameters, {"poetry": 1})


def test_parameters_may_have_another_path() -> None:
    with pytest.raises(InvalidField) as caught:
        parse_parameters(ExampleParameters, {"top_k": 0}, path="options")
    assert caught.value.field == "options.top_k"


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
def test_type_names_are_those_of_json(value: Any, name: str) -> None:
    assert describe_json_type(value) == name
