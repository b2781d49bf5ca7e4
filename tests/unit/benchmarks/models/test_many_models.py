from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import yaml

from benchmarks.models.command import (
    ManyModelsResults,
    build_tables,
    draw_zipf,
    evaluate_goals,
    write_config,
)
from benchmarks.models.store import GRAPH_NAME, VERSION, model_name, write_tiny_models
from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.store import find_artifact
from deployments.artifacts.types import Device
from deployments.config import AppArgs, EncoderSettings
from deployments.tuning.costs import TuningTarget
from deployments.tuning.opening import open_tuned_engine

RESULTS = ManyModelsResults(
    models=5_000,
    room=200,
    pool_bytes=300 << 20,
    start_s=20.0,
    start_few_s=19.0,
    requests_per_s=300.0,
    failures={},
    latency_ms={"p50": 10.0, "p99": 100.0},
    models_asked=3_000,
    hot_ms={"p50": 3.0},
    pinned_ms={"p50": 2.5},
    cold_bytes=23_000_000,
    cold_s=(0.4, 0.6, 0.7),
    encoder_mib=(400.0, 900.0),
)


def test_tiny_models_are_sealed_and_share_their_files(tmp_path: Path) -> None:
    write_tiny_models(tmp_path, 3)
    directories = [find_artifact(tmp_path, model_name(number)) for number in range(3)]
    manifests = [ArtifactManifest.read(directory) for directory in directories]
    assert [manifest.id for manifest in manifests] == [model_name(n) for n in range(3)]
    assert manifests[0].version == VERSION
    assert (directories[2] / GRAPH_NAME).stat().st_nlink == 3
    target = TuningTarget(directories[1], manifests[1], Device.CPU, EncoderSettings())
    open_tuned_engine(target).engine.close()


def test_zipf_prefers_few_models_and_draws_many() -> None:
    numbers = draw_zipf(np.random.default_rng(0), 1_000, 20_000)
    ((_, most),) = Counter(numbers.tolist()).most_common(1)
    assert most > 2_000
    assert len(set(numbers.tolist())) > 800


def test_config_has_two_encoders_and_no_generator(tmp_path: Path) -> None:
    path = write_config(tmp_path, 123)
    (application,) = yaml.safe_load(path.read_text())["applications"]
    args = AppArgs.parse(application["args"])
    assert args.encoders[Device.CPU].pool_bytes == 123
    assert list(args.encoders) == [Device.CPU]
    assert not args.generators
    names = [deployment["name"] for deployment in application["deployments"]]
    assert names == ["Ingress", "Tokenizer", "CpuEncoder"]


def test_tables_and_goals_have_the_measured_values() -> None:
    tables = build_tables(RESULTS)
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)
    assert [goal.reached for goal in evaluate_goals(RESULTS)] == [True] * 4
    grown = replace(RESULTS, encoder_mib=(400.0, 1_001.0))
    assert [goal.reached for goal in evaluate_goals(grown)] == [True] * 3 + [False]
