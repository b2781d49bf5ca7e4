from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deployments import tasks
from deployments.errors import EmptyInput, InvalidField, ServeError, UnknownParameter
from deployments.manifest import TaskName
from deployments.messages import Truncation
from deployments.tasks import TASKS
from deployments.tasks.base import TextParameters, normalised, parse_parameters, text_list


def test_every_task_name_has_its_task_or_is_said_not_to_be_served() -> None:
    assert all(name is task.name for name, task in TASKS.items())
    compiled_only = set(TaskName) - set(TASKS)
    said = (tasks.__doc__ or "").partition("no row here")[2].partition(".")[0]
    assert {name for name in TaskName if name in said} == compiled_only


@pytest.mark.parametrize(
    ("value", "texts", "single"),
    [
        ("a", ("a",), True),
        (" ", (" ",), True),
        (["a"], ("a",), False),
        (["a", "b"], ("a", "b"), False),
    ],
)
def test_texts_come_alone_or_in_a_list(value: Any, texts: tuple[str, ...], single: bool) -> None:
    assert text_list(value, "inputs") == (texts, single)


@pytest.mark.parametrize(
    ("value", "error", "field", "said"),
    [
        ("", EmptyInput, "inputs", "is empty"),
        ([], EmptyInput, "inputs", "empty list"),
        (["a", ""], EmptyInput, "inputs[1]", "is empty"),
        (7, InvalidField, "inputs", "a string or a list of strings"),
        (None, InvalidField, "inputs", "a string or a list of strings"),
        ({"text": "a"}, InvalidField, "inputs", "a string or a list of strings"),
        (["a", 7], InvalidField, "inputs[1]", "not a number"),
        (["a", 7.5], InvalidField, "inputs[1]", "not a number"),
        (["a", True], InvalidField, "inputs[1]", "not a boolean"),
        (["a", None], InvalidField, "inputs[1]", "not null"),
        (["a", ["b"]], InvalidField, "inputs[1]", "not a list"),
        (["a", {}], InvalidField, "inputs[1]", "not an object"),
    ],
)
def test_what_is_no_text_is_refused_where_it_stands(
    value: Any, error: type[ServeError], field: str, said: str
) -> None:
    with pytest.raises(error) as refusal:
        text_list(value, "inputs")
    assert refusal.value.field == field
    assert said in refusal.value.message


@pytest.mark.parametrize(
    ("raw", "truncation"),
    [
        ({}, Truncation.REFUSE),
        ({"truncate": None}, Truncation.REFUSE),
        ({"truncate": False, "truncation_direction": "left"}, Truncation.REFUSE),
        ({"truncate": True}, Truncation.KEEP_START),
        ({"truncate": True, "truncation_direction": "right"}, Truncation.KEEP_START),
        ({"truncate": True, "truncation_direction": "Right"}, Truncation.KEEP_START),
        ({"truncate": True, "truncation_direction": "left"}, Truncation.KEEP_END),
        ({"truncate": True, "truncation_direction": "Left"}, Truncation.KEEP_END),
    ],
)
def test_the_direction_names_the_side_that_is_cut_off(
    raw: dict[str, Any], truncation: Truncation
) -> None:
    assert parse_parameters(TextParameters, raw).truncation is truncation


@pytest.mark.parametrize(
    ("raw", "error", "field"),
    [
        ({"truncat": True}, UnknownParameter, "parameters.truncat"),
        ({"truncate": "yes"}, InvalidField, "parameters.truncate"),
        ({"truncate": 1}, InvalidField, "parameters.truncate"),
        ({"truncation_direction": "up"}, InvalidField, "parameters.truncation_direction"),
        ({"truncation_direction": 3}, InvalidField, "parameters.truncation_direction"),
    ],
)
def test_a_parameter_that_cannot_be_meant_is_named(
    raw: dict[str, Any], error: type[ServeError], field: str
) -> None:
    with pytest.raises(error) as refusal:
        parse_parameters(TextParameters, raw)
    assert refusal.value.field == field
    assert f"`{field}`" in refusal.value.message


def test_an_unknown_parameter_hears_which_ones_are_known() -> None:
    with pytest.raises(UnknownParameter, match="known: `truncate`, `truncation_direction`"):
        parse_parameters(TextParameters, {"poetry": 1})


def test_rows_are_scaled_to_length_one_and_zeros_stay_zeros() -> None:
    rows = np.array([[3, 4], [0, 0]], dtype=np.float32)
    assert normalised(rows) == pytest.approx(np.array([[0.6, 0.8], [0, 0]]), abs=1e-7)
    assert normalised(rows).dtype == np.float32
