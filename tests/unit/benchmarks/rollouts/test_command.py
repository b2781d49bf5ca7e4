from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import yaml

from benchmarks.common.http import ServerAddress
from benchmarks.common.wire import HttpExchange
from benchmarks.many_models.store import write_version
from benchmarks.rollouts import load as rollout_load
from benchmarks.rollouts.command import (
    MODEL,
    RolloutResults,
    build_table,
    evaluate_goals,
    summarize_step,
    write_own_config,
)
from benchmarks.rollouts.load import RolloutAnswer, VersionedLoad, read_version
from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.store import find_artifact

OLD, NEW = "00000000000a", "00000000000b"
VECTORS = {OLD: [[1.0, 0.0]], NEW: [[0.0, 1.0]]}
BODIES = {OLD: b"[[1.0, 0.0]]", NEW: b"[[0.0, 1.0]]"}


def exchange(version: str, body: bytes, status: int = 200) -> HttpExchange:
    return HttpExchange(status, f"HTTP/1.1 {status} OK\r\nX-Sha: {version}".encode(), body)


async def outcomes(
    monkeypatch: pytest.MonkeyPatch, answer: HttpExchange, *, grace_s: float = 3.0
) -> set[str]:
    """Return the outcomes that VersionedLoad records for `answer` after a move from OLD to NEW."""

    async def send(_address: ServerAddress, _raw: bytes, _timeout_s: float) -> HttpExchange:
        return answer

    monkeypatch.setattr(rollout_load, "send_raw", send)
    monkeypatch.setattr(rollout_load, "GRACE_S", grace_s)
    load = VersionedLoad(ServerAddress("host", 1), VECTORS, ["name"], rate=1_000, seed=0)
    load.begin_step("before", {"name": frozenset({OLD})})
    load.begin_step("after", {"name": frozenset({NEW})})
    load.start()
    while not load.answers:
        await asyncio.sleep(0.001)
    await load.stop()
    return {one.outcome for one in load.answers}


@pytest.mark.parametrize(
    ("answer", "grace_s", "expected"),
    [
        (exchange(NEW, BODIES[NEW]), 0.0, "right"),
        (exchange(OLD, BODIES[OLD]), 60.0, "right"),  # within GRACE_S after the change
        (exchange(OLD, BODIES[OLD]), 0.0, "stale"),
        (exchange(NEW, BODIES[OLD]), 0.0, "wrong"),
        (exchange("feedfeedfeed", BODIES[NEW]), 0.0, "wrong"),
        (exchange(NEW, b"["), 0.0, "wrong"),
        (exchange(NEW, b"{}", status=503), 0.0, "failed"),
        (HttpExchange(0, b"", b""), 0.0, "failed"),
        (HttpExchange(200, b"HTTP/1.1 200 OK\r\nContent-Length: 9", b"[[1."), 0.0, "failed"),
    ],
)
async def test_answer_is_judged_by_its_version(
    answer: HttpExchange, grace_s: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await outcomes(monkeypatch, answer, grace_s=grace_s) == {expected}


async def sent_keys(monkeypatch: pytest.MonkeyPatch, seed: int) -> list[bytes]:
    """Return the API keys of the first five requests of a load."""
    keys: list[bytes] = []

    async def send(_address: ServerAddress, raw: bytes, _timeout_s: float) -> HttpExchange:
        keys.append(raw.partition(b"x-api-key: ")[2].partition(b"\r\n")[0])
        return exchange(OLD, BODIES[OLD])

    monkeypatch.setattr(rollout_load, "send_raw", send)
    load = VersionedLoad(ServerAddress("host", 1), VECTORS, ["name"], rate=1_000, seed=seed)
    load.start()
    while len(keys) < 5:
        await asyncio.sleep(0.001)
    await load.stop()
    return keys[:5]


async def test_every_request_has_a_new_key_from_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = await sent_keys(monkeypatch, 1)
    assert len(set(keys)) == 5
    assert keys == await sent_keys(monkeypatch, 1)
    assert keys != await sent_keys(monkeypatch, 2)


def test_read_version_finds_the_header() -> None:
    assert read_version(exchange(NEW, b"")) == NEW
    assert read_version(HttpExchange(200, b"HTTP/1.1 200 OK", b"")) == ""


def test_versions_of_one_model_have_other_graphs(tmp_path: Path) -> None:
    digests = set()
    for version, seed in ((OLD, 1), (NEW, 2)):
        write_version(tmp_path, MODEL, version, seed)
        manifest = ArtifactManifest.read(find_artifact(tmp_path, MODEL, version))
        digests.add(manifest.files["graphs/cpu.onnx"].sha256)
    assert len(digests) == 2
    assert find_artifact(tmp_path, MODEL, "latest").name == NEW


def test_config_allows_pulls(tmp_path: Path) -> None:
    document = yaml.safe_load(write_own_config(tmp_path).read_text())
    ingress = document["applications"][0]["deployments"][0]
    assert ingress["user_config"]["builds"]["allow_pull"] is True


def test_table_and_goals_have_the_measured_values() -> None:
    answers = [
        RolloutAnswer("name", "steady", OLD, outcome, 200, 1.0, 1.5)
        for outcome in ("right", "right", "stale")
    ]
    step = summarize_step("steady", answers, {"steady": "encoder"})
    results = RolloutResults(
        rate=60, steps=[step], split_requests=100, split_percent=9.0, statuses={"200": 3}
    )
    assert build_table(results).rows == [("steady", "encoder", "3", "0", "0", "1", "0.50")]
    assert [goal.reached for goal in evaluate_goals(results)] == [True, False, True]


def split(percent: float, requests: int) -> RolloutResults:
    return RolloutResults(
        rate=60, steps=[], split_requests=requests, split_percent=percent, statuses={}
    )


@pytest.mark.parametrize(
    ("percent", "requests", "reached"),
    [
        (13.9, 900, True),  # one standard deviation of 900 requests is one point
        (6.1, 900, True),
        (14.1, 900, False),
        (11.1, 14_400, False),
        (0.0, 0, None),
    ],
)
def test_bound_of_the_split_follows_the_number_of_requests(
    percent: float, requests: int, reached: bool | None
) -> None:
    assert evaluate_goals(split(percent, requests))[-1].reached is reached
