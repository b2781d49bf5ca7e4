from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel

from deployments.errors import InvalidField
from deployments.ingress.apis.shared.typed_objects import reject_other_types, union_by_type
from deployments.tasks.inputs import Inputs


class Circle(BaseModel):
    type: Annotated[Literal["circle"], reject_other_types("circle", advice="send a `{circle}`")]


class Square(BaseModel):
    type: Literal["square"]
    side: int


SHAPES: Inputs[Any] = Inputs(union_by_type(Circle, square=Square), "a shape")


@pytest.mark.parametrize("value", [{"type": "circle"}, {"type": "square", "side": 1}])
def test_type_selects_the_model(value: dict[str, Any]) -> None:
    assert SHAPES.read(value).model_dump() == value


def test_error_of_the_selected_model_has_no_tag_in_its_path() -> None:
    with pytest.raises(InvalidField) as raised:
        SHAPES.read({"type": "square", "side": "a"}, "shape")
    assert raised.value.field == "shape.side"


@pytest.mark.parametrize("value", [None, 7, ["square"], {}, "default", "<square>"])
def test_other_types_are_invalid_values_of_type(value: Any) -> None:
    with pytest.raises(InvalidField) as raised:
        SHAPES.read({"type": value}, "shape")
    assert raised.value.field == "shape.type"


def test_error_names_the_unsupported_type_and_what_to_send() -> None:
    with pytest.raises(InvalidField) as raised:
        SHAPES.read({"type": "{oval}"}, "shape")
    assert raised.value.message == ("`shape.type`: `{oval}` is not supported; send a `{circle}`")
