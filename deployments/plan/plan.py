"""Data types of the plan, which states the versions of each model that answer requests."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, field_validator

from deployments.artifacts.store import LATEST_NAME, VERSION
from deployments.artifacts.types import FrozenModel

STABLE = "stable"  # the alias that `promote` moves; while it is set, new builds change no answers
ALIAS = re.compile(r"[a-z][a-z0-9._-]{0,62}")
ROUNDING = 1e-9  # error of a sum of percents, which have decimals
MAX_FORMER = 10  # former versions that are stored per alias

Version = Annotated[str, Field(pattern=f"^{VERSION.pattern}$")]
Percent = Annotated[float, Field(gt=0, le=100)]


class Shadow(FrozenModel):
    """A version that computes requests again. Its answers are compared and never sent."""

    version: Version
    percent: Percent  # share of the requests that name no version


class Refusal(FrozenModel):
    """Reason to refuse a version.

    Requests get another version, if the model has one that is not refused. But requests that name
    the refused version itself, not an alias, still get it. So do requests without a version, if the
    configuration names the refused version as the default and there is no alias `stable`.
    """

    reason: str
    sealed_ns: int  # when the version was sealed; sealing it again ends the refusal


class ModelPlan(FrozenModel):
    """Which versions of one model answer, and which share of its requests each of them gets."""

    aliases: dict[str, Version] = Field(default_factory=dict)
    former: dict[str, tuple[Version, ...]] = Field(
        default_factory=dict
    )  # by alias: the versions that it named before, the last one first
    # Percent of the requests that name no version, by version; the default version has the rest.
    splits: dict[Version, Percent] = Field(default_factory=dict)
    shadow: Shadow | None = None
    pinned: bool = False  # the default version stays in the memory of the replicas
    refused: dict[Version, Refusal] = Field(default_factory=dict)

    @field_validator("aliases")
    @classmethod
    def _check_aliases(cls, aliases: dict[str, str]) -> dict[str, str]:
        for alias in aliases:
            check_alias(alias)
        return aliases

    @field_validator("splits")
    @classmethod
    def _check_splits(cls, splits: dict[str, float]) -> dict[str, float]:
        if (total := sum(splits.values())) > 100 + ROUNDING:
            raise ValueError(f"the splits take {total:g} percent of the requests; at most 100")
        return splits

    def with_refusal(self, version: str, refusal: Refusal) -> ModelPlan:
        """Return a copy that refuses `version`. A split to this version ends."""
        splits = {other: percent for other, percent in self.splits.items() if other != version}
        refused = {**self.refused, version: refusal}
        return self.model_copy(update={"splits": splits, "refused": refused})

    def versions(self) -> frozenset[str]:
        """Return the versions that must stay in the store.

        These are the versions of aliases, splits and the shadow. The former versions of aliases
        stay too, because a rollback may return to them.
        """
        former = (version for versions in self.former.values() for version in versions)
        shadow = () if self.shadow is None else (self.shadow.version,)
        return frozenset((*self.aliases.values(), *former, *self.splits, *shadow))


NO_PLAN = ModelPlan()


class Plan(FrozenModel):
    """The plan that all processes share. `number` grows by one with each change."""

    number: int = Field(0, ge=0)
    models: dict[str, ModelPlan] = Field(default_factory=dict)

    def find(self, model_id: str) -> ModelPlan:
        return self.models.get(model_id, NO_PLAN)


def check_alias(alias: str) -> None:
    """Raise ValueError if operators cannot give this name to an alias."""
    if not ALIAS.fullmatch(alias) or VERSION.fullmatch(alias) or alias == LATEST_NAME:
        raise ValueError(
            f"`{alias}` cannot be an alias: use at most 63 lowercase letters, digits, dots, dashes "
            f"and underscores, a letter first. `{LATEST_NAME}` is moved by builds"
        )
