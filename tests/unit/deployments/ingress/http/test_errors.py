from __future__ import annotations

import pytest

from deployments.errors import InvalidField
from deployments.ingress.http.errors import (
    MAX_FIELD_CHARS,
    MAX_MESSAGE_CHARS,
    rename_error_fields,
    truncate_error,
)


def test_short_error_is_unchanged() -> None:
    error = InvalidField("`inputs` must be a string", field="inputs")
    assert truncate_error(error) is error


def test_long_error_keeps_its_start_and_its_end() -> None:
    error = InvalidField(f"`{'k' * 1_000_000}` is not known here; known: `a`", field="f" * 9_999)
    brief = truncate_error(error)
    assert brief.message.startswith("`kkk")
    assert brief.message.endswith("known: `a`")
    assert len(brief.message) <= MAX_MESSAGE_CHARS + 5
    assert brief.field is not None
    assert len(brief.field) <= MAX_FIELD_CHARS + 5
    assert len(error.message) > 1_000_000, "other requests may share the error"


def test_lone_surrogate_is_replaced() -> None:
    brief = truncate_error(InvalidField("`\ud800` is not known", field="\udfff"))
    assert (brief.message, brief.field) == ("`?` is not known", "?")


def test_error_uses_the_field_names_of_the_api() -> None:
    original = InvalidField("`inputs[3]` is empty", field="inputs[3]")
    with pytest.raises(InvalidField) as error, rename_error_fields({"inputs": "input", "in": "no"}):
        raise original
    assert (error.value.message, error.value.field) == ("`input[3]` is empty", "input[3]")
    assert original.field == "inputs[3]"


def test_field_with_the_same_prefix_is_not_renamed() -> None:
    with pytest.raises(InvalidField) as error, rename_error_fields({"prompt": "inputs", "a.": ""}):
        raise InvalidField("`prompt_logprobs` are not there", field="prompt_logprobs")
    assert (error.value.message, error.value.field) == (
        "`prompt_logprobs` are not there",
        "prompt_logprobs",
    )
    for field, named in (("prompt", "inputs"), ("prompt.a", "inputs.a"), ("a.b", "b")):
        with (
            pytest.raises(InvalidField) as error,
            rename_error_fields({"prompt": "inputs", "a.": ""}),
        ):
            raise InvalidField("wrong", field=field)
        assert error.value.field == named
