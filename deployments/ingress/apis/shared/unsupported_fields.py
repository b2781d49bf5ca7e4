"""Fields that clients send and no code here obeys, although they would change the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from pydantic import BaseModel

from deployments.errors import InvalidField

# Fields by name, with the values that have no effect, and what to do instead of other values.
UnsupportedFields: TypeAlias = Mapping[str, tuple[Sequence[Any], str]]


def reject_unsupported_fields(body: BaseModel, unsupported: UnsupportedFields) -> None:
    """Raise InvalidField for a field of `unsupported` with an effective value.

    Other unknown keys are ignored, but an answer of another form or content would be wrong.
    """
    for name, (ineffective, instead) in unsupported.items():
        if (value := getattr(body, name)) is not None and value not in ineffective:
            raise InvalidField(f"`{name}` is not supported; {instead}", field=name)
