"""Finds the models of a store by name and plan, and decides which versions need a trial."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from deployments.artifacts.store import LATEST_NAME, list_model_directories, read_model_id
from deployments.config import AppArgs, ModelSettings
from deployments.errors import ArtifactError, UnknownModel
from deployments.messages import ModelRef
from deployments.plan import changes
from deployments.plan.plan import Refusal, Shadow
from deployments.plan.plan_file import PlanWatch
from deployments.plan.resolution import (
    find_traffic,
    list_refused,
    list_substitutes,
    split_name,
    usable_versions,
)
from deployments.plan.route import ModelRoute
from deployments.registry.manifest_cache import ManifestCache
from deployments.registry.registered_model import RegisteredModel

log = logging.getLogger("ray.serve.hundredfold")

REFRESH_S = 1.0  # seconds until the versions of a name are looked up again
MAX_NAMES = 10_000  # limit of the names whose look-up is cached


class ModelRegistry:
    """Registry that finds the models of a store by name and plan. Use from one thread.

    A look-up of a name is cached for REFRESH_S; a cached look-up takes a microsecond. Manifests are
    read at the first use. The code that loads a model checks the digests of its other files.

    Requests without a model name get a model of the configuration. The digests of these models are
    checked at the start. Another version answers in place of a damaged one. If there is none, the
    error is stored, and requests for the model raise it. If the configuration names the damaged
    version itself, the replica does not start, so that a rollout keeps the previous replicas.
    """

    def __init__(
        self,
        store: Path,
        models: Iterable[ModelSettings],
        clock: Callable[[], float] = time.monotonic,
        *,
        verify: bool = True,
    ) -> None:
        """Read the plan and the configured models. If `verify`, check the digests of these models.

        Raises ArtifactError for an unusable model whose version the configuration names, and
        PlanUnusable for a plan that is unreadable or invalid.
        """
        self._store = store
        self._clock = clock
        self._plan = PlanWatch(store, clock)
        self._configured = {settings.id: settings.version for settings in models}
        self._fixed_versions = {k: v for k, v in self._configured.items() if v != LATEST_NAME}
        # Function that starts a trial: a replica loads and tests a version that is new for a name.
        # If the trial succeeds, the function calls `accept`. None: new versions need no trial.
        self.start_trial: Callable[[RegisteredModel], object] | None = None
        self._accepted: set[ModelRef] = set()
        self._routes: dict[str, ModelRoute[RegisteredModel]] = {}
        self._manifests = ManifestCache(store)
        for model_id in self._configured:
            try:
                self._verify(model_id) if verify else self.find(model_id)
            except ArtifactError as error:
                # The log names the path of the store. The error itself may reach clients and must
                # not name the path.
                log.error("model %s of %s rejected: %s", model_id, store, error)
                if model_id in self._fixed_versions:
                    raise

    @classmethod
    def of(cls, args: AppArgs) -> ModelRegistry:
        return cls(args.store_path(), args.models)

    @property
    def configured(self) -> Mapping[str, str]:
        """The version or `latest` of each model id, as the configuration states it."""
        return self._configured

    def find(self, name: str, client: Callable[[], str] | None = None) -> RegisteredModel:
        """Return the model that answers requests for `name`, an `id` or `id@selector`.

        `client` returns the name of the client; it is called only if the plan splits the requests.
        None ignores splits. Raises UnknownModel for an unknown name, or an ArtifactError if neither
        the version nor a substitute is usable, or if `latest` cannot be read.
        """
        route = self._routes.get(name)
        if route is None or route.expires_s <= self._clock():
            route = self._resolve(name)
        return route.select(client)

    def list_versions(self, model_id: str) -> list[RegisteredModel]:
        """Return the usable versions of a model, without refused versions, the newest first."""
        models = []
        entry = self._plan.current().find(model_id)
        for version in usable_versions(self._store, entry, model_id):
            with suppress(ArtifactError):
                models.append(self._manifests.open(ModelRef(model_id, version)))
        return models

    def find_shadow(self, name: str, ref: ModelRef) -> Shadow | None:
        """Return the shadow of `name`; None if it has a selector or `ref` is not its default."""
        route = self._routes.get(name)
        return route.traffic.shadow if route and route.traffic.version == ref.version else None

    def needs_trial(self, name: str, ref: ModelRef) -> bool:
        """Return whether `ref` needs a trial before it answers requests for `name`.

        A version needs a trial if it has passed none and another version can answer. If no other
        version can answer and `name` does not state this version, accept `ref` without a trial.
        """
        if ref in self._accepted:
            return False
        if self._list_substitutes(name, ref.version):
            return True
        if split_name(name)[1] != ref.version:
            self.accept(ref)
        return False

    def accept(self, ref: ModelRef) -> None:
        """Mark a version as accepted, so that it needs no trial before names resolve to it."""
        self._accepted.add(ref)

    def refuse(self, model: RegisteredModel, reason: str) -> None:
        """Refuse a version by `changes.refuse`. Blocks. Raises PlanUnusable if that fails."""
        changes.refuse(self._store, model.ref, Refusal(reason=reason, sealed_ns=model.sealed_ns))

    def avoid(self, model: RegisteredModel, reason: str) -> None:
        """Let names resolve to other versions for some minutes, in this process only."""
        self._plan.avoid(model.ref, Refusal(reason=reason, sealed_ns=model.sealed_ns))
        self._expire_routes()

    def follow_plan(self) -> None:
        """Read the plan again, and resolve all names again at their next request."""
        self._plan.reload()
        self._expire_routes()

    def _expire_routes(self) -> None:
        self._routes = {name: route._replace(expires_s=0.0) for name, route in self._routes.items()}

    def open_models(self, client: Callable[[], str] | None = None) -> Iterator[RegisteredModel]:
        """Yield the usable models of the configuration, in the order of the configuration.

        `client` is as in `find`.
        """
        for model_id in self._configured:
            with suppress(ArtifactError):
                yield self.find(model_id, client)

    def has_usable_model(self) -> bool:
        """Return whether any model can be used, of the configuration or of the store."""
        if any(True for _ in self.open_models()):
            return True
        with suppress(OSError):  # the store cannot be read
            for directory in list_model_directories(self._store):
                with suppress(ArtifactError, UnknownModel):
                    self.find(read_model_id(directory))
                    return True
        return False

    def list_kept_loaded(self) -> list[RegisteredModel]:
        """Return the models that replicas keep loaded: configured models and pins of the plan."""
        by_plan = (k for k, entry in self._plan.current().models.items() if entry.pinned)
        models = []
        for model_id in dict.fromkeys((*self._configured, *by_plan)):
            with suppress(ArtifactError, UnknownModel):
                models.append(self.find(model_id))
        return models

    def has_fixed_version(self, model_id: str) -> bool:
        """Return whether the model must be usable, because the configuration names its version."""
        return model_id in self._fixed_versions

    def rejected(self) -> dict[str, ArtifactError]:
        """Return the error of each configured model that is not usable, by model id."""
        errors = {}
        for model_id in self._configured:
            try:
                self.find(model_id)
            except ArtifactError as error:
                errors[model_id] = error
        return errors

    def _resolve(self, name: str) -> ModelRoute[RegisteredModel]:
        """Look up a name again.

        The former default keeps answering if the new one is invalid, while `latest` cannot be read,
        and until a trial accepts the new one. A split to a new version begins when a trial accepts
        this version. A version that was removed or is refused stops answering at once, and so does
        one whose split ended.
        """
        former = self._routes.get(name)
        if former is not None and not self._may_stay(former.default):
            former = None
        try:
            route = self._build_route(name)
        except ArtifactError:
            if former is None:
                raise
            splits = self._plan.current().find(former.default.ref.id).splits
            ended = [
                version
                for version, _ in former.traffic.splits
                if version not in splits or not self._may_stay(former.models[version])
            ]
            route = former.without(ended, former.default)
        if former is not None and self.start_trial is not None:
            new = [model for version, model in route.models.items() if version not in former.models]
            untried = [model for model in new if model.ref not in self._accepted]
            for model in untried:
                self.start_trial(model)
            if untried:
                route = route.without({model.ref.version for model in untried}, former.default)
        if name not in self._routes and len(self._routes) >= MAX_NAMES:
            self._routes.clear()
        self._routes[name] = route = route._replace(expires_s=self._clock() + REFRESH_S)
        return route

    def _build_route(self, name: str) -> ModelRoute[RegisteredModel]:
        plan = self._plan.current()
        try:
            traffic = find_traffic(self._store, plan, name, self._configured)
        except UnknownModel as error:
            if name in self._configured and isinstance(error.__cause__, ArtifactError):
                raise error.__cause__ from None  # the name is valid, but the model is damaged
            raise
        model_id, _ = split_name(name)
        default = self._open_default(name, ModelRef(model_id, traffic.version))
        models = {default.ref.version: default}
        splits = []
        for version, percent in traffic.splits:
            try:
                models[version] = self._manifests.open(ModelRef(model_id, version))
                splits.append((version, percent))
            except ArtifactError as error:
                log.error("no split of %s to %s: %s", model_id, version, error.message)
        return ModelRoute(
            traffic._replace(version=default.ref.version, splits=tuple(splits)), models
        )

    def _may_stay(self, model: RegisteredModel) -> bool:
        """Return whether the former version may keep answering: it exists and is not refused."""
        entry = self._plan.current().find(model.ref.id)
        refused = list_refused(self._store, model.ref.id, entry)
        return model.directory.is_dir() and model.ref.version not in refused

    def _open_default(self, name: str, ref: ModelRef) -> RegisteredModel:
        """Open version `ref` for a name, or a substitute if `ref` is known to be unusable."""
        try:
            return self._manifests.open(ref)
        except ArtifactError as error:
            for version in self._list_substitutes(name, ref.version):
                with suppress(ArtifactError):
                    model = self._manifests.open(ModelRef(ref.id, version))
                    log.error("%s answers in place of %s", model.ref.name, error.message)
                    return model
            raise

    def _list_substitutes(self, name: str, version: str) -> list[str]:
        plan = self._plan.current()
        return list_substitutes(self._store, plan, name, version, self._configured)

    def _verify(self, model_id: str) -> None:
        """Check the digests of the default version. If it is damaged, check its substitutes.

        Raises ArtifactError if no undamaged version remains. Later calls of `find` raise the error
        too.
        """
        model = self.find(model_id)
        try:
            model.manifest.verify(model.directory)
        except ArtifactError as error:
            self._manifests.mark_unusable(model, error)
            self._routes.pop(model_id, None)
            self._verify(model_id)
