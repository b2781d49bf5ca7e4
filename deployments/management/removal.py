"""Removal of models and versions from a store while servers use it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from deployments.artifacts.locks import try_exclusive_lock
from deployments.artifacts.store import (
    LATEST_NAME,
    build_path,
    building_directory,
    is_being_built,
    lock_path,
    model_directory,
    remove_atomically,
    resolve_version,
    set_latest,
    store_errors,
)
from deployments.builds.queue import BuildQueue
from deployments.errors import (
    ArtifactMissing,
    LatestInvalid,
    ManifestInvalid,
    ModelInUse,
    UnknownModel,
)
from deployments.plan.changes import forget
from deployments.plan.plan_file import plan_lock, read_plan
from deployments.plan.resolution import (
    NO_VERSIONS,
    list_answering,
    resolve_even_refused,
    sealed_versions,
    split_name,
)


def remove(
    store: Path,
    name: str,
    configured: Mapping[str, str] = NO_VERSIONS,
    keep: Collection[str] = (),
) -> list[str]:
    """Remove a model (`id`) with all its versions, plan and builds, or a single `id@version`.

    Replicas answer their current requests and then forget the model. Returns the removed versions.
    `configured` maps model ids to the versions that the configuration names. `keep` lists further
    versions of the configuration, as `id@version`. Raises UnknownModel, StoreNotWritable,
    PlanUnusable or ModelInUse. A model or version is in use while it is being built. A single
    version is also in use while `keep` contains it, or while requests that do not name it
    explicitly need it. A whole model can be removed even if the configuration names it.
    """
    model_id, selector = split_name(name)
    versions = _find_versions(store, model_id)
    if selector is None:
        _remove_model(store, model_id, versions)
        return versions
    # With the lock on the plan, no operator can promote the version meanwhile.
    with _removal_errors(store, model_id), plan_lock(store):
        version = _find_removable(store, model_id, selector, configured, keep)
        with _without_builds(store, model_id, [version]):
            remove_atomically(model_directory(store, model_id) / version, building_directory(store))
            _update_latest(store, model_id)
    return [version]


def _remove_model(store: Path, model_id: str, versions: Sequence[str]) -> None:
    # `_without_builds` blocks builds of the stored versions only. The build of another version
    # would bring the removed model back.
    if _is_being_built(store, model_id):
        raise _being_built(model_id)
    with _removal_errors(store, model_id), _without_builds(store, model_id, versions):
        if not BuildQueue(store).forget(model_id):
            raise _being_built(model_id)
        forget(store, model_id)  # before the files: if the plan cannot be written, no file is lost
        if versions:
            remove_atomically(model_directory(store, model_id), building_directory(store))


def _is_being_built(store: Path, model_id: str) -> bool:
    with store_errors(store, "read the builds of", for_command=False):
        return is_being_built(store, model_id)


def _find_versions(store: Path, model_id: str) -> list[str]:
    """Return the sealed versions of a model; an empty list if its first build has not finished.

    Raises UnknownModel if the model has neither versions nor a build.
    """
    try:
        versions = sealed_versions(store, model_id)
        has_build = BuildQueue(store).read(model_id) is not None
    except ManifestInvalid as exc:
        raise UnknownModel(exc.message, field="model") from exc
    if not versions and not has_build:
        raise UnknownModel(f"Model {model_id} does not exist", field="model")
    return versions


@contextmanager
def _without_builds(store: Path, model_id: str, versions: Iterable[str]) -> Iterator[None]:
    """Prevent builds of these versions during the block. Raises ModelInUse if one runs."""
    with ExitStack() as stack:
        for version in versions:
            lock = lock_path(build_path(store, model_id, version))
            lock.parent.mkdir(exist_ok=True)
            if not stack.enter_context(try_exclusive_lock(lock)):
                raise _being_built(model_id)
        yield


def _update_latest(store: Path, model_id: str) -> None:
    """Let `latest` name the newest version if the version that it named was removed."""
    try:
        resolve_version(store, model_id, LATEST_NAME)
    except (ArtifactMissing, LatestInvalid):
        if versions := sealed_versions(store, model_id):
            set_latest(store, model_id, versions[0])


def _removal_errors(store: Path, model_id: str) -> AbstractContextManager[None]:
    return store_errors(store, f"remove {model_id} from", for_command=False)


def _being_built(model_id: str) -> ModelInUse:
    return ModelInUse(f"Model {model_id} is being built; remove it afterwards")


def _find_removable(
    store: Path,
    model_id: str,
    selector: str,
    configured: Mapping[str, str],
    keep: Collection[str],
) -> str:
    """Return the version that `selector` names.

    Raises UnknownModel if there is none. Raises ModelInUse if an alias, a split, the shadow or
    requests without a version use it, or if `keep` contains it.
    """
    plan = read_plan(store)
    entry = plan.find(model_id)
    version = resolve_even_refused(store, entry, model_id, selector)
    uses = [f"the alias `{alias}`" for alias, named in entry.aliases.items() if named == version]
    if version in list_answering(store, plan, model_id, configured):
        uses.append("requests that name no version")
    if f"{model_id}@{version}" in keep or configured.get(model_id) == version:
        uses.append("the configuration")
    if version in entry.splits:
        uses.append("a split")
    if entry.shadow is not None and entry.shadow.version == version:
        uses.append("the shadow")
    if uses:
        raise ModelInUse(
            f"Version {version} of {model_id} is used by {', '.join(uses)}. Promote another "
            "version, or end that, or remove the whole model"
        )
    return version
