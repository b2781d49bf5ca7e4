"""Changes of the plan by operators: one table for the commands and the routes.

The plan states which versions of each model answer requests (`deployments/plan`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from deployments.artifacts.store import LATEST_NAME
from deployments.errors import (
    BadSetting,
    InvalidField,
    ManifestInvalid,
    StoreNotWritable,
    UnknownModel,
)
from deployments.management.listing import ModelEntry, describe_model
from deployments.plan import changes
from deployments.plan.resolution import split_name


class Arguments(BaseModel):
    """Arguments of an action, except the model: the body of a route, the options of a command."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class AliasArguments(Arguments):
    alias: str = Field(description="name of the alias, such as `stable`")
    remove: bool = Field(False, description="forget the alias")


class PercentArguments(Arguments):
    percent: float = Field(
        ge=0, le=100, description="percent of the requests that name no version; 0: none"
    )


class NoArguments(Arguments):
    """Arguments of an action that needs only a model."""


@dataclass(frozen=True, slots=True)
class Action:
    """A change of one model's plan, by `hundredfold models NAME` or `POST /models/{id}/NAME`."""

    name: str
    summary: str
    arguments: type[Arguments]
    # Takes the store, the model id, the selector after `@` in the name, and the arguments.
    change: Callable[[Path, str, str, Any], object]

    def run(self, store: Path, name: str, arguments: Arguments) -> ModelEntry:
        """Change the plan; return the model's entry after the change.

        Raises UnknownModel for an unknown model or version, InvalidField if the plan does not allow
        the change, or StoreNotWritable if the plan cannot be read or written.
        """
        model_id, selector = split_name(name)
        try:
            self.change(store, model_id, selector or LATEST_NAME, arguments)
        except ManifestInvalid as exc:
            raise UnknownModel(exc.message, field="model") from exc
        except BadSetting as exc:
            if isinstance(exc.__cause__, OSError):
                raise StoreNotWritable(exc.message) from exc
            raise InvalidField(exc.message, field=self.name) from exc
        return describe_model(store, model_id)


def _alias(store: Path, model_id: str, selector: str, arguments: AliasArguments) -> None:
    if arguments.remove:
        changes.remove_alias(store, model_id, arguments.alias)
    else:
        changes.set_alias(store, model_id, arguments.alias, selector)


ACTIONS: Mapping[str, Action] = {
    action.name: action
    for action in (
        Action("alias", "Let an alias name a version", AliasArguments, _alias),
        Action(
            "promote",
            "Let a version answer all requests that name none",
            NoArguments,
            lambda store, model_id, selector, _: changes.promote(store, model_id, selector),
        ),
        Action(
            "rollback",
            "Undo the last promotion",
            NoArguments,
            lambda store, model_id, _, __: changes.rollback(store, model_id),
        ),
        Action(
            "split",
            "Let a version answer a share of the requests",
            PercentArguments,
            lambda store, model_id, selector, arguments: changes.set_split(
                store, model_id, selector, arguments.percent
            ),
        ),
        Action(
            "shadow",
            "Let a version compute a share of the requests again, to compare",
            PercentArguments,
            lambda store, model_id, selector, arguments: changes.set_shadow(
                store, model_id, selector, arguments.percent
            ),
        ),
        Action(
            "pin",
            "Keep a model in the memory of the replicas",
            NoArguments,
            lambda store, model_id, _, __: changes.set_pinned(store, model_id, pinned=True),
        ),
        Action(
            "unpin",
            "Let the replicas forget a model while it is unused",
            NoArguments,
            lambda store, model_id, _, __: changes.set_pinned(store, model_id, pinned=False),
        ),
    )
}
