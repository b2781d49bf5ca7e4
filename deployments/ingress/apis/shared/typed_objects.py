"""Types of objects that their key `type` tells apart, such as the parts of a message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from deployments.tasks.inputs import union_of


def union_by_type(default: Any, **kinds: Any) -> Any:
    """Build the union of `kinds`, by the value of their key `type`, and of `default`.

    Objects of other types are validated as `default`, so that the error names `type`.
    """

    def select(value: Any) -> str:
        found = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return found if isinstance(found, str) and found in kinds else "default"

    return union_of(select, default=default, **kinds)


def reject_other_types(
    *known: str, advice: str, advice_by_type: Mapping[str, str] = {}
) -> BeforeValidator:
    """Build a validator of a key `type`. Its error names the unsupported type, and what to do."""

    def check(value: Any) -> Any:
        if isinstance(value, str) and value not in known:
            # As a value, because pydantic would format braces of the message.
            message = f"`{value}` is not supported; {advice_by_type.get(value, advice)}"
            raise PydanticCustomError("unsupported_type", "{message}", {"message": message})
        return value

    return BeforeValidator(check)
