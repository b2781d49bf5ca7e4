"""Changes of the plan by operators: one table for the commands and the routes.

The plan states which versions of each model answer requests (`deployments/plan`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from deployments.artifacts.store import LATEST_NAME
from deployments.errors import (
    BadSetting,
    InvalidField,
    ManifestInvalid,
    UnknownModel,
)
from deployments.management.listing import ModelEntry, describe_model
from deployments.plan import changes
from deployments.plan.resolution import NO_VERSIONS, split_name


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


class ChangedModel(NamedTuple):
    """The model that an action changes, as the request names it."""

    store: Path
    id: str
    selector: str  # text after `@` in the name; `latest` if there is none
    configured: Mapping[str, str]  # versions that the configuration names, by model id


@dataclass(frozen=True, slots=True)
class Action:
    """A change of one model's plan, by `hundredfold models NAME` or `POST /models/{id}/NAME`.

    If `takes_version` is False, a name with a version or an alias is an error, because the action
    always changes the whole model.
    """

    name: str
    summary: str
    arguments: type[Arguments]
    change: Callable[[ChangedModel, Any], object]
    takes_version: bool = True

    def run(
        self,
        store: Path,
        name: str,
        arguments: Arguments,
        configured: Mapping[str, str] = NO_VERSIONS,
    ) -> ModelEntry:
        """Change the plan; return the model's entry after the change.

        `configured` maps model ids to the versions that the configuration names.

        Raises UnknownModel for an unknown model or version, InvalidField if the plan does not allow
        the change, or PlanUnusable if the plan cannot be read or written.
        """
        model_id, selector = split_name(name)
        if selector is not None and not self.takes_version:
            raise InvalidField(
                f"`{self.name}` takes no version; name the model alone: {model_id}", field="model"
            )
        try:
            model = ChangedModel(store, model_id, selector or LATEST_NAME, configured)
            self.change(model, arguments)
        except ManifestInvalid as exc:
            raise UnknownModel(exc.message, field="model") from exc
        except BadSetting as exc:
            raise InvalidField(exc.message, field=self.name) from exc
        return describe_model(store, model_id, configured)


def _alias(model: ChangedModel, arguments: AliasArguments) -> None:
    if arguments.remove:
        changes.remove_alias(model.store, model.id, arguments.alias)
    else:
        changes.set_alias(model.store, model.id, arguments.alias, model.selector)


ACTIONS: Mapping[str, Action] = {
    action.name: action
    for action in (
        Action("alias", "Let an alias name a version", AliasArguments, _alias),
        Action(
            "promote",
            "Let a version answer all requests that name none",
            NoArguments,
            lambda model, _: changes.promote(
                model.store, model.id, model.selector, model.configured
            ),
        ),
        Action(
            "rollback",
            "Undo the last promotion",
            NoArguments,
            lambda model, _: changes.rollback(model.store, model.id, model.configured),
            takes_version=False,
        ),
        Action(
            "split",
            "Let a version answer a share of the requests",
            PercentArguments,
            lambda model, arguments: changes.set_split(
                model.store, model.id, model.selector, arguments.percent, model.configured
            ),
        ),
        Action(
            "shadow",
            "Let a version compute a share of the requests again, to compare",
            PercentArguments,
            lambda model, arguments: changes.set_shadow(
                model.store, model.id, model.selector, arguments.percent, model.configured
            ),
        ),
        Action(
            "pin",
            "Keep a model in the memory of the replicas",
            NoArguments,
            lambda model, _: changes.set_pinned(model.store, model.id, pinned=True),
            takes_version=False,
        ),
        Action(
            "unpin",
            "Let the replicas forget a model while it is unused",
            NoArguments,
            lambda model, _: changes.set_pinned(model.store, model.id, pinned=False),
            takes_version=False,
        ),
    )
}
