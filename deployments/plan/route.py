"""The models that answer the requests for one name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Generic, NamedTuple, Protocol, TypeVar

from deployments.messages import ModelRef
from deployments.plan.resolution import Traffic, select_version


class ModelVersion(Protocol):
    @property
    def ref(self) -> ModelRef: ...


M = TypeVar("M", bound=ModelVersion)


class ModelRoute(NamedTuple, Generic[M]):
    """Cached look-up of a name: the models that answer its requests until `expires_s`."""

    traffic: Traffic
    models: Mapping[str, M]  # by version
    expires_s: float = 0.0

    @property
    def default(self) -> M:
        return self.models[self.traffic.version]

    def select(self, client: Callable[[], str] | None) -> M:
        if client is None or not self.traffic.splits:
            return self.default
        return self.models[select_version(self.traffic, client())]

    def without(self, versions: Collection[str], former: M) -> ModelRoute[M]:
        """Return this route without `versions`; `former` replaces a default that is one of them."""
        default = former if self.traffic.version in versions else self.default
        splits = tuple(split for split in self.traffic.splits if split[0] not in versions)
        models = {version: self.models[version] for version, _ in splits}
        shadow = self.traffic.shadow
        if shadow is not None and shadow.version == default.ref.version:
            shadow = None  # a version is not compared with itself
        traffic = self.traffic._replace(version=default.ref.version, splits=splits, shadow=shadow)
        return ModelRoute(traffic, {**models, default.ref.version: default})
