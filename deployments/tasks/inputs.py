"""What `inputs` and `parameters` may be: one type that validates, explains and documents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Generic, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    Discriminator,
    FailFast,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import ErrorDetails

from deployments.errors import EmptyInput, InvalidField, ServeError, UnknownParameter

P = TypeVar("P", bound=BaseModel)
T = TypeVar("T")


class FailFastList(FailFast):
    """Refuse a list at its first wrong item: 100,000 reasons take seconds to be written down."""

    __hash__ = object.__hash__  # which a part of a union needs


NonEmptyText = Annotated[str, Field(min_length=1)]
Many = Annotated[list[T], Field(min_length=1), FailFastList()]
JsonSchema = dict[str, Any]


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


# Of a word from a list: clients of different age write `left` and `Left`.
ANY_CASE = BeforeValidator(_lower)

# Names of a union's branches. They appear in the paths of validation errors, where they say
# nothing to a client, and are left out there: no key of a body looks like them.
_ONE, _MANY, _TEXT, _OBJECT = "<one>", "<many>", "<text>", "<object>"
_EMPTY = {"string_too_short": "is empty", "too_short": "is an empty list"}
_WRONG_TYPES = frozenset({"string_type", "list_type", "model_type", "dict_type"})


def one_or_many(item: Any) -> Any:
    """The type of an `item` or a non-empty list of them.

    Told apart before either is validated, so that an error has one path and one reason.
    """
    return Annotated[
        Annotated[item, Tag(_ONE)] | Annotated[Many[item], Tag(_MANY)],
        Discriminator(lambda value: _MANY if isinstance(value, list) else _ONE),
    ]


def text_or(kind: type[BaseModel]) -> Any:
    """The type of a non-empty text or an object of this kind."""
    return Annotated[
        Annotated[NonEmptyText, Tag(_TEXT)] | Annotated[kind, Tag(_OBJECT)],
        Discriminator(lambda value: _OBJECT if isinstance(value, dict | kind) else _TEXT),
    ]


class Inputs(Generic[T]):
    """The type of a task's `inputs`; `words` says in a sentence what it is."""

    def __init__(self, kind: Any, words: str) -> None:
        self._adapter: TypeAdapter[T] = TypeAdapter(kind)
        self._words = words

    def read(self, value: Any, path: str = "inputs") -> T:
        """`value`, validated. Raises InvalidField or EmptyInput naming the part at fault."""
        try:
            return self._adapter.validate_python(value)
        except ValidationError as exc:
            error = exc.errors(include_url=False)[0]
            if error["type"] in _WRONG_TYPES and error_path(path, error) == path:
                raise InvalidField(f"`{path}` must be {self._words}", field=path) from None
            raise validation_error(path, error) from None

    def schema(self) -> JsonSchema:
        """The JSON schema, definitions inside."""
        return {**self._adapter.json_schema(), "description": self._words}


def parse_parameters(kind: type[P], raw: Mapping[str, Any], *, path: str = "parameters") -> P:
    """`raw` as `kind`. Raises UnknownParameter, EmptyInput or InvalidField naming the key."""
    # Here, because pydantic would write down every one of 200,000 unknown keys.
    if (unknown := next((key for key in raw if key not in kind.model_fields), None)) is not None:
        field = f"{path}.{unknown}"
        known = ", ".join(f"`{name}`" for name in kind.model_fields)
        raise UnknownParameter(f"`{field}` is not known here; known: {known}", field=field)
    try:
        return kind.model_validate(raw)
    except ValidationError as exc:
        raise validation_error(path, exc.errors(include_url=False)[0]) from None


def validation_error(root: str, error: ErrorDetails) -> ServeError:
    """What a client is told of a validation error in the value that `root` names."""
    path, kind = error_path(root, error), error["type"]
    if kind == "missing":
        return InvalidField(f"Error in `{path}`: field required", field=path)
    if kind in _EMPTY:
        return EmptyInput(f"`{path}` {_EMPTY[kind]}", field=path)
    if kind in _WRONG_TYPES:
        due = {"string_type": "a string", "list_type": "a list"}.get(kind, "an object")
        return InvalidField(
            f"`{path}` must be {due}, not {describe_json_type(error['input'])}", field=path
        )
    return InvalidField(f"`{path}`: {error['msg']}", field=path)


def error_path(root: str, error: ErrorDetails) -> str:
    """Where in the body the error is, such as `inputs[3].context`."""
    path = root
    for part in error["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith("<"):
            path += f".{part}" if path else part
    return path


def describe_json_type(value: Any) -> str:
    """What JSON calls the type of `value`."""
    names = {dict: "an object", list: "a list", bool: "a boolean", str: "a string"}
    return "null" if value is None else names.get(type(value), "a number")
