"""Changes of the plan by operators. Each function returns the new plan.

`selector` is a version or an alias of the model. Functions with a selector raise UnknownModel if
the store has no such version. They raise BadSetting if the selector is an alias of a refused
version and requests get another version in its place. A call with `percent` 0 ends a split or the
shadow. It accepts such an alias too, and a version that the store no longer has. All functions
raise PlanUnusable if the plan cannot be read or written.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from deployments.artifacts.manifest import sealed_ns
from deployments.artifacts.store import LATEST_NAME, model_directory
from deployments.errors import BadSetting, ServeError
from deployments.messages import ModelRef
from deployments.plan.plan import MAX_FORMER, STABLE, ModelPlan, Plan, Refusal, check_alias
from deployments.plan.plan_file import change_model_plan
from deployments.plan.resolution import (
    NO_VERSIONS,
    find_traffic,
    list_rollback_versions,
    resolve_even_refused,
    resolve_selector,
)


def set_alias(store: Path, model_id: str, alias: str, selector: str) -> Plan:
    """Let `alias` name the version that `selector` names.

    Raises BadSetting for an invalid alias or for a selector that names a refused version. Raises
    the errors of `resolve_selector` and `resolve_version` too.
    """
    try:
        check_alias(alias)
    except ValueError as exc:
        raise BadSetting(str(exc)) from exc

    def change(entry: ModelPlan) -> ModelPlan:
        return _move(entry, alias, _resolve_for_change(store, entry, model_id, selector))

    return change_model_plan(store, model_id, change)


def remove_alias(store: Path, model_id: str, alias: str) -> Plan:
    """Remove an alias, and forget the versions that it named before.

    Raises BadSetting if the model has no such alias.
    """

    def change(entry: ModelPlan) -> ModelPlan:
        if alias not in entry.aliases:
            raise BadSetting(f"{model_id} has no alias `{alias}`")
        return _replace(
            entry,
            aliases={k: v for k, v in entry.aliases.items() if k != alias},
            former={k: v for k, v in entry.former.items() if k != alias},
        )

    return change_model_plan(store, model_id, change)


def promote(
    store: Path,
    model_id: str,
    selector: str = LATEST_NAME,
    configured: Mapping[str, str] = NO_VERSIONS,
) -> Plan:
    """Let a version answer all requests that name no version, and end splits and the shadow.

    `configured` is as in `rollback`. The first promotion remembers the version that it replaces.
    If the version was refused, end its refusal.
    """

    def change(entry: ModelPlan) -> ModelPlan:
        version = _resolve_for_change(store, entry, model_id, selector)
        refused = {k: v for k, v in entry.refused.items() if k != version}
        if STABLE not in entry.aliases:
            with suppress(ServeError):  # without a default version, there is none to remember
                default = _find_default(store, entry, model_id, configured)
                entry = _replace(entry, aliases={**entry.aliases, STABLE: default})
        return _replace(_move(entry, STABLE, version), splits={}, shadow=None, refused=refused)

    return change_model_plan(store, model_id, change)


def rollback(store: Path, model_id: str, configured: Mapping[str, str] = NO_VERSIONS) -> Plan:
    """Undo the last promotion, and end splits and the shadow.

    The version that `stable` named before becomes stable again. If there is none, take the version
    that `configured` states for the model id, else the version sealed before the present one.
    Refused versions are skipped. Raises BadSetting if none of these versions remains.
    """

    def change(entry: ModelPlan) -> ModelPlan:
        candidates = list_rollback_versions(store, model_id, entry, configured)
        if not candidates:
            present = _find_default(store, entry, model_id, configured)
            raise BadSetting(f"{model_id} has no version before {present} to roll back to")
        former = entry.former.get(STABLE, ())
        return _replace(
            entry,
            aliases={**entry.aliases, STABLE: candidates[0]},
            former={**entry.former, STABLE: tuple(v for v in candidates[1:] if v in former)},
            splits={},
            shadow=None,
        )

    return change_model_plan(store, model_id, change)


def set_split(
    store: Path,
    model_id: str,
    selector: str,
    percent: float,
    configured: Mapping[str, str] = NO_VERSIONS,
) -> Plan:
    """Let a version answer `percent` of the requests that name no version; 0 ends the split.

    `configured` is as in `rollback`. Raises BadSetting for the default version.
    """

    def change(entry: ModelPlan) -> ModelPlan:
        find = _resolve_for_change if percent else _find_split
        version = find(store, entry, model_id, selector)
        splits = {k: v for k, v in entry.splits.items() if k != version}
        if percent:
            _require_other(store, entry, model_id, version, configured)
            splits[version] = percent
        return _replace(entry, splits=splits)

    return change_model_plan(store, model_id, change)


def set_shadow(
    store: Path,
    model_id: str,
    selector: str,
    percent: float,
    configured: Mapping[str, str] = NO_VERSIONS,
) -> Plan:
    """Let a version repeat `percent` of the requests that name no version.

    The shadow's answers are only compared. 0 ends the shadow of the model, whatever its version is.
    `configured` is as in `rollback`. Raises BadSetting for the default version.
    """

    def change(entry: ModelPlan) -> ModelPlan:
        if not percent:
            return _replace(entry, shadow=None)
        version = _resolve_for_change(store, entry, model_id, selector)
        _require_other(store, entry, model_id, version, configured)
        return _replace(entry, shadow={"version": version, "percent": percent})

    return change_model_plan(store, model_id, change)


def set_pinned(store: Path, model_id: str, pinned: bool) -> Plan:
    """Keep the default version of a model in the memory of the replicas, or allow its eviction."""

    def change(entry: ModelPlan) -> ModelPlan:
        if pinned:
            resolve_selector(store, entry, model_id, LATEST_NAME)
        return _replace(entry, pinned=pinned)

    return change_model_plan(store, model_id, change)


def refuse(store: Path, ref: ModelRef, refusal: Refusal) -> Plan:
    """Refuse a version until it is sealed again, or until it is promoted.

    Aliases of the refused version, such as `latest`, resolve to another usable version, if there is
    one. A split to the refused version ends. See `Refusal` for the requests that still get it.

    Has no effect if the version was removed or sealed again since `refusal.sealed_ns`.
    """

    def change(entry: ModelPlan) -> ModelPlan:
        sealed = sealed_ns(model_directory(store, ref.id) / ref.version)
        return entry.with_refusal(ref.version, refusal) if sealed == refusal.sealed_ns else entry

    return change_model_plan(store, ref.id, change)


def forget(store: Path, model_id: str) -> Plan:
    """Remove a model from the plan, for example because it is removed from the store."""
    return change_model_plan(store, model_id, lambda _: None)


def _resolve_for_change(store: Path, entry: ModelPlan, model_id: str, selector: str) -> str:
    """Resolve `selector` to a version. Raises BadSetting instead of replacing a refused version.

    An operator who promotes `latest` means the newest version, not the newest that works.
    """
    version = resolve_selector(store, entry, model_id, selector)
    named = resolve_even_refused(store, entry, model_id, selector)
    if named != version:
        raise BadSetting(
            f"`{selector}` of {model_id} is {named}, which is refused: "
            f"{entry.refused[named].reason}. Name the version to use it nevertheless"
        )
    return version


def _require_other(
    store: Path, entry: ModelPlan, model_id: str, version: str, configured: Mapping[str, str]
) -> None:
    """Raise BadSetting for the version that answers already.

    A split to it would change nothing until another version becomes the default. Then that other
    version would have the rest of the requests at once.
    """
    if version == _find_default(store, entry, model_id, configured):
        raise BadSetting(
            f"{version} of {model_id} is the default: it has all requests that no split takes. "
            "Promote the version that shall keep the rest first"
        )


def _find_default(
    store: Path, entry: ModelPlan, model_id: str, configured: Mapping[str, str]
) -> str:
    return find_traffic(store, Plan(models={model_id: entry}), model_id, configured).version


def _find_split(store: Path, entry: ModelPlan, model_id: str, selector: str) -> str:
    """Return the version whose split ends. The store may lack a version that has a split.

    Unlike `_resolve_for_change`, accept an alias of a refused version: `refuse` has already ended
    its split.
    """
    named = entry.aliases.get(selector, selector)
    if named in entry.splits:
        return named
    # Not the version that replaces a refused one in requests: it may have a split of its own.
    return resolve_even_refused(store, entry, model_id, selector)


def _move(entry: ModelPlan, alias: str, version: str) -> ModelPlan:
    previous = entry.aliases.get(alias)
    if previous == version:
        return entry
    former = entry.former.get(alias, ())
    if previous is not None:
        former = (previous, *(each for each in former if each != previous))
    retained = tuple(each for each in former if each != version)[:MAX_FORMER]
    return _replace(
        entry,
        aliases={**entry.aliases, alias: version},
        former={**entry.former, alias: retained} if retained else entry.former,
    )


def _replace(entry: ModelPlan, **fields: object) -> ModelPlan:
    """Copy `entry` with changed `fields`. Raises BadSetting if the copy is not valid."""
    try:
        return ModelPlan.model_validate({**dict(entry), **fields})
    except ValidationError as exc:
        raise BadSetting(f"the plan cannot be changed: {exc.errors()[0]['msg']}") from exc
