"""Every key of a config against the model that will read it.

Serve's models ignore keys they do not know (all but four of them), and a mapping that Serve keeps
as a plain dict until later, such as `autoscaling_config`, is not validated when the file is read.
Both are done here, with the models Serve itself uses.
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

from cluster.linting.document import KeyPath

Finding = tuple[KeyPath, str]

# Fields that Serve declares as a plain dict although a model reads them in the end.
READ_LATER: Mapping[tuple[type[BaseModel], str], type[BaseModel]] = {
    (ServeApplicationSchema, "autoscaling_policy"): AutoscalingPolicy,
}
# Fields without a model, by name: the keys that Ray knows in them.
OPEN_FIELDS: Mapping[str, frozenset[str]] = {
    "runtime_env": frozenset(k for k in RuntimeEnv.known_fields if not k.startswith("_")),
    "fallback_strategy": frozenset({"label_selector"}),
}


@dataclass(frozen=True, slots=True)
class Section:
    """One mapping of the file and the model that reads it.

    `on_its_own`: no section above validates it, because its owner takes any mapping there.
    """

    path: KeyPath
    value: Mapping[str, Any]
    model: type[BaseModel]
    on_its_own: bool


def sections(model: type[BaseModel], value: Any, path: KeyPath) -> Iterator[Section]:
    """The mapping at `path` and all mappings in it that a model reads."""
    return _sections(model, value, path, on_its_own=True)


def find_problems(section: Section) -> Iterator[Finding]:
    """Unknown keys of this mapping, and its wrong values if it is validated on its own."""
    known = section.model.model_fields
    for key in section.value:
        if key not in known:
            yield (*section.path, str(key)), unknown_key(key, known)
    for field, allowed in OPEN_FIELDS.items():
        if field in known:
            yield from _unknown_in_open_field(section, field, allowed)
    if section.on_its_own:
        yield from _wrong_values(section)


def unknown_key(key: object, known: Iterable[str]) -> str:
    """The sentence for a key that nothing reads, with the likeliest spelling."""
    close = difflib.get_close_matches(str(key), list(known), n=1)
    return f"unknown key `{key}`" + (f"; did you mean `{close[0]}`?" if close else "")


def _sections(
    model: type[BaseModel], value: Any, path: KeyPath, *, on_its_own: bool
) -> Iterator[Section]:
    if not isinstance(value, dict):
        return
    yield Section(path, value, model, on_its_own)
    for key, field in model.model_fields.items():
        if key not in value:
            continue
        later = READ_LATER.get((model, key))
        if later is not None:
            yield from _sections(later, value[key], (*path, key), on_its_own=True)
        else:
            yield from _below(field.annotation, value[key], (*path, key), on_its_own=False)


def _below(annotation: Any, value: Any, path: KeyPath, *, on_its_own: bool) -> Iterator[Section]:
    origin, inner = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from _sections(annotation, value, path, on_its_own=on_its_own)
    elif origin is Annotated:
        yield from _below(inner[0], value, path, on_its_own=on_its_own)
    elif origin in (Union, UnionType):
        # `Union[Dict, Model]` takes every mapping as it is.
        takes_all = any(get_origin(choice) is dict for choice in inner)
        for choice in inner:
            yield from _below(choice, value, path, on_its_own=on_its_own or takes_all)
    elif origin in (list, tuple) and inner and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _below(inner[0], item, (*path, index), on_its_own=on_its_own)
    elif origin is dict and inner and isinstance(value, dict):
        for key, item in value.items():
            yield from _below(inner[1], item, (*path, str(key)), on_its_own=on_its_own)


def _unknown_in_open_field(
    section: Section, field: str, allowed: frozenset[str]
) -> Iterator[Finding]:
    path, value = (*section.path, field), section.value.get(field)
    places: list[tuple[KeyPath, Any]] = [(path, value)]
    if isinstance(value, list):
        places = [((*path, index), item) for index, item in enumerate(value)]
    for place, mapping in places:
        for key in mapping if isinstance(mapping, dict) else ():
            if key not in allowed:
                yield (*place, str(key)), unknown_key(key, allowed)


def _wrong_values(section: Section) -> Iterator[Finding]:
    try:
        with warnings.catch_warnings():
            # Deprecations the file cannot avoid in this Ray, and one that is a rule of ours.
            warnings.simplefilter("ignore")
            section.model.model_validate(copy.deepcopy(section.value))
    except ValidationError as exc:
        for error in exc.errors(include_url=False, include_input=False):
            if error["type"] != "extra_forbidden":  # told with a suggestion by `find_problems`
                where = _place(section.value, error["loc"], missing=error["type"] == "missing")
                yield (*section.path, *where), error["msg"].removeprefix("Value error, ")
    except (ImportError, AttributeError, TypeError, NotImplementedError) as exc:
        # Some of Serve's validators import what a string names, or forget that a value may
        # have the wrong type; pydantic lets these through.
        yield section.path, f"Serve cannot read this: {exc}"


def _place(value: Any, location: tuple[int | str, ...], *, missing: bool) -> KeyPath:
    """The error's location without the names of union members, which are no keys of the file."""
    path: list[str | int] = []
    for part in location:
        inside_list = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if inside_list or (isinstance(value, dict) and part in value):
            path.append(part)
            value = value[part]
    if missing:
        path.append(location[-1])
    return tuple(path)
