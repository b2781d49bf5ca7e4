"""What a task is: body to texts, numbers to an answer. Knows no HTTP and no engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from deployments.errors import EmptyInput, InvalidField, UnknownParameter
from deployments.manifest import ArtifactManifest, TaskName
from deployments.messages import Text, Truncation

P = TypeVar("P", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class TaskInput:
    """A parsed request body: the items, and how the task will decode them."""

    texts: tuple[Text, ...]
    fields: tuple[str, ...]
    options: Any
    truncation: Truncation


class Task(Protocol):
    """One row of TASKS. Stateless."""

    name: ClassVar[TaskName]
    parameters: ClassVar[type[TextParameters]]

    def claims(self, inputs: Any) -> bool:
        """Whether `inputs` has this task's own shape, so that no route needs to name the task."""
        ...

    def parse(
        self, inputs: Any, parameters: Mapping[str, Any], manifest: ArtifactManifest
    ) -> TaskInput:
        """Raises InvalidField, EmptyInput or UnknownParameter, naming the field."""
        ...

    def decode(
        self, answers: Sequence[NDArray[np.float32]], options: Any, manifest: ArtifactManifest
    ) -> Any:
        """One call's answers to its value, in the shape Hugging Face clients expect.

        `answers` are one array per item, of the shape that `manifest.head` says. Runs in the lane,
        next to the numbers, so that only small results travel.
        """
        ...


class TextParameters(BaseModel):
    """Parameters every text task has. null means "not given", as old clients send it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    truncate: bool | None = None
    truncation_direction: Literal["left", "right"] | None = None

    @field_validator("truncation_direction", mode="before")
    @classmethod
    def _any_case(cls, value: Any) -> Any:
        # Clients of different age write `left` and `Left`.
        return value.lower() if isinstance(value, str) else value

    @property
    def truncation(self) -> Truncation:
        """`truncation_direction` names the side that is cut off."""
        if not self.truncate:
            return Truncation.REFUSE
        left = self.truncation_direction == "left"
        return Truncation.KEEP_END if left else Truncation.KEEP_START


def parse_parameters(kind: type[P], raw: Mapping[str, Any], *, path: str = "parameters") -> P:
    """`raw` as `kind`. Raises UnknownParameter or InvalidField naming `path` and the key."""
    try:
        return kind.model_validate(raw)
    except ValidationError as exc:
        first = exc.errors()[0]
        key = ".".join([path, *map(str, first["loc"])])
        if first["type"] == "extra_forbidden":
            known = ", ".join(f"`{name}`" for name in kind.model_fields)
            raise UnknownParameter(f"`{key}` is not known here; known: {known}", field=key) from exc
        raise InvalidField(f"`{key}`: {first['msg']}", field=key) from exc


def text_list(value: Any, path: str) -> tuple[tuple[str, ...], bool]:
    """One text or a list of texts, and whether it was a single one.

    Raises InvalidField or EmptyInput naming `path`, with the index for items of a list.
    """
    if isinstance(value, str):
        return (non_empty_text(value, path),), True
    if not isinstance(value, list):
        raise InvalidField(f"`{path}` must be a string or a list of strings", field=path)
    if not value:
        raise EmptyInput(f"`{path}` is an empty list", field=path)
    return tuple(non_empty_text(item, f"{path}[{i}]") for i, item in enumerate(value)), False


def non_empty_text(value: Any, path: str) -> str:
    """`value` if it is a text with something in it."""
    if not isinstance(value, str):
        raise InvalidField(f"`{path}` must be a string, not {json_type(value)}", field=path)
    if not value:
        raise EmptyInput(f"`{path}` is empty", field=path)
    return value


def json_type(value: Any) -> str:
    """What JSON calls the type of `value`."""
    names = {dict: "an object", list: "a list", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def item_fields(path: str, count: int, *, single: bool) -> tuple[str, ...]:
    """The request paths of `count` items under `path`."""
    return (path,) if single else tuple(f"{path}[{i}]" for i in range(count))


def normalised(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows scaled to length 1; a row of zeros stays zero."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    units: NDArray[np.float32] = rows / np.maximum(norms, 1e-12)
    return units
