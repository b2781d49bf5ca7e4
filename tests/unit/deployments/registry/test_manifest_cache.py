from __future__ import annotations

from pathlib import Path

import pytest

from deployments.messages import ModelRef
from deployments.registry.manifest_cache import ManifestCache
from tests.support.artifacts import seal_tiny


def test_manifests_in_memory_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.registry.manifest_cache.MAX_MANIFESTS", 2)
    names = ["tiny/first", "tiny/second", "tiny/third"]
    refs = [ModelRef(name, seal_tiny(tmp_path, name).name) for name in names]
    cache = ManifestCache(tmp_path)
    first, second, third = [cache.open(ref) for ref in refs]
    assert cache.open(refs[1]) is second
    assert cache.open(refs[2]) is third
    assert cache.open(refs[0]) is not first
