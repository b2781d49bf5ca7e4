"""Types of `inputs` and `parameters`, which validate and document both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, reduce
from operator import or_
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
from pydantic_core import ErrorDetails, PydanticCustomError

from deployments.errors import EmptyInput, InvalidField, ServeError, UnknownParameter

P = TypeVar("P", bound=BaseModel)
T = TypeVar("T")


class FailFastList(FailFast):
    """Annotation of a list whose errors report only the first invalid item.

    Formatting 100,000 errors would take seconds.
    """

    __hash__ = object.__hash__  # annotations in a union must be hashable


NonEmptyText = Annotated[str, Field(min_length=1)]
Many = Annotated[list[T], Field(min_length=1), FailFastList()]
JsonSchema = dict[str, Any]


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


# For enumerated words: old clients send `Left`, new ones `left`.
ANY_CASE = BeforeValidator(_lower)

_EMPTY = {"string_too_short": "is empty", "too_short": "is an empty list"}
_WRONG_TYPES = frozenset({"string_type", "list_type", "model_type", "dict_type"})


def union_of(select: Callable[[Any], str], **kinds: Any) -> Any:
    """Build the union of `kinds`. `select` returns the name of the one to validate a value as.

    The type is selected before validation, so that an error has one path and one reason.
    """
    # Pydantic adds tags to error paths, where clients cannot interpret them; `error_path` removes
    # them. No key of a body starts with `<`.
    tagged = [Annotated[kind, Tag(f"<{name}>")] for name, kind in kinds.items()]
    return Annotated[reduce(or_, tagged), Discriminator(lambda value: f"<{select(value)}>")]


def list_or(one: Any, many: Any) -> Any:
    """Build the type of a list, which has the type `many`, or of another value."""
    return union_of(lambda value: "many" if isinstance(value, list) else "one", one=one, many=many)


def one_or_many(item: Any) -> Any:
    """Build the type of an `item` or a non-empty list of items."""
    return list_or(item, Many[item])


def text_or(kind: Any, text: Any = NonEmptyText) -> Any:
    """Build the type of a text or an object. `kind` is a type of pydantic models or of dicts."""
    return union_of(
        lambda value: "object" if isinstance(value, dict | BaseModel) else "text",
        text=text,
        object=kind,
    )


def require_text(*segments: str | None) -> None:
    """Reject an item without text. Only validators of pydantic call this."""
    if not any(segments):
        raise PydanticCustomError("string_too_short", "every segment is empty")


class Inputs(Generic[T]):
    """The type of a task's `inputs`. `description` completes "must be ..." in error messages."""

    def __init__(self, kind: Any, description: str) -> None:
        self._adapter: TypeAdapter[T] = TypeAdapter(kind)
        self._description = description

    def read(self, value: Any, path: str = "inputs") -> T:
        """Validate `value`. Raises InvalidField or EmptyInput with the path of the invalid part."""
        try:
            return self._adapter.validate_python(value)
        except ValidationError as exc:
            error = exc.errors(include_url=False)[0]
            if error["type"] in _WRONG_TYPES and error_path(path, error) == path:
                raise InvalidField(f"`{path}` must be {self._description}", field=path) from None
            raise validation_error(path, error) from None

    def schema(self) -> JsonSchema:
        """Return the JSON schema, definitions included."""
        return {**self._adapter.json_schema(), "description": self._description}


def parse_parameters(kind: type[P], raw: Mapping[str, Any], *, path: str = "parameters") -> P:
    """Parse `raw` as `kind`.

    Raises UnknownParameter, EmptyInput or InvalidField with the path of the first invalid key.
    """
    # Check here, because pydantic would format an error per unknown key. A body has room for
    # 200,000 unknown keys.
    if (unknown := next((key for key in raw if key not in kind.model_fields), None)) is not None:
        field = f"{path}.{unknown}"
        known = ", ".join(f"`{name}`" for name in kind.model_fields)
        raise UnknownParameter(f"`{field}` is unknown; known: {known}", field=field)
    try:
        return kind.model_validate(raw) if raw else _build_defaults(kind)
    except ValidationError as exc:
        raise validation_error(path, exc.errors(include_url=False)[0]) from None


@cache
def _build_defaults(kind: type[P]) -> P:
    """Return the default parameters. One cached object suffices, because it is immutable."""
    return kind()


def validation_error(root: str, error: ErrorDetails) -> ServeError:
    """Convert a validation error in the value at path `root` to a ServeError."""
    path, kind = error_path(root, error), error["type"]
    if kind == "missing":
        return InvalidField(f"Error in `{path}`: field required", field=path)
    if kind in _EMPTY:
        return EmptyInput(f"`{path}` {_EMPTY[kind]}", field=path)
    if kind in _WRONG_TYPES:
        expected = {"string_type": "a string", "list_type": "a list"}.get(kind, "an object")
        return InvalidField(
            f"`{path}` must be {expected}, not {describe_json_type(error['input'])}", field=path
        )
    return InvalidField(f"`{path}`: {error['msg']}", field=path)


def error_path(root: str, error: ErrorDetails) -> str:
    """Return the path of the error in the body, such as `inputs[3].context`."""
    path = root
    loc = error["loc"]
    # pydantic adds this mark where the key itself is invalid.
    for part in loc[:-1] if loc[-1:] == ("[key]",) else loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith("<"):
            path += f".{part}" if path else part
    return path


def describe_json_type(value: Any) -> str:
    names = {dict: "an object", list: "a list", bool: "a boolean", str: "a string"}
    return "null" if value is None else names.get(type(value), "a number")
