"""Stores whose versions have no files but a manifest, for tests of the plan."""

from __future__ import annotations

import os
from pathlib import Path

from deployments.artifacts.manifest import MANIFEST_NAME
from deployments.artifacts.store import model_directory, set_latest
from deployments.plan.plan_file import read_plan
from deployments.plan.resolution import find_traffic

MODEL = "org/model"
OLD, NEW, NEWEST = "aaaaaaaaaaa1", "bbbbbbbbbbb2", "ccccccccccc3"


def seal_version(store: Path, version: str, sealed_s: int, model_id: str = MODEL) -> None:
    directory = model_directory(store, model_id) / version
    directory.mkdir(parents=True)
    (directory / MANIFEST_NAME).write_text("{}")
    os.utime(directory / MANIFEST_NAME, (sealed_s, sealed_s))
    set_latest(store, model_id, version)


def default_version(store: Path, **configured: str) -> str:
    return find_traffic(store, read_plan(store), MODEL, configured).version
