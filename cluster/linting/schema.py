"""Check of every key of a config against the pydantic model that reads it.

All but four of Serve's models ignore unknown keys. Serve validates mappings such as
`autoscaling_config` only after it has read the file. This module applies Serve's own models to all
keys at once.
"""

from __future__ import annotations

import copy
import difflib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from ray.runtime_env import RuntimeEnv
from ray.serve.config import AutoscalingPolicy
from ray.serve.schema import ServeApplicationSchema

from cluster.config_entries import KeyPath

KeyFinding = tuple[KeyPath, str]

# Fields that Serve declares as a dict, with the model that reads them later.
READ_LATER: Mapping[tuple[type[BaseModel], str], type[BaseModel]] = {
    (ServeApplicationSchema, "autoscaling_policy"): AutoscalingPolicy,
}
# Fields without a model -> keys that Ray reads in them.
OPEN_FIELDS: Mapping[str, frozenset[str]] = {
    "runtime_env": frozenset(k for k in RuntimeEnv.known_fields if not k.startswith("_")),
    "fallback_strategy": frozenset({"label_selector"}),
}


@dataclass(frozen=True, slots=True)
class Section:
    """One mapping of the file, and the model that reads it.

    `is_root`: the section is validated on its own. It has no parent section, or the model of its
    parent accepts any mapping in its place.
    """

    path: KeyPath
    value: Mapping[str, Any]
    model: type[BaseModel]
    is_root: bool


def sections(model: type[BaseModel], value: Any, path: KeyPath) -> Iterator[Section]:
    """Yield the mapping at `path`, and all nested mappings that a model reads."""
    return _sections(model, value, path, is_root=True)


def find_problems(section: Section) -> Iterator[KeyFinding]:
    """Yield the unknown keys of a section. For a root section, yield invalid values too."""
    known = section.model.model_fields
    for key, value in section.value.items():
        if key not in known:
            yield (*section.path, str(key)), describe_unknown_key(key, known)
        elif isinstance(value, bool) and _is_number_field(known[key].annotation):
            # Pydantic would read `true` as 1.
            yield (*section.path, str(key)), f"`{str(value).lower()}` is not a number"
    for field, allowed in OPEN_FIELDS.items():
        if field in known:
            yield from _unknown_in_open_field(section, field, allowed)
    if section.is_root:
        yield from _invalid_values(section)


def describe_unknown_key(key: object, known: Iterable[str]) -> str:
    """Build the message for an unknown key, with the closest known key."""
    close = difflib.get_close_matches(str(key), list(known), n=1)
    return f"unknown key `{key}`" + (f"; did you mean `{close[0]}`?" if close else "")


def _sections(
    model: type[BaseModel], value: Any, path: KeyPath, *, is_root: bool
) -> Iterator[Section]:
    if not isinstance(value, dict):
        return
    yield Section(path, value, model, is_root)
    for key, field in model.model_fields.items():
        if key not in value:
            continue
        later = READ_LATER.get((model, key))
        if later is not None:
            yield from _sections(later, value[key], (*path, key), is_root=True)
        else:
            yield from _sections_in(field.annotation, value[key], (*path, key), is_root=False)


def _sections_in(annotation: Any, value: Any, path: KeyPath, *, is_root: bool) -> Iterator[Section]:
    origin, inner = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from _sections(annotation, value, path, is_root=is_root)
    elif origin is Annotated:
        yield from _sections_in(inner[0], value, path, is_root=is_root)
    elif origin in (Union, UnionType):
        # `Union[Dict, Model]` accepts every mapping without validation by the model.
        accepts_any = any(get_origin(choice) is dict for choice in inner)
        for choice in inner:
            yield from _sections_in(choice, value, path, is_root=is_root or accepts_any)
    elif origin in (list, tuple) and inner and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _sections_in(inner[0], item, (*path, index), is_root=is_root)
    elif origin is dict and inner and isinstance(value, dict):
        for key, item in value.items():
            yield from _sections_in(inner[1], item, (*path, str(key)), is_root=is_root)


def _is_number_field(annotation: Any) -> bool:
    """Return whether a field accepts numbers, but no booleans."""
    choices = set(_list_types(annotation))
    return bool(choices & {int, float}) and not choices & {bool, Any}


def _list_types(annotation: Any) -> Iterator[Any]:
    """Yield the types that a field accepts; for a list or mapping, only the type itself."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _list_types(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for choice in get_args(annotation):
            yield from _list_types(choice)
    else:
        yield annotation if origin is None else origin


def _unknown_in_open_field(
    section: Section, field: str, allowed: frozenset[str]
) -> Iterator[KeyFinding]:
    path, value = (*section.path, field), section.value.get(field)
    mappings: list[tuple[KeyPath, Any]] = [(path, value)]
    if isinstance(value, list):
        mappings = [((*path, index), item) for index, item in enumerate(value)]
    for mapping_path, mapping in mappings:
        for key in mapping if isinstance(mapping, dict) else ():
            if key not in allowed:
                yield (*mapping_path, str(key)), describe_unknown_key(key, allowed)


def _invalid_values(section: Section) -> Iterator[KeyFinding]:
    try:
        with warnings.catch_warnings():
            # No config can avoid the deprecation warnings in this version of Ray.
            warnings.simplefilter("ignore")
            section.model.model_validate(copy.deepcopy(section.value))
    except ValidationError as exc:
        for error in exc.errors(include_url=False):
            if error["type"] != "extra_forbidden":  # `find_problems` reports unknown keys
                location = _locate(section.value, error["loc"], missing=error["type"] == "missing")
                message = error["msg"].removeprefix("Value error, ")
                # For instance a version of 12 digits, which YAML reads as a number.
                if error["type"] == "string_type" and isinstance(error["input"], int | float):
                    message += "; put it in quotes"
                yield (*section.path, *location), message
    except (ImportError, AttributeError, TypeError, NotImplementedError) as exc:
        # Some validators of Serve import a named object or assume the type of a value. Pydantic
        # does not convert their exceptions to ValidationError.
        yield section.path, f"Serve cannot read this: {exc}"


def _locate(value: Any, location: tuple[int | str, ...], *, missing: bool) -> KeyPath:
    """Convert `location`, where pydantic reports an error, to a path in the file.

    Locations also contain names of union members, which are not keys of the file.
    """
    path: list[str | int] = []
    for part in location:
        inside_list = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if inside_list or (isinstance(value, dict) and part in value):
            path.append(part)
            value = value[part]
    if missing:
        path.append(location[-1])
    return tuple(path)
